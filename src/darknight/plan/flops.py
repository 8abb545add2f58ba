"""Multiplications and additions on each side, for one layer in one step.

Workers: of the products as they compute them. In the field a weight gradient multiplies two numbers of full range, so
one of them is split into limbs, and every limb is a product of its own (ops.field).

Enclave: two for each coefficient and number in masking and unmasking, and in a check for each repetition and number
that it weighs. Parity adds up all answers that a column of it is about. These are the leading terms; what a check does
with the weighed sums is small beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

from darknight.coding import Code, Mixing, decoder
from darknight.ops.estimate import Reach
from darknight.ops.field import EXACT, limbs_for
from darknight.plan.candidate import Candidate
from darknight.plan.layers import Product

_REPETITIONS = 2  # of Freivalds' check


@dataclass(frozen=True, kw_only=True)
class WorkerFlops:
    """Of one worker that takes part in all three passes."""

    forward: int
    grad_input: int
    grad_weight: int

    def of_all(self, candidate: Candidate) -> int:
        """Of everybody: not all compute in every pass."""
        return candidate.computing * (self.forward + self.grad_input) + candidate.base_workers * self.grad_weight


def worker_flops(product: Product, candidate: Candidate, batch_size: int) -> WorkerFlops:
    groups = candidate.groups(batch_size)
    plain = product.op.flops((groups, *product.input_shape), product.weight_shape)
    limbs_forward = limbs_input = 1
    if candidate.prime is not None:
        reach, half = Reach.of(product.op, product.weight_shape, candidate.largest_weight), candidate.prime // 2
        limbs_forward, limbs_input = (limbs_for(half, each).count for each in (reach.forward, reach.backward))
    return WorkerFlops(
        forward=limbs_forward * plain,
        grad_input=limbs_input * plain if candidate.training and product.grad_input else 0,
        grad_weight=_grad_weight(product, candidate, groups) if candidate.training else 0,
    )


def _grad_weight(product: Product, candidate: Candidate, groups: int) -> int:
    """As ops.field.grad_weight cuts it: into chunks of examples whose sums stay exact."""
    op, one, w_shape = product.op, (1, *product.input_shape), product.weight_shape
    if candidate.prime is None:
        return groups * op.flops(one, w_shape)
    half, positions = candidate.prime // 2, max(1, op.positions(one, (1, *product.output_shape)))
    least = limbs_for(half, float(half) * positions, least=2)
    chunk = int(EXACT // (least.bound * half * positions))
    full, rest = divmod(groups, chunk)
    limbs = [
        (count * size, limbs_for(half, float(half) * positions * size).count)
        for count, size in ((full, chunk), (1, rest))
        if count * size
    ]
    return sum(examples * count for examples, count in limbs) * op.flops(one, w_shape)


def enclave_flops(product: Product, candidate: Candidate, code: Code, batch_size: int) -> int:
    """Masking, unmasking and checking."""
    groups = candidate.groups(batch_size)
    weighing = 2 * _REPETITIONS * (batch_size * (product.inputs + product.outputs) + product.weights)
    check = weighing if candidate.freivalds else 0
    total = 2 * groups * (_entries(code.A) * product.inputs + _decoding(code, code.A) * product.outputs) + check
    total += _parity(candidate) * groups * product.outputs
    if candidate.training:
        total += 2 * groups * _entries(code.B) * product.outputs
        total += candidate.base_workers * product.weights + weighing
        if product.grad_input:
            total += 2 * groups * _decoding(code, code.B) * product.inputs + check
            total += _parity(candidate) * groups * product.inputs
    return total


def _parity(candidate: Candidate) -> int:
    """For each number of an answer: a column for every answer beyond K + M, over that one and K + M others."""
    decoding = candidate.inputs + candidate.colluders
    return 2 * (candidate.workers - decoding) * (decoding + 1) if candidate.parity else 0


def _entries(mixing: Mixing) -> int:
    """Coefficients that are not zero: zeros cost nothing."""
    return sum(value != 0 for row in mixing.rows for value in row)


def _decoding(code: Code, mixing: Mixing) -> int:
    _, matrix = decoder(mixing, code.prime, None)
    return sum(value != 0 for row in matrix for value in row)
