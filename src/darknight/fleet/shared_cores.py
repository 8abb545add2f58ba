"""Sharing this machine's cores with workers.

torch's threads (OpenMP, GNU's) wait for each other by spinning for milliseconds, which is right as long as every thread
has a core. With workers on the same machine they do not: a thread that spins holds the core that the other one needs,
and the enclave's own work takes several times as long. The environment variable OMP_WAIT_POLICY=PASSIVE ends that, but
is read when torch is loaded, before anybody knows of a local fleet. OpenMP also gives up spinning when it has more
threads than the machine has cores; so this makes some more, that do nothing.
"""

from __future__ import annotations

import threading

import torch

_LARGE_ENOUGH = 1 << 20  # elements that torch splits between threads


class Bystanders:
    """Threads of OpenMP that only exist, from now until `leave`. Results do not depend on them."""

    def __init__(self) -> None:
        self._over = threading.Event()
        there = threading.Event()

        def stand() -> None:
            torch.ones(_LARGE_ENOUGH).add_(1.0)  # a thread of Python gets a team of its own for its first operation
            there.set()
            self._over.wait()

        threading.Thread(target=stand, name="darknight-bystanders", daemon=True).start()
        there.wait()

    def leave(self) -> None:
        self._over.set()
