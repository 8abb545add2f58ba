"""Datasets sealed as the command seals them."""

from dataclasses import dataclass
from pathlib import Path

from darknight.client.seal import Destination, key_beside, seal_dataset
from darknight.data import Dataset, Unlabelled, read_either
from darknight.trust.key_file import KeyFile, read_key_file
from darknight.trust.sealing import Manifest


@dataclass(frozen=True)
class Sealed:
    """data: as it was read. done: what was reported, call by call."""

    folder: Path
    key: Path
    manifest: Manifest
    data: Dataset | Unlabelled
    done: list[int]

    @property
    def key_file(self) -> KeyFile:
        return read_key_file(self.key)


def sealed(source, folder, **settings):
    data, done = read_either(source, **{"seed": 0, **settings}), []
    to = Destination(folder=folder, key=key_beside(folder))
    manifest = seal_dataset(data, to, progress=done.append)
    return Sealed(folder, to.key, manifest, data, done)
