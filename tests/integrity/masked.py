"""One protected layer call in Real arithmetic, with every worker's answer in hand. For tests of the checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from darknight.coding import Code, Real, Scheme, draw_code, joined, real, virtual_batches
from darknight.coding.fixed_point import largest_magnitude
from darknight.errors import IntegrityError
from darknight.integrity import parity
from darknight.integrity import real as checks
from darknight.ops import BilinearOp
from darknight.ops import real as real_ops
from darknight.randomness import Randomness
from darknight.types import Pass

Answers = Mapping[int, Tensor]


@dataclass
class Call:
    """Masks x and delta; `answers` lets every worker compute, with `weights` other than w for stale ones."""

    scheme: Scheme
    op: BilinearOp
    x: Tensor
    w: Tensor
    delta: Tensor
    randomness: Randomness

    def __post_init__(self) -> None:
        arithmetic = self.scheme.arithmetic
        assert isinstance(arithmetic, Real)
        self.dtype = arithmetic.dtype
        self.count = self.x.shape[0]
        self.code: Code = draw_code(self.scheme, self.randomness.fresh())
        self.w = self.w.to(self.dtype)
        grid = real.grid_for(self.code.A, arithmetic, largest_magnitude(self.x) or 1.0)
        noise = self.randomness.fresh()
        self.shares, self.x = real.encode_batch(self.code.A, self.x, grid, noise, self.dtype)
        self.sent_x = checks.Sent.of_shares(self.code.A, grid, self.dtype)
        if self.code.masks_gradients:
            grid = real.grid_for(self.code.B, arithmetic, largest_magnitude(self.delta) or 1.0)
            noise = self.randomness.fresh()
            self.deltas, self.delta = real.encode_batch(self.code.B, self.delta, grid, noise, self.dtype)
            self.sent_delta = checks.Sent.of_shares(self.code.B, grid, self.dtype)
        else:
            groups = virtual_batches(self.delta, self.scheme.inputs)
            rows = [tuple(float(value) for value in row) for row in self.code.B.data]
            self.deltas = torch.stack([real_ops.combine_clear(row, groups.to(self.dtype)) for row in rows])
            self.delta = self.delta.to(self.dtype)
            self.sent_delta = checks.Sent.in_the_clear(self.op, self.code.B, self.delta, self.dtype)
        self.share_shape = tuple(self.shares[0].shape)
        self.delta_shape = tuple(self.deltas[0].shape)

    def mixing(self, kind: Pass):
        return self.code.A if kind is Pass.FORWARD else self.code.B

    def sent(self, kind: Pass) -> checks.Sent:
        return self.sent_x if kind is Pass.FORWARD else self.sent_delta

    def answers(self, kind: Pass, weights: Tensor | None = None) -> dict[int, Tensor]:
        w = self.w if weights is None else weights.to(self.dtype)
        if kind is Pass.FORWARD:
            return {j: real_ops.forward(self.op, self.shares[j], w) for j in range(self.scheme.workers)}
        if kind is Pass.GRAD_INPUT:
            return {
                j: real_ops.grad_input(self.op, self.deltas[j], w, self.share_shape) for j in range(self.scheme.workers)
            }
        return {
            j: real_ops.grad_weight(self.op, self.shares[j], self.deltas[j], tuple(self.w.shape))
            for j in self.code.grad_rows
        }

    def decoded(self, kind: Pass, answers: Answers) -> Tensor:
        if kind is Pass.GRAD_WEIGHT:
            return real.decode_gradient(self.code, answers)
        return joined(real.decode(self.mixing(kind), answers), self.count)

    def truth(self, kind: Pass) -> Tensor:
        x, w, delta = (tensor.double() for tensor in (self.x, self.w, self.delta))
        if kind is Pass.FORWARD:
            return self.op.forward(x, w)
        if kind is Pass.GRAD_INPUT:
            return self.op.grad_input(delta, w, tuple(x.shape))
        return self.op.grad_weight(x, delta, tuple(w.shape))

    # --- the checks -------------------------------------------------------------------------------------------------
    @cached_property
    def reaches(self) -> dict[Pass, checks.Reach]:
        kinds = (Pass.FORWARD, Pass.GRAD_INPUT)
        return {kind: checks.Reach.of(self.op, kind, self.w, self.share_shape) for kind in kinds}

    def answer_spreads(self, kind: Pass) -> dict[int, float]:
        if kind is Pass.GRAD_WEIGHT:
            arguments = (self.sent_x, self.sent_delta, self.share_shape, self.delta_shape)
            return checks.equation_spreads(self.op, self.code, *arguments)
        return checks.answer_spreads(self.reaches[kind], self.sent(kind))

    def spread(self, kind: Pass, available=None) -> float:
        if kind is Pass.GRAD_WEIGHT:
            arguments = (self.sent_x, self.sent_delta, self.share_shape, self.delta_shape)
            return checks.gradient_spread(self.op, self.code, *arguments)
        return checks.decoded_spread(self.reaches[kind], self.sent(kind), available)

    def verified(self, kind: Pass, result: Tensor, spread: float | None = None) -> Tensor:
        spread = self.spread(kind) if spread is None else spread
        stream = self.randomness.fresh()
        if kind is Pass.FORWARD:
            return checks.verified_forward(self.op, result, self.x, self.w, stream, spread=spread)
        if kind is Pass.GRAD_INPUT:
            shape = tuple(self.x.shape)
            return checks.verified_grad_input(self.op, result, self.delta, self.w, shape, stream, spread=spread)
        shape = tuple(self.w.shape)
        return checks.verified_grad_weight(self.op, result, self.x, self.delta, shape, stream, spread=spread)

    def passes(self, kind: Pass, result: Tensor, spread: float | None = None) -> bool:
        return accepts(lambda: self.verified(kind, result, spread), kind, "freivalds")

    def agree(self, kind: Pass, answers: Answers, times: float = 1.0) -> bool:
        """Whether parity accepts the answers, with tolerances multiplied."""
        spread = {worker: times * value for worker, value in self.answer_spreads(kind).items()}
        return accepts(
            lambda: parity.verified_real_answers(self.mixing(kind), answers, kind, spread=spread), kind, "parity"
        )


def accepts(verify: Callable[[], object], kind: Pass, check: str) -> bool:
    """Whether a check gives its result back; a refusal must name the pass and the check."""
    refusal = None
    try:
        verify()
    except IntegrityError as error:
        refusal = error
    assert refusal is None or (refusal.kind, refusal.check) == (kind.value, check)
    return refusal is None
