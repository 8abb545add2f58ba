"""Workers of this machine over the two kinds of links that are compared.

shm: tensors go through shared memory, in the clear. sealed: everything goes through gRPC with mutual TLS and sealed
pipes, as between machines, and the enclave encrypts and decrypts it in threads of its own process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from darknight.coding import Scheme
from darknight.errors import UsageError
from darknight.fleet import local_fleet
from darknight.fleet.local import LocalFleet, open_local
from darknight.fleet.member import Member
from darknight.fleet.nursery import Berth, Nursery
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.shared_memory import Host


def fleet_over(links: str, scheme: Scheme, *, patience: float | None = None) -> LocalFleet:
    """As many workers as the scheme needs; see `local_fleet`."""
    if links not in LINKS:
        raise UsageError(f"links {links!r}; needs one of {', '.join(LINKS)}.")
    return LINKS[links](scheme, patience)


def _shared_memory(scheme: Scheme, patience: float | None) -> LocalFleet:
    return local_fleet(scheme, patience=patience)


def _sealed(scheme: Scheme, patience: float | None) -> LocalFleet:
    """Workers without a door to shared memory: nothing but TLS and pipes leads to them."""
    identity = Identity.create(ENCLAVE)
    threads = max(1, len(os.sched_getaffinity(0)) // scheme.workers)
    operators = [f"simulated-{number}" for number in range(scheme.workers)]
    with ExitStack() as failing:
        nursery = Nursery(
            [Berth(operator=operator, threads=threads) for operator in operators], enclave=identity.certificate
        )
        failing.callback(nursery.stop)
        nursery.wait()
        host = Host()
        failing.callback(host.close)
        members = [
            Member(f"local {number}", operator, partial(open_local, nursery, number, identity, None, None))
            for number, operator in enumerate(operators)
        ]
        fleet = LocalFleet(members, nursery=nursery, host=host, recordings=None, patience=patience)
        failing.pop_all()  # from here on the fleet ends them
    return fleet


LINKS: dict[str, Callable[[Scheme, float | None], LocalFleet]] = {"shm": _shared_memory, "sealed": _sealed}
