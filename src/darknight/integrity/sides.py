"""Both sides of Freivalds' check at once, where a kernel was compiled for them; freivalds.py says what they are.

Each function returns whether they are equal, by modulus; None where sums are to be made one by one, to the same end.
"""

from __future__ import annotations

from torch import Tensor

from darknight.integrity.vectors import Vectors
from darknight.integrity.weighed import Weighed
from darknight.integrity.weighing import Integers, Moduli, Rounded
from darknight.kernels import compiled_sides as kernels
from darknight.kernels.compiled import Function
from darknight.kernels.compiled_sides import Weights
from darknight.ops import BilinearOp

Equal = list[bool]


def forward(op: BilinearOp, y: Weighed, x: Integers, w: Tensor, moduli: Moduli) -> Equal | None:
    library = kernels.chosen()
    return None if library is None else _of_planes(library.forward, op, y, x, w, moduli, inputs=True)


def grad_input(op: BilinearOp, gx: Weighed, delta: Tensor, w: Tensor, moduli: Moduli) -> Equal | None:
    library = kernels.chosen()
    return None if library is None else _of_planes(library.grad_input, op, gx, delta, w, moduli, inputs=False)


def grad_weight(op: BilinearOp, gw: Weighed, x: Integers, delta: Tensor, moduli: Moduli) -> Equal | None:
    library, grid, vectors = kernels.chosen(), _grid(op), gw.vectors
    if library is None or grid is None:
        return None
    values, exponent = _read(x)
    taps, rows, weights = vectors.entries_of_positions, op.rows(values), _weights(vectors, moduli)
    found = kernels.grad_weight(library.grad_weight, (gw.sums, taps), rows, exponent, op.rows(delta), grid, weights)
    return _equal(found, moduli)


def _of_planes(
    function: Function,
    op: BilinearOp,
    result: Weighed,
    operand: Integers,
    w: Tensor,
    moduli: Moduli,
    inputs: bool,
) -> Equal | None:
    grid, vectors = _grid(op), result.vectors
    if grid is None:
        return None
    values, exponent = _read(operand)
    sums, weights = (result.sums, vectors.entries_of_positions), _weights(vectors, moduli)
    found = kernels.of_planes(function, sums, op.rows(values), exponent, w, grid, weights, inputs=inputs)
    return _equal(found, moduli)


def _read(numbers: Integers) -> tuple[Tensor, int | None]:
    return (numbers.values, numbers.exponent) if isinstance(numbers, Rounded) else (numbers, None)


def _grid(op: BilinearOp) -> kernels.Grid | None:
    planes = op.planes
    return None if planes is None else (*planes.steps, *planes.holes, *planes.zeros)


def _weights(vectors: Vectors, moduli: Moduli) -> Weights:
    along = max([each.bits for each in vectors.positions], default=1)
    return Weights(
        u=vectors.u.entries,
        v=vectors.v.entries,
        longest=moduli.at_once(vectors.u.bits),
        often=moduli.at_once(vectors.v.bits),
        along=moduli.at_once(along),
        primes=moduli.primes,
    )


def _equal(differ: int | None, moduli: Moduli) -> Equal | None:
    return None if differ is None else [not differ >> place & 1 for place in range(len(moduli.primes))]
