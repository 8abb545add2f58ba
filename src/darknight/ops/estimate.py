"""How much memory a worker's task will take, from shapes alone: an upper bound, known before anything is allocated.

It follows darknight.ops.field and darknight.ops.real step by step: the float64 copies of the operands, the limbs, one
convolution's unfolded patches (torch unfolds the whole batch), the partial results and the answer. The measured peak
of every op and pass stays below it and within a small factor: tests/ops/test_estimate.py. Workers refuse by it what
would not fit, and plans say by it what they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from darknight.errors import OpError
from darknight.ops.conv import Conv
from darknight.ops.conv_transpose import ConvTranspose
from darknight.ops.estimate_unfolded import strategy_bytes
from darknight.ops.field import EXACT, limbs_for
from darknight.ops.linear import Linear
from darknight.ops.op import BilinearOp, Shape
from darknight.ops.strategy import DOUBLES, STRATEGIES, Work, most_copies, round_up
from darknight.types import BackwardTask, ForwardTask, Pass, Weights

_DOUBLE = 8
_RESIDUE = 4  # int32
_SLACK = 1 << 16  # small things: scalars, rounding of the allocator


@dataclass(frozen=True)
class Reach:
    """Upper bounds of the sum of |weight| that one element of y, and one of gx, meets, and of one |weight|. They decide
    about limbs.
    """

    forward: float
    backward: float
    largest: float

    @classmethod
    def of(cls, op: BilinearOp, w_shape: Shape, largest: float) -> Reach:
        """largest: an upper bound of |weight|."""
        shadow = torch.empty(w_shape, device="meta")  # a tensor without memory
        fan_in, fan_out = op.by_output(shadow).shape[1], op.by_input(shadow).shape[1]
        return cls(max(1.0, fan_in * largest), max(1.0, fan_out * largest * most_copies(op)), largest)


def task_bytes(task: ForwardTask | BackwardTask, weights: Weights, op: BilinearOp, reach: Reach) -> int:
    """Bytes beyond those of the task's own tensor, the weights and the kept shares. Raises OpError on shapes that
    do not fit each other.
    """
    w_shape = tuple(weights.tensor.shape)
    if isinstance(task, ForwardTask):
        return _forward(op, weights.prime, reach, tuple(task.tensor.shape), w_shape) if task.compute else 0
    x_shape = task.x_shape
    y_shape = op.output_shape(x_shape, w_shape)
    delta = tuple(task.tensor.shape)
    if task.row is not None:  # gradients in the clear: the combination is made first
        delta = delta[:1] + delta[2:]
    if delta != y_shape:  # the ops say so too, but after they have copied it
        raise OpError(f"layer {task.layer}: a gradient {delta} for an input {x_shape}; needs {y_shape}.")
    return _backward(op, weights.prime, reach, task.passes, x_shape, w_shape, clear=task.row is not None)


# Steps are alike, so are their tasks.
@lru_cache(maxsize=1024)
def _forward(op: BilinearOp, prime: int | None, reach: Reach, x_shape: Shape, w_shape: Shape) -> int:
    y_shape = op.output_shape(x_shape, w_shape)
    part = _largest(op.output_blocks(w_shape), w_shape[0], w_shape)
    needs = _product(op, prime, reach.forward, x_shape, y_shape, x_shape, w_shape, part)
    needs = max(needs, _others(op, Pass.FORWARD, prime, reach, x_shape, w_shape))
    return needs + prod(y_shape) * _width(prime)


@lru_cache(maxsize=1024)
def _backward(
    op: BilinearOp,
    prime: int | None,
    reach: Reach,
    passes: tuple[Pass, ...],
    x_shape: Shape,
    w_shape: Shape,
    *,
    clear: bool,
) -> int:
    y_shape, width = op.output_shape(x_shape, w_shape), _width(prime)
    total = peak = prod(y_shape) * (2 * _DOUBLE + width) if clear else 0
    if Pass.GRAD_INPUT in passes:
        total += prod(x_shape) * width
        part = _largest(op.input_blocks(w_shape), w_shape[1], w_shape)
        needs = _product(op, prime, reach.backward, y_shape, x_shape, x_shape, w_shape, part)
        needs = max(needs, _others(op, Pass.GRAD_INPUT, prime, reach, x_shape, w_shape))
        peak = total + needs + _origin(op, x_shape)
    if Pass.GRAD_WEIGHT in passes:
        total += prod(w_shape) * width
        needs = _weight_product(op, prime, x_shape, y_shape, w_shape)
        needs = max(needs, _others(op, Pass.GRAD_WEIGHT, prime, reach, x_shape, w_shape))
        peak = max(peak, total + needs)
    return peak


def _width(prime: int | None) -> int:
    """Bytes of a number of the answer, at most."""
    return _DOUBLE if prime is None else _RESIDUE


def _others(op: BilinearOp, kind: Pass, prime: int | None, reach: Reach, x_shape: Shape, w_shape: Shape) -> int:
    """What the strategies beside torch's own ops on doubles take at most: which one it will be shows in time."""
    if prime is None:
        return 0
    largest = round_up(reach.largest)  # as workers do
    work = Work(op=op, kind=kind, x_shape=x_shape, w_shape=w_shape, prime=prime, largest=largest)
    takers = [
        strategy
        for strategy in STRATEGIES.values()
        if strategy is not DOUBLES and any(strategy.takes(work, torch.device(device)) for device in ("cpu", "cuda"))
    ]
    return max((strategy_bytes(strategy, work) for strategy in takers), default=0)


