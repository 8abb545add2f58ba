"""What an enclave is set up to do. Its digest is in the evidence, so a client knows it before it releases a key."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from darknight import __version__
from darknight.fleet.file import FleetFile
from darknight.wire.jobs import CONFIGURATION, dump


@dataclass(frozen=True)
class KnownWorker:
    """Who gets shares: the certificate is what counts."""

    name: str
    operator: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """insecure_one_operator: one operator may hold all shares. No code of a client is ever run: there is no setting."""

    workers: tuple[KnownWorker, ...]
    insecure_one_operator: bool
    version: str = __version__

    @classmethod
    def of(cls, file: FleetFile, *, insecure_one_operator: bool) -> Configuration:
        workers = tuple(KnownWorker(entry.name, entry.operator, entry.fingerprint) for entry in file.workers)
        return cls(workers=workers, insecure_one_operator=insecure_one_operator)

    def encode(self) -> bytes:
        return dump({"format": CONFIGURATION, **asdict(self)})
