"""How fast are sealing and opening? Records of 3 kB, 150 kB and 4 MB, one core. Target for the larger two: 500 MB/s.

The files are in memory where the machine has a place for that (/dev/shm): what is measured is the work, not the disk.
Beside it, what nobody can do without: AES-GCM alone, over memory, and copying that memory once. Records are opened in a
random order, as training does. Seconds are those that the process computed, so other programs hardly count. Exits with
1 if a target is missed.

python benchmarks/sealing.py
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from timing import best

from darknight.trust.fresh import fresh_key, fresh_order
from darknight.trust.key_file import DataKey
from darknight.trust.sealing import SealedRecords, write_sealed

TOTAL = 256 << 20
BATCH = 1 << 20
SIZES = {"3 kB": 3 * 32 * 32, "150 kB": 3 * 224 * 224, "4 MB": 1 << 22}
LARGE = ("150 kB", "4 MB")
TARGET = 500.0
MEMORY = Path("/dev/shm")


def main() -> None:
    missed = []
    print(f"{'':8} {'sealing':>10} {'opening':>10} {'AES-GCM there':>14} {'and back':>9} {'copying':>9}   MB/s")
    for name, size in SIZES.items():
        speeds = measured(size)
        print(
            f"{name:8} {speeds[0]:10.0f} {speeds[1]:10.0f} {speeds[2]:14.0f} {speeds[3]:9.0f} {speeds[4]:9.0f}",
            end="   ",
        )
        print(f"sealing {speeds[0] / speeds[2]:.2f} and opening {speeds[1] / speeds[3]:.2f} of AES-GCM", end=", ")
        print(f"{speeds[0] / speeds[4]:.2f} and {speeds[1] / speeds[4]:.2f} of copying")
        missed += [f"{name}: {speed:.0f} MB/s" for speed in speeds[:2] if name in LARGE and speed < TARGET]
    if missed:
        sys.exit(f"below {TARGET:.0f} MB/s: {', '.join(missed)}")


def measured(size: int) -> list[float]:
    """MB/s of sealing, opening, AES-GCM there and back, and copying."""
    count, together = TOTAL // size, max(1, BATCH // size)
    batch = np.frombuffer(np.random.default_rng(0).bytes(together * size), dtype=np.uint8).reshape(together, size)
    batches = [batch[: min(together, count - begin)] for begin in range(0, count, together)]
    key, cipher, order = DataKey.fresh(), AESGCM(fresh_key()), fresh_order(count)
    sealed, opened = bytearray(size + 16), bytearray(size)

    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as place:
        folder = Path(place) / "sealed"

        def seal() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write_sealed(folder, key, count=count, record_bytes=size, head=b"", records=batches)

        def read() -> None:
            records = SealedRecords(folder, key, manifest=None)
            for begin in range(0, count, together):
                records.read(order[begin : begin + together])

        def encrypt() -> None:
            for index in range(count):
                cipher.encrypt_into(index.to_bytes(12, "big"), batch[index % together].data, None, sealed)

        def decrypt() -> None:
            nonce = (count - 1).to_bytes(12, "big")  # the last one that encrypt left
            for _ in range(count):
                cipher.decrypt_into(nonce, sealed, None, opened)

        def copy() -> None:
            for index in range(count):
                opened[:] = batch[index % together].data

        seconds = best(seal, read, encrypt, decrypt, copy, times=5, clock=time.process_time)
    return [count * size / 1e6 / each for each in seconds]


if __name__ == "__main__":
    main()