def _largest(blocks: tuple[slice, ...], channels: int, w_shape: Shape) -> int:
    """Weights of the largest block, which is the first."""
    whole = prod(w_shape)
    return whole if len(blocks) == 1 else whole // channels * len(range(channels)[blocks[0]])


def _product(
    op: BilinearOp, prime: int | None, reach: float, left: Shape, result: Shape, x_shape: Shape, w_shape: Shape, w: int
) -> int:
    """forward or grad input: `w` weights at a time, one operand `left` in limbs, a partial result for each limb."""
    operand, outcome = prod(left), prod(result)
    scratch = _scratch(op, x_shape, op.output_shape(x_shape, w_shape), w_shape)
    if prime is None:
        return (operand + w + scratch + outcome) * _DOUBLE + _SLACK
    limbs = limbs_for(prime // 2, reach).count
    digits = (limbs + 2) * operand if limbs > 1 else operand
    doubles = max(2 * operand, operand + 2 * w, digits + w + scratch + (limbs + 3) * outcome)
    return doubles * _DOUBLE + _SLACK


def _weight_product(op: BilinearOp, prime: int | None, x_shape: Shape, y_shape: Shape, w_shape: Shape) -> int:
    """grad weight: in the field it is cut into chunks of examples, as darknight.ops.field does."""
    x, y, w = prod(x_shape), prod(y_shape), _largest(op.output_blocks(w_shape), w_shape[0], w_shape)
    if prime is None:
        return (x + y + _scratch(op, x_shape, y_shape, w_shape) + 2 * w) * _DOUBLE + _SLACK
    half, positions = prime // 2, max(1, op.positions(x_shape, y_shape))
    least = limbs_for(half, float(half) * positions, least=2)
    examples = min(x_shape[0], int(EXACT // (least.bound * half * positions)))
    limbs = limbs_for(half, float(half) * positions * max(1, examples)).count
    x_part, y_part = (examples, *x_shape[1:]), (examples, *y_shape[1:])
    doubles = 2 * prod(x_part) + (limbs + 2) * prod(y_part) + (limbs + 5) * w
    return (doubles + _scratch(op, x_part, y_part, w_shape)) * _DOUBLE + _SLACK


def _scratch(op: BilinearOp, x_shape: Shape, y_shape: Shape, w_shape: Shape) -> int:
    """Doubles that one call of the op takes beside operands and result: padded copies and unfolded patches."""
    match op:
        case Linear():
            return 0
        case Conv():
            return _conv_scratch(op, x_shape, y_shape, w_shape)
        case ConvTranspose():  # the convolution that it is the transpose of leads from y to x
            return _conv_scratch(op.conv, y_shape, x_shape, w_shape)
    raise OpError(f"op {op.name}: nobody has measured how much memory it takes, so this worker does not compute it.")


def _conv_scratch(conv: Conv, x_shape: Shape, y_shape: Shape, w_shape: Shape) -> int:
    patches = prod(x_shape[:2]) * prod(w_shape[2:]) * prod(y_shape[2:])
    padded = 0 if conv.padding.symmetric_zeros else prod(x_shape[:2]) * prod(conv.padding.padded(x_shape[2:]))
    parts = prod(y_shape) + prod(w_shape) if conv.groups > 1 else 0  # each group apart, then together
    return patches + prod(x_shape) + 2 * padded + parts


def _origin(op: BilinearOp, x_shape: Shape) -> int:
    """Bytes for the map of where padded elements come from (darknight.ops.padding)."""
    if not isinstance(op, Conv) or op.padding.mode == "zeros":
        return 0
    return 4 * _DOUBLE * prod(op.padding.padded(x_shape[2:]))
