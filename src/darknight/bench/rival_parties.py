"""CrypTen's two parties and TenSEAL's server, started in the environment that has them, ready to take turns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from darknight.bench import crypten_party, tenseal_party
from darknight.bench.rival_process import MissingError, RivalProcess, Turn

Run = Callable[[], Turn]


def arrays_of(model: nn.Module, **data: Tensor) -> dict[str, Any]:
    """Parameters by their names, and data, as the programs of the rivals read them."""
    return {name: value.detach().numpy() for name, value in (*model.named_parameters(), *data.items())}


@contextmanager
def crypten(python: Path | None, pooling: str, arrays: dict[str, Any]) -> Iterator[Run]:
    """Both parties, which begin a step together; the slower one's time counts. Raises MissingError."""
    with _folder(python, arrays) as (interpreter, folder), ExitStack() as stack:
        parties = [
            stack.enter_context(
                RivalProcess(
                    interpreter,
                    crypten_party.__file__,
                    [str(folder / "arrays.npz"), pooling, str(rank), str(torch.get_num_threads())],
                    words=folder / f"words-{rank}",
                    settings={
                        "WORLD_SIZE": "2",
                        "RANK": str(rank),
                        "RENDEZVOUS": f"file://{folder}/rendezvous",
                        "DISTRIBUTED_BACKEND": "gloo",
                        "GLOO_SOCKET_IFNAME": "lo",
                    },
                )
            )
            for rank in range(2)
        ]
        for party in parties:
            party.ready()

        def run() -> Turn:
            for party in parties:
                party.begin()
            turns = [party.finish() for party in parties]
            return Turn(
                seconds=max(turn.seconds for turn in turns),
                processor_seconds=sum(turn.processor_seconds for turn in turns),
                result=turns[0].result,
            )

        yield run


@contextmanager
def tenseal(python: Path | None, arrays: dict[str, Any]) -> Iterator[Run]:
    """The server, which may use every core. Raises MissingError."""
    with _folder(python, arrays) as (interpreter, folder):
        arguments = [str(folder / "arrays.npz"), str(len(os.sched_getaffinity(0)))]
        with RivalProcess(interpreter, tenseal_party.__file__, arguments, words=folder / "words") as server:
            server.ready()

            def run() -> Turn:
                server.begin()
                return server.finish()

            yield run


@contextmanager
def _folder(python: Path | None, arrays: dict[str, Any]) -> Iterator[tuple[Path, Path]]:
    """The interpreter, and a folder with the arrays."""
    if python is None:
        raise MissingError("no environment with the rivals was named")
    with tempfile.TemporaryDirectory() as name:
        np.savez(Path(name, "arrays.npz"), **arrays)
        yield python, Path(name)
