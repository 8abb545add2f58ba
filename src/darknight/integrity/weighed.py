"""Results as Freivalds' check in the field sees them: weighed with random vectors, by the check itself or before it.

What a result is weighed with first, over its channels and rows, can be done by whoever makes it, in the same pass
(`kernels.unmask_weighed`): `weighing_for` draws the vectors and says how, `weighed_as` takes what came out.

Assumes: vectors are drawn when the answers are there, and kept secret, as integrity.freivalds says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod

from torch import Tensor

from darknight.coding import WITNESS
from darknight.integrity.vectors import Vectors, ones
from darknight.integrity.weighing import Moduli, over_both, over_weights
from darknight.kernels import Weighing
from darknight.ops import BilinearOp
from darknight.ops.op import Shape
from darknight.randomness import Stream


@dataclass(eq=False, slots=True)
class Weighed:
    """A result of which sums are left: of y and gx over channels and rows, (modulus, rep, *position); of gw over output
    channels, (modulus, rep, input channel, *tap).
    """

    shape: Shape
    vectors: Vectors
    sums: Tensor


def moduli_for(prime: int, wraps: bool) -> Moduli:
    """wraps: the result may be any residue, and is looked at modulo the prime alone."""
    return _moduli((prime,) if wraps else (prime, WITNESS[prime]))


_moduli = cache(Moduli)


# --- y and gx ---------------------------------------------------------------------------------------------------------
def weigh(op: BilinearOp, result: Tensor, prime: int, stream: Stream, *, wraps: bool, further: bool) -> Weighed:
    rows, moduli = op.rows(result), moduli_for(prime, wraps)
    vectors = Vectors.drawn(stream, rows.shape[1], rows.shape[0], tuple(rows.shape[2:]), further)
    return Weighed(tuple(result.shape), vectors, over_both(rows, vectors.u, vectors.v, moduli))


def weighing_for(op: BilinearOp, shape: Shape, prime: int, stream: Stream) -> tuple[Vectors, Weighing]:
    """Vectors for the first check of a result of this shape, y or gx, and how to weigh it with them."""
    rows, channels, *positions = op.row_shape(shape)
    vectors = Vectors.drawn(stream, channels, rows, tuple(positions), False)
    return vectors, _with(vectors, vectors.v.entries, prod(positions), prime)


def weighed_as(op: BilinearOp, shape: Shape, vectors: Vectors, sums: Tensor) -> Weighed:
    """sums: what `kernels.unmask_weighed` gave."""
    return Weighed(shape, vectors, sums.view(*sums.shape[:2], *op.row_shape(shape)[2:]))


# --- gw ---------------------------------------------------------------------------------------------------------------
def weigh_gradient(op: BilinearOp, gw: Tensor, prime: int, stream: Stream, *, wraps: bool, further: bool) -> Weighed:
    shape = tuple(gw.shape)
    vectors = Vectors.drawn(stream, *op.channels(shape), shape[2:], further)
    return Weighed(shape, vectors, over_weights(op, gw, vectors.u, 0, moduli_for(prime, wraps)))


def weighing_for_gradient(op: BilinearOp, shape: Shape, prime: int, stream: Stream) -> tuple[Vectors, Weighing] | None:
    """The same for a weight gradient, whose output channels are weighed. None unless they are its first axis."""
    if op.groups > 1 or op.output_axis != 0:
        return None
    vectors = Vectors.drawn(stream, *op.channels(shape), shape[2:], False)
    return vectors, _with(vectors, ones(len(vectors.u)), prod(shape[1:]), prime)


def gradient_weighed_as(shape: Shape, vectors: Vectors, sums: Tensor) -> Weighed:
    return Weighed(shape, vectors, sums.view(*sums.shape[:2], *shape[1:]))


def _with(vectors: Vectors, rows: Tensor, positions: int, prime: int) -> Weighing:
    moduli = moduli_for(prime, False)
    return Weighing(
        channels=vectors.u.entries,
        rows=rows,
        positions=positions,
        primes=moduli.primes,
        longest=moduli.at_once(vectors.u.bits),
        often=moduli.at_once(vectors.v.bits),
    )
