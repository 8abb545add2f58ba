"""From which size on an error in real arithmetic is sure to be noticed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from darknight.integrity import real as checks
from darknight.ops import BilinearOp
from darknight.ops.op import Shape
from darknight.types import Pass


@dataclass(frozen=True)
class Threshold:
    """Of one check: the smallest error that passes with probability at most 2^-40.

    rms: over the elements that meet in one compared number, there where it is largest. element: if one alone is wrong.
    deviations: the tolerance in spreads, from which on most are noticed. (The rounding of the check's own sums adds to
    all of them what is far below the spread of float64 workers.)
    """

    rms: float
    element: float
    deviations: float


def threshold(op: BilinearOp, kind: Pass, x_shape: Shape, w_shape: Shape, spread: float) -> Threshold:
    outs, ins = (count // op.groups for count in op.channels(w_shape))
    sides, taps = checks.BOTH, math.prod(w_shape[2:])
    if kind is not Pass.GRAD_WEIGHT:
        shape = op.output_shape(x_shape, w_shape) if kind is Pass.FORWARD else x_shape
        rows, channels, *sizes = op.rows(torch.empty(shape, device="meta")).shape
        meeting, compared = rows * channels, math.prod(sizes)
    elif checks.inputs_apart(op, w_shape):
        sides, meeting, compared = checks.ONE, outs, op.groups * ins * taps
    else:
        meeting, compared = outs * ins, op.groups * taps
    deviations = checks.deviations(sides.repetitions * compared)
    rms = sides.clear * deviations * spread
    return Threshold(rms, rms * math.sqrt(meeting), deviations)
