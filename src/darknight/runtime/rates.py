"""How fast this machine does what a layer takes of the enclave, measured once in a process and in less than a second.

Each rate is the best of a few runs of the function that a layer call uses, on one thread and in seconds of the
processor, over tensors of a megabyte or more. The runs take turns: a tenth of a second in which the machine had other
things to do (a process that ends, a kernel that looks for large pages) must not decide where layers go; and each finds
other data in the caches than its own, as it does in a step. Only messages are not measured as they are, because that
takes a worker: a layer call without workers is measured, and a message is a part of it (docs/adr/0042).
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from darknight.coding import Field, Scheme, draw_code, field
from darknight.coding.fixed_point import survey
from darknight.integrity import Rounded, verified_forward, verified_grad_weight, weighing_for
from darknight.ops import Conv, Linear
from darknight.ops.cost import Rates, Sharing
from darknight.randomness import Randomness, Rounding, words_of
from darknight.runtime.runtime import Runtime
from darknight.runtime.threads import one_thread

_TIMES = 3
_LONGEST = 0.7  # seconds after which no other round begins, so that all of them take less than one
_BATCH = 8
_SIDES = 28, 56  # of what is multiplied, and of what is masked and weighed
_CHANNELS = 64
_COPIED = 32 << 20
_EXPONENT = 7  # of values below 8: ten bits
_LARGEST = 1 << 10
_SCHEME = Scheme(inputs=4, colluders=1)
_PASSES = 3
_MESSAGE = 0.65  # of a call: headers, memory, and taking the answer
_RECORD = 1 << 16  # bytes that are sealed at once
_RECORDS = 64
_TAG = 16


def sharing_of(scheme: Scheme, elsewhere: float = 0.0) -> Sharing:
    """What decides the costs of sending under a scheme. elsewhere: as in Sharing."""
    parity = scheme.integrity in ("parity", "both")
    return Sharing(
        inputs=scheme.inputs,
        colluders=scheme.colluders,
        workers=scheme.workers,
        computing=scheme.workers if parity else scheme.inputs + scheme.colluders + scheme.spares,
        answering=scheme.base_workers,
        training=scheme.training,
        width=4 if isinstance(scheme.arithmetic, Field) else scheme.arithmetic.dtype.itemsize,
        checked=scheme.integrity in ("freivalds", "both"),
        gradients_checked=scheme.integrity != "off",
        seeded=scheme.colluders if isinstance(scheme.arithmetic, Field) and scheme.mixing == "systematic" else 0,
        elsewhere=elsewhere,
    )


Run = Callable[[], object]
Runs = dict[str, tuple[Run, int]]  # by rate, with how many bytes, numbers or flops it is for


@functools.cache
def measured_rates() -> Rates:
    """Of this machine, as it is now; the same for the rest of the process."""
    with one_thread(), torch.no_grad(), torch.autocast("cpu", enabled=False), Runtime(_SCHEME, None) as runtime:
        x, large = (torch.linspace(-7, 7, _BATCH * _CHANNELS * n * n).view(_BATCH, _CHANNELS, n, n) for n in _SIDES)
        source, target = (torch.ones(_COPIED, dtype=torch.uint8) for _ in range(2))  # they do not fit a cache
        runs: Runs = {
            "product": _products(x, groups=1),
            "grouped": _products(x, groups=_CHANNELS),
            "copy": (lambda: target.copy_(source), _COPIED),
            "survey": (lambda: survey(large.flatten(2), _EXPONENT), large.numel()),
            **_masking(large),  # of what was looked at just now, as in a layer call
            "rounding": (lambda: words_of(Rounding(1, 2), large.shape), large.numel()),  # and written
            **_checks(x, large),
            "link": _sealed(),
            "call": (_call(runtime), 1),
        }
        seconds = _seconds({name: run for name, (run, _) in runs.items()})
        rates = {name: seconds[name] / count for name, (_, count) in runs.items()}
        # A check takes something whatever it checks, and one that folds weighs too.
        count = runs["fold"][1]
        rates["weigh"] = max(0.0, seconds["weigh"] - seconds["check"]) / runs["weigh"][1]
        rates["fold"] = max(0.0, seconds["fold"] - seconds["check"] - count * rates["weigh"]) / count
        return Rates(**rates, message=_MESSAGE * rates["call"])


def _products(x: Tensor, *, groups: int) -> tuple[Run, int]:
    """A convolution, there and back, and its flops."""
    w = torch.full((_CHANNELS, _CHANNELS // groups, 3, 3), 0.1)
    op = Conv.make((3, 3), padding=1, groups=groups)

    def passes() -> None:
        y = op.forward(x, w)
        op.grad_input(y, w, tuple(x.shape))
        op.grad_weight(x, y, tuple(w.shape))

    return passes, _PASSES * op.flops(tuple(x.shape), tuple(w.shape))


def _masking(x: Tensor) -> Runs:
    """An encode, its noise included, and a decode with the sums of its check, with their bytes.

    As in a layer call they write to memory that was used before.
    """
    randomness = Randomness.from_operating_system()
    arithmetic = _SCHEME.arithmetic
    assert isinstance(arithmetic, Field)
    code, prime = draw_code(_SCHEME, randomness.fresh()), arithmetic.prime
    shares = [torch.ones(_BATCH // _SCHEME.inputs, *x.shape[1:], dtype=torch.int32) for _ in range(_SCHEME.workers)]
    rooms = {worker: share for worker, share in enumerate(shares) if worker not in code.A.carriers}
    answers = {seat: shares[seat] for seat in code.A.base}
    _, weighing = weighing_for(Conv.make((1, 1)), tuple(x.shape), prime, randomness.fresh())
    floats = torch.empty_like(x)

    def encode() -> object:
        return field.encode_values(
            code.A,
            x,
            _EXPONENT,
            None,
            largest=_LARGEST,
            prime=prime,
            stream=randomness.fresh(),
            keep=False,
            row=0,
            rooms=rooms,
        )

    def decode() -> object:
        found = field.decode_weighed(code.A, answers, prime, _EXPONENT, _BATCH, weighing, None, floats)
        return found or field.decode_values(code.A, answers, prime, _EXPONENT, _BATCH)

    share = shares[0].nbytes
    moved = x.nbytes + (2 * _SCHEME.colluders + len(rooms)) * share
    return {"encode": (encode, moved), "decode": (decode, x.nbytes + len(answers) * share)}


def _checks(x: Tensor, large: Tensor) -> Runs:
    """A check with the numbers that it weighs, one with the positions of groups that it folds, one of nearly none."""
    randomness = Randomness.from_operating_system()
    prime = Field().prime
    small, ones = Conv.make((3, 3)), torch.ones(1, 1, 3, 3, dtype=torch.int32)
    nine = torch.full((1, 1, 1, 1), 9, dtype=torch.int32)
    # Weights of one, and one channel of results: the sum of all, which is exact and made in no time.
    op, w, inputs = Conv.make((1, 1)), torch.ones(1, _CHANNELS, 1, 1, dtype=torch.int32), large.round()
    y = inputs.sum(1, keepdim=True).to(torch.int32)
    integers = x.round().to(torch.int32)
    depthwise, shape = Conv.make((3, 3), padding=1, groups=_CHANNELS), (_CHANNELS, 1, 3, 3)
    gw = depthwise.grad_weight(integers.double(), integers.double(), shape).to(torch.int32)

    def weigh() -> object:
        return verified_forward(op, y, Rounded(inputs, 0), w, prime, randomness.fresh())

    def fold() -> object:
        return verified_grad_weight(depthwise, gw, integers, integers, shape, prime, randomness.fresh())

    def check() -> object:
        return verified_forward(small, nine, ones, ones, prime, randomness.fresh())

    # Each number is a position of a group of its own.
    return {"weigh": (weigh, inputs.numel() + y.numel()), "fold": (fold, 2 * prod(x.shape)), "check": (check, 1)}


def _sealed() -> tuple[Run, int]:
    """Records that are sealed, sent through a socket, received and opened, with twice their bytes: both ends are here.

    They are small enough for one thread to send and then receive them. The key protects nothing.
    """
    cipher, record = AESGCM(bytes(32)), bytes(_RECORD)
    sealed, received, opened = (memoryview(bytearray(_RECORD + size)) for size in (_TAG, _TAG, 0))

    def run() -> None:
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            for number in range(_RECORDS):
                nonce, sent, come = number.to_bytes(12, "big"), 0, 0
                cipher.encrypt_into(nonce, record, None, sealed)
                while come < len(sealed):
                    with suppress(BlockingIOError):  # it is full: then there is something to receive
                        sent += here.send(sealed[sent:]) if sent < len(sealed) else 0
                    come += there.recv_into(received[come:])
                cipher.decrypt_into(nonce, received, None, opened)

    return run, 2 * _RECORDS * _RECORD


def _call(runtime: Runtime) -> Run:
    """A layer call of next to nothing, in the enclave alone."""
    x, w, layer = torch.ones(2, 2), torch.ones(2, 2), runtime.layer("")
    return lambda: runtime.forward(layer, Linear(), x, w, dtype=torch.float32, keep=True)


def _seconds(runs: Mapping[str, Run]) -> dict[str, float]:
    """By name, the best of a few, which take turns after one that is not counted; of fewer if they take long."""
    for run in runs.values():
        run()
    best, since = dict.fromkeys(runs, float("inf")), time.perf_counter()
    for _ in range(_TIMES):
        for name, run in runs.items():
            begun = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - begun)
        if time.perf_counter() - since > _LONGEST:
            break
    return best
