"""What it costs the enclave that links are encrypted, and what a pad inside encode and decode would cost instead.

A share of `MIB` goes to one worker and an answer as large comes back. In seconds of this process's processor, one
thread for what is arithmetic:

- pipe: a sealed pipe to a real worker process, as links are;
- grpc: gRPC with mutual TLS to another, as links are where no pipe can be had;
- gcm: AES-256-GCM over the same bytes in both directions and nothing else, the least that any encrypted link costs;
- pad: a keystream of AES-256-CTR for this worker, added modulo p while the share is made, and subtracted while the
  answer is decoded: the difference to the same passes without it, plus the keystream.

Run: python benchmarks/sealed_links.py
"""

from __future__ import annotations

import os

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from timing import best

from darknight.bench import measure_transports
from darknight.coding import PRIME_28
from darknight.kernels import combine
from darknight.randomness import Randomness, uniform_below
from darknight.runtime.threads import one_thread

MIB = 64
_RECORD = 1 << 14  # of TLS


def gcm(nbytes: int) -> None:
    """Record by record; opening costs what sealing does. The key protects nothing."""
    key, record, out = os.urandom(32), bytes(_RECORD), bytearray(_RECORD + 16)
    for number in range(2 * nbytes // _RECORD):
        encryptor = Cipher(AES(key), GCM(number.to_bytes(12, "big"))).encryptor()
        encryptor.update_into(record, out)
        encryptor.finalize()


def main() -> None:
    count = (MIB << 20) // 4
    randomness = Randomness.from_operating_system()
    x, noise, answer, out, pad = (
        uniform_below(randomness.fresh(), (count,), PRIME_28).to(torch.int32) for _ in range(5)
    )
    field, reach = PRIME_28, (0, PRIME_28 - 1)

    def share(padded: bool) -> None:
        sources = [x, noise, pad] if padded else [x, noise]
        ones = [[1] * len(sources)]
        combine(ones, sources, field, out=out.unsqueeze(0), centred=False, ranges=[reach] * len(sources))

    def decode(padded: bool) -> None:
        sources, row = ([answer, noise, pad], [1, -1, -1]) if padded else ([answer, noise], [1, -1])
        combine([row], sources, field, out=out.unsqueeze(0), centred=True, ranges=[reach] * len(sources))

    with one_thread():
        sealing, plain_share, padded_share, plain_decode, padded_decode, keystream = best(
            lambda: gcm(MIB << 20),
            lambda: share(False),
            lambda: share(True),
            lambda: decode(False),
            lambda: decode(True),
            lambda: uniform_below(randomness.fresh(), (count,), field, out=pad),
        )
    padding = padded_share - plain_share + padded_decode - plain_decode + 2 * keystream
    transports = measure_transports(MIB << 20)
    print(f"{MIB} MiB there and back, seconds of the enclave's processor, over a copy there and back by shared memory:")
    least = transports.own_shared_memory
    for name, seconds in (
        ("shared memory", least),
        ("sealed pipe", transports.own_pipe),
        ("grpc, mutual TLS", transports.own_grpc_tls),
        ("gcm alone", sealing),
        ("pad, beside a copy", padding + least),
    ):
        print(f"  {name:20} {1e3 * seconds:6.0f} ms  {seconds / least:5.1f}")
    print(f"  of the pad: keystream {2e3 * keystream:.0f} ms, additions {1e3 * (padding - 2 * keystream):.0f} ms")


if __name__ == "__main__":
    main()
