"""Bytes of tensors between the enclave and all workers, for one layer in one step.

Who takes part is decided in runtime.desk: with masked gradients a forward pass goes to all P workers, because those
that do not compute keep a share for the weight gradient; K + M + E of them answer. A gradient goes to all P, or to the
K + 2M that make the weight gradient if nobody wants that of the input. In the field, M of each masking get a seed in
the place of their share, which is in the header. Weights go to every worker whenever they have changed. Retries after
an overflow or a failure come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from darknight.plan.candidate import Candidate
from darknight.plan.layers import Product


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The first three are sent, the others received; as tensors, without headers and encryption."""

    weights: int = 0
    input_shares: int = 0
    gradient_shares: int = 0
    outputs: int = 0
    input_gradients: int = 0
    weight_gradients: int = 0

    @property
    def sent(self) -> int:
        return self.weights + self.input_shares + self.gradient_shares

    @property
    def received(self) -> int:
        return self.outputs + self.input_gradients + self.weight_gradients

    def __add__(self, other: Traffic) -> Self:
        return type(self)(**{part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)})

    def times(self, count: int) -> Self:
        return type(self)(**{part.name: getattr(self, part.name) * count for part in fields(self)})


def traffic_of(product: Product, candidate: Candidate, batch_size: int, *, new_weights: bool = True) -> Traffic:
    """One step: a forward pass, and in training a backward pass."""
    each = candidate.groups(batch_size) * candidate.width  # bytes of one feature, to one worker
    weights = product.weights * candidate.width
    forward = Traffic(
        weights=candidate.workers * weights if new_weights else 0,
        input_shares=(candidate.workers - candidate.seeded) * product.inputs * each,
        outputs=candidate.computing * product.outputs * each,
    )
    if not candidate.training:
        return forward
    asked = candidate.workers if product.grad_input else candidate.base_workers
    return forward + Traffic(
        gradient_shares=(asked - candidate.seeded) * product.outputs * each,
        input_gradients=candidate.computing * product.inputs * each if product.grad_input else 0,
        weight_gradients=candidate.base_workers * weights,
    )
