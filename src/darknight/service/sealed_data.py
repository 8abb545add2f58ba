"""Sealed data as the enclave trains on it."""

from __future__ import annotations

from pathlib import Path

from darknight.data import Dataset, unpack_dataset
from darknight.trust.key_file import DataKey
from darknight.trust.sealing import SealedRecords


def open_dataset(folder: Path, key: DataKey, *, manifest: bytes) -> Dataset:
    """The dataset that is sealed in `folder`; each batch reads, verifies and opens its own records and no others.

    manifest: the SHA-256 of the manifest, as the client named it when it released the key.

    Guarantees: the same batches, labels and card as in training on the plain files (contract test:
    tests/service/test_sealed_data.py).
    """
    records = SealedRecords(folder, key, manifest=manifest)
    return unpack_dataset(records.head, records)
