"""Sealed data as the enclave trains on it, and predicts with it."""

from __future__ import annotations

from pathlib import Path

from darknight.data import Dataset, Unlabelled, unpack_dataset, unpack_either
from darknight.trust.key_file import DataKey
from darknight.trust.sealing import SealedRecords


def open_dataset(folder: Path, key: DataKey, *, manifest: bytes) -> Dataset:
    """The dataset that is sealed in `folder`; each batch reads, verifies and opens its own records and no others.

    manifest: the SHA-256 of the manifest, as the client named it when it released the key.

    Guarantees: the same batches, labels and card as in training on the plain files (contract test:
    tests/service/test_sealed_data.py). Data without labels are refused: nothing can be trained on them.
    """
    records = SealedRecords(folder, key, manifest=manifest)
    return unpack_dataset(records.head, records)


def open_either(folder: Path, key: DataKey, *, manifest: bytes) -> Dataset | Unlabelled:
    """The same for predictions, which need no labels."""
    records = SealedRecords(folder, key, manifest=manifest)
    return unpack_either(records.head, records)
