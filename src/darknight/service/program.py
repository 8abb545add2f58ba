"""The program: one enclave, its queue, its door, and one job after another."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from darknight.errors import DarKnightError
from darknight.fleet.file import FleetFile, read_fleet_file
from darknight.fleet.remote import connect
from darknight.service.answering import METHODS, Answers
from darknight.service.configuration import Configuration
from darknight.service.queue import CANCELLED, FAILED, FINISHED, Entry, Queue
from darknight.service.runner import Cancelled, run_job
from darknight.service.sessions import Sessions
from darknight.trust.platforms import Gramine, Provider
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.job_channel import JobServer

_PR_SET_DUMPABLE = 4
_GRACE = 2.0

log = logging.getLogger("darknight.enclave")


@dataclass(frozen=True, kw_only=True)
class EnclaveSettings:
    """fleet: the fleet file. state: the folder of the queue, on a disk that need not be trusted."""

    fleet: Path
    listen: str
    state: Path
    insecure_one_operator: bool = False

    def configuration(self) -> Configuration:
        return Configuration.of(read_fleet_file(self.fleet), insecure_one_operator=self.insecure_one_operator)


def serve(settings: EnclaveSettings, provider: Provider, *, ready: Callable[[str, Configuration], None]) -> None:
    """Serve until SIGINT or SIGTERM, then finish the step and raise KeyboardInterrupt.

    ready: called once, with the address and the configuration, when clients can come.

    Guarantees: no core dump of this process is ever written, and no other process of the same account may read its
        memory (contract test: tests/service/test_no_plaintext.py::test_a_crash_leaves_no_core).
    """
    no_core_dumps(inside_gramine=isinstance(provider, Gramine))
    file = read_fleet_file(settings.fleet)
    configuration = settings.configuration()
    identity = Identity.create(ENCLAVE)  # of this run, for clients; workers know the one of the fleet file
    sessions = Sessions(provider, identity, configuration.encode())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts with &
    signal.signal(signal.SIGTERM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
    with Queue(settings.state, workers=len(file.workers)) as queue:
        answers = Answers(queue, sessions, workers=len(file.workers))
        server = JobServer(listen=settings.listen, identity=identity, methods=METHODS, answering=answers)
        try:
            ready(server.start(), configuration)
            while True:
                if (entry := queue.next(timeout=0.5)) is not None:
                    _run(queue, entry, settings, file)
        finally:
            server.stop(_GRACE)


def _run(queue: Queue, entry: Entry, settings: EnclaveSettings, file: FleetFile) -> None:
    log.info("job %d (%s) begins", entry.number, entry.name)
    try:
        run_job(entry, lambda: connect(file.path, insecure_one_operator=settings.insecure_one_operator))
    except Cancelled:
        queue.over(entry, CANCELLED)
    except DarKnightError as error:
        queue.over(entry, FAILED, str(error))
        log.warning("job %d failed: %s", entry.number, error)
    except Exception as error:
        # Its text could have data values; its kind and place have none.
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place else "nowhere"
        queue.over(entry, FAILED, f"a defect of DarKnight: {type(error).__name__} at {where}")
        log.error("job %d failed by a defect: %s at %s", entry.number, type(error).__name__, where)
    else:
        queue.over(entry, FINISHED)
        log.info("job %d is finished", entry.number)


def no_core_dumps(*, inside_gramine: bool = False) -> None:
    """A core dump would hold keys and data.

    inside_gramine: its kernel writes no core dumps and has no prctl; the host cannot read an enclave that is not in
    debug mode, so neither can its own core dumps.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0 and not (inside_gramine and ctypes.get_errno() == errno.ENOSYS):
        raise DarKnightError("core dumps cannot be switched off here (prctl). Run the enclave on Linux.")
