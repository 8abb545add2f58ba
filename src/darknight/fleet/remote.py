"""dk.connect: the workers of a fleet file."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from darknight.fleet.file import WorkerEntry, read_fleet_file
from darknight.fleet.fleet import Fleet
from darknight.fleet.member import Member, quoted
from darknight.wire import LinkClosed
from darknight.wire.grpc_link import GrpcLink
from darknight.wire.grpc_link import connect as open_link
from darknight.wire.identity import ENCLAVE, KEY_FILE, Identity
from darknight.wire.shared_memory import Host

_log = logging.getLogger("darknight.fleet")


def connect(
    path: str | Path,
    *,
    insecure_one_operator: bool = False,
    patience: float | None = None,
) -> Fleet:
    """The fleet of a file (darknight.fleet.file says what is in one). Close it, or use it as a context.

    Workers that cannot be reached join when they can, as long as one is there; otherwise FleetError says why not.
    insecure_one_operator: allow one operator to hold all shares. Nothing is hidden from it then; reports say so.
    patience: seconds a worker may take for a task, instead of a deadline that follows from what was measured.

    Guarantees: a link is opened only to whoever has the key of the certificate in the file, under keys of its own, and
        only if it says that it belongs to the operator in the file (contract test: tests/fleet/test_connect.py). A
        worker of ours speaks TLS 1.3 and nothing older; one that does not weakens its own link and no other.
    Assumes: that the file is right about operators: a worker that lies about its operator is believed.
    """
    file = read_fleet_file(path)
    known = (Path(file.identity) / KEY_FILE).exists()
    identity = Identity.load_or_create(file.identity, ENCLAVE)
    if not known:
        _log.warning("a new identity was made in %s; give its certificate to the operators", file.identity)
    host = Host()
    members = [Member(entry.name, entry.operator, partial(open_entry, entry, identity, host)) for entry in file.workers]
    fleet = Fleet(
        members,
        insecure_one_operator=insecure_one_operator,
        patience=patience,
        board=host.board,
        on_close=host.close,
    )
    for worker, name in enumerate(fleet.names):
        if not fleet.ready(worker):
            _log.warning("worker %d (%s) is not there yet: %s", worker, name, fleet.trouble(worker))
    return fleet


def open_entry(entry: WorkerEntry, identity: Identity, host: Host | None, *, timeout: float = 10.0) -> GrpcLink:
    """A link to the worker of an entry. Raises LinkError; also if it is another operator's than the entry says."""
    link = open_link(
        entry.address,
        certificate=entry.certificate,
        identity=identity,
        host=host if entry.shared_memory is not None else None,
        shared_memory=entry.shared_memory,
        timeout=timeout,
    )
    if link.welcome.operator != entry.operator:
        link.close()
        raise LinkClosed(
            f"it says that its operator is {quoted(link.welcome.operator)!r}; the fleet file says {entry.operator!r}. "
            "Correct the file, or the worker's --operator"
        )
    return link
