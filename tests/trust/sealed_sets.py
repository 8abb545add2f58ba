"""Small sealed sets, and the ways in which somebody who stores them could change them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from darknight.trust.key_file import DataKey
from darknight.trust.sealing import HEAD, MANIFEST, RECORDS, SealedRecords, write_sealed

COUNT, RECORD = 23, 37
STRIDE = RECORD + 16
HEAD_TEXT = b"classes: cats and dogs. labels: " + bytes(range(COUNT))


@dataclass(frozen=True)
class Made:
    folder: Path
    key: DataKey
    plain: np.ndarray
    digest: bytes

    def opened(self, *, key=None, manifest=None):
        return SealedRecords(self.folder, key or self.key, manifest=manifest)

    def read(self):
        """Everything, as an enclave would: the head first, then each record."""
        records = self.opened()
        return records.head, records.read(np.arange(len(records)))


def made(folder, *, seed=0, key=None, count=COUNT, record=RECORD, head=HEAD_TEXT, batch=5):
    folder.mkdir(parents=True)
    key = key or DataKey.fresh()
    plain = np.random.default_rng(seed).integers(0, 256, (count, record), dtype=np.uint8)
    batches = (plain[begin : begin + batch] for begin in range(0, count, batch))
    manifest = write_sealed(folder, key, count=count, record_bytes=record, head=head, records=batches)
    return Made(folder, key, plain, manifest.digest)


# --- attacks: each changes `one`; `other` is another set, under the same key ------------------------------------------
def record(made, index):
    content = (made.folder / RECORDS).read_bytes()
    return content[index * STRIDE : (index + 1) * STRIDE]


def rewrite(made, records):
    (made.folder / RECORDS).write_bytes(b"".join(records))


def all_records(made):
    return [record(made, index) for index in range(len((made.folder / RECORDS).read_bytes()) // STRIDE)]


def announce(made, **changes):
    """A manifest with other numbers, written as it must be."""
    path = made.folder / MANIFEST
    words = {**json.loads(path.read_bytes()), **changes}
    path.write_bytes(f"{json.dumps(words, indent=2)}\n".encode())


def swap_two(one, other):
    records = all_records(one)
    records[3], records[11] = records[11], records[3]
    rewrite(one, records)


def rotate(one, other):
    records = all_records(one)
    rewrite(one, records[1:] + records[:1])


def duplicate(one, other):
    records = all_records(one)
    records[7] = records[2]
    rewrite(one, records)


def record_of_another_set(one, other):
    records = all_records(one)
    records[4] = record(other, 4)
    rewrite(one, records)


def all_records_of_another_set(one, other):
    shutil.copy(other.folder / RECORDS, one.folder / RECORDS)


def head_of_another_set(one, other):
    shutil.copy(other.folder / HEAD, one.folder / HEAD)


def manifest_of_another_set(one, other):
    shutil.copy(other.folder / MANIFEST, one.folder / MANIFEST)


def manifest_with_another_id(one, other):
    announce(one, id="ab" * 32)


def cut_short(one, other):
    rewrite(one, all_records(one)[:-1])


def cut_short_and_said_so(one, other):
    rewrite(one, all_records(one)[:-1])
    announce(one, count=COUNT - 1)


def cut_within_a_record(one, other):
    content = (one.folder / RECORDS).read_bytes()
    (one.folder / RECORDS).write_bytes(content[:-1])


def extended(one, other):
    rewrite(one, [*all_records(one), record(one, 0)])


def extended_and_said_so(one, other):
    rewrite(one, [*all_records(one), record(other, 0)])
    announce(one, count=COUNT + 1)


def one_bit_of_a_record(one, other):
    records = all_records(one)
    records[9] = bytes([records[9][0] ^ 1]) + records[9][1:]
    rewrite(one, records)


def one_bit_of_the_head(one, other):
    content = bytearray((one.folder / HEAD).read_bytes())
    content[-20] ^= 4
    (one.folder / HEAD).write_bytes(content)


def head_cut_short(one, other):
    content = (one.folder / HEAD).read_bytes()
    (one.folder / HEAD).write_bytes(content[:-1])


def head_extended(one, other):
    content = (one.folder / HEAD).read_bytes()
    (one.folder / HEAD).write_bytes(content + b"\0")


def records_of_other_sizes(one, other):
    """The same bytes, cut into half as many pieces of twice the size."""
    announce(one, count=1, record_bytes=COUNT * STRIDE - 16)


Attack = Callable[[Made, Made], None]
