"""Whose answer is wrong? Each worker's own answer is checked against its own share.

A check of the decoded result says that somebody lied, and not who: one wrong answer enters every decoded element. But
an answer is itself a result, of the share that the worker was given, and the enclave can make that share again.

Guarantees: Field: whoever is named gave an answer that is not the product of its share and its weights, without
    exception; a wrong answer escapes being named with probability at most 2^-40. Real: an honest answer is named once
    in 1e9 calls, and an error of more than integrity.real says is certain does not escape. Nobody is named for a
    result that left the field's range: shares are residues, which wrap around as they like, and are checked modulo the
    prime alone. Contract tests: tests/integrity/test_blame.py.
Assumes: what freivalds and real assume; shares and weights are those that were sent to this worker.
Leaks: to the worker, that it was found out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from darknight.errors import IntegrityError
from darknight.integrity import freivalds, real
from darknight.ops import BilinearOp
from darknight.ops.field import centred
from darknight.ops.op import Shape
from darknight.randomness import Stream
from darknight.types import Pass


@dataclass(frozen=True, eq=False, kw_only=True)
class Given:
    """What a worker was given for one pass: weights, and the share of x or of delta, or both; x_shape of its share."""

    op: BilinearOp
    kind: Pass
    w: Tensor
    x_shape: Shape
    x: Tensor | None = None
    delta: Tensor | None = None


def right_in_field(given: Given, answer: Tensor, prime: int, stream: Stream) -> bool:
    """Whether the residues are the product of what the worker was given, modulo the prime."""
    op, y, w = given.op, _near_zero(answer, prime), given.w
    x, delta = (None if share is None else _near_zero(share, prime) for share in (given.x, given.delta))
    how = {"wraps": True, "further": True}
    try:
        if given.kind is Pass.FORWARD:
            freivalds.verified_forward(op, y, _there(x), w, prime, stream, **how)
        elif given.kind is Pass.GRAD_INPUT:
            freivalds.verified_grad_input(op, y, _there(delta), w, given.x_shape, prime, stream, **how)
        else:
            shape = tuple(w.shape)
            freivalds.verified_grad_weight(op, y, _there(x), _there(delta), shape, prime, stream, **how)
    except IntegrityError:
        return False
    return True


def right_in_floats(given: Given, answer: Tensor, spread: float, stream: Stream) -> bool:
    """Whether the floats are the product of what the worker was given, up to errors of `spread`.

    spread: real.answer_spreads or real.equation_spreads, of this worker.
    """
    op, x, delta, w = given.op, given.x, given.delta, given.w
    try:
        if given.kind is Pass.FORWARD:
            real.verified_forward(op, answer, _there(x), w, stream, spread=spread)
        elif given.kind is Pass.GRAD_INPUT:
            real.verified_grad_input(op, answer, _there(delta), w, given.x_shape, stream, spread=spread)
        else:
            real.verified_grad_weight(op, answer, _there(x), _there(delta), tuple(w.shape), stream, spread=spread)
    except IntegrityError:
        return False
    return True


def equal_in_field(answer: Tensor, own: Tensor, prime: int) -> bool:
    """Whether an answer is what the enclave computed itself, modulo the prime."""
    return torch.equal(answer.to(torch.int64).remainder(prime), own.to(torch.int64).remainder(prime))


def equal_in_floats(answer: Tensor, own: Tensor, spread: float) -> bool:
    """Whether each element of an answer is what the enclave computed itself, up to errors of `spread`.

    Finer than Freivalds, which weighs a single element among many; but the enclave has to do all the work. Errors that
    are within the tolerance everywhere and too large on the whole are found as well.
    """
    if not own.numel():
        return True
    both = 2 * spread  # two honest answers: the worker's, and the enclave's
    error, width = (answer.to(torch.float64) - own.to(torch.float64)).abs(), real.deviations(own.numel())
    return bool(
        error.max() <= width * both and error.square().mean().sqrt() <= both * (1 + width / math.sqrt(own.numel()))
    )


def _near_zero(share: Tensor, prime: int) -> Tensor:
    return centred(share.to(torch.float64), prime)


def _there(share: Tensor | None) -> Tensor:
    assert share is not None, "a pass without its operand"
    return share
