"""An enclave's door in this process: real TLS, real gRPC, simulated evidence, and no workers."""

from contextlib import contextmanager
from pathlib import Path

from darknight.service.answering import METHODS, Answers
from darknight.service.configuration import Configuration, KnownWorker
from darknight.service.queue import Queue
from darknight.service.sessions import Sessions
from darknight.trust.simulation import Pretence, SoftwarePlatform
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.job_channel import JobServer
from service.enclaves import OPERATORS, seal, write_data, write_policy

CONFIGURATION = Configuration(
    workers=tuple(KnownWorker(name, name, f"SHA256:{name}") for name in OPERATORS), insecure_one_operator=False
)


class Office:
    """What a client reaches at `address`, and everything behind it."""

    def __init__(
        self,
        folder: Path,
        state: str = "state",
        *,
        pretence: Pretence | None = None,
        configuration: bytes = CONFIGURATION.encode(),
    ) -> None:
        self.folder = folder
        self.platform = SoftwarePlatform(folder / "platform", pretence=pretence)
        self.identity = Identity.create(ENCLAVE)
        self.sessions = Sessions(self.platform, self.identity, configuration)
        self.queue = Queue(folder / state, workers=len(OPERATORS))
        self.answers = Answers(self.queue, self.sessions, workers=len(OPERATORS))
        self.address = ""


@contextmanager
def open_office(folder: Path, state: str = "state", *, answering=None, **settings):
    """answering: wraps what answers, to be a man in the middle or a host that lies. settings: of the Office."""
    office = Office(folder, state, **settings)
    with office.queue:
        answers = office.answers if answering is None else answering(office.answers)
        server = JobServer(listen="127.0.0.1:0", identity=office.identity, methods=METHODS, answering=answers)
        office.address = server.start()
        try:
            yield office
        finally:
            server.stop(0)


def furnish(folder: Path) -> None:
    """Data, sealed, and a policy that accepts the software platform of this folder."""
    seal(folder, write_data(folder))
    SoftwarePlatform(folder / "platform")
    write_policy(folder)
