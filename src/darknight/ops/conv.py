"""Convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from darknight.errors import OpError
from darknight.ops.op import BilinearOp, Planes, Shape, Slide, Sliding, settings_of
from darknight.ops.padding import Padding
from darknight.types import OpSpec

_SHAPES = 64  # that an op remembers
_IN_CACHE = 1 << 17  # float64 elements that are written and read again
_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Conv(BilinearOp):
    """x (example, in, *spatial), w (out, in / groups, *kernel); the arguments of torch.nn.Conv1d/2d/3d, one per axis.

    `Conv.make` reads those arguments as torch.nn does, "same" and "valid" included.
    """

    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    groups: int = 1

    name: ClassVar[str] = "conv"

    def __post_init__(self) -> None:
        if self.axes not in _CONVOLUTIONS or len(self.dilation) != self.axes or len(self.padding.amounts) != self.axes:
            raise OpError("conv: stride, padding and dilation need one entry for each of 1, 2 or 3 spatial axes.")
        if min(*self.stride, *self.dilation, self.groups) < 1:
            raise OpError("conv: stride, dilation and groups must be at least 1.")

    @classmethod
    def make(
        cls,
        kernel: tuple[int, ...],
        *,
        stride: int | tuple[int, ...] = 1,
        padding: int | str | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> Conv:
        """From the arguments of torch.nn.Conv*d."""
        axes = len(kernel)
        steps, holes = per_axis(stride, axes), per_axis(dilation, axes)
        if padding == "same":
            if any(step != 1 for step in steps):
                raise OpError('conv: padding="same" is defined for stride 1 only.')
            totals = [hole * (size - 1) for hole, size in zip(holes, kernel, strict=True)]
            amounts = tuple((total // 2, total - total // 2) for total in totals)
        elif padding == "valid":
            amounts = ((0, 0),) * axes
        elif isinstance(padding, str):
            raise OpError(f'conv: padding={padding!r}; needs numbers, "same" or "valid".')
        else:
            amounts = tuple((amount, amount) for amount in per_axis(padding, axes))
        return cls(stride=steps, padding=Padding(amounts, padding_mode), dilation=holes, groups=groups)

    def spec(self) -> OpSpec:
        return OpSpec(
            self.name,
            (
                ("stride", self.stride),
                ("padding", tuple(amount for pair in self.padding.amounts for amount in pair)),
                ("padding_mode", self.padding.mode),
                ("dilation", self.dilation),
                ("groups", (self.groups,)),
            ),
        )

    @classmethod
    def from_spec(cls, spec: OpSpec) -> Self:
        numbers = settings_of(spec, ("stride", "padding", "dilation", "groups"), words=("padding_mode",))
        amounts, (groups, *more) = numbers["padding"], numbers["groups"] or (0,)
        if more or len(amounts) != 2 * len(numbers["stride"]):
            raise OpError("conv: needs one number of groups, and two of padding for each axis.")
        pairs = tuple(zip(amounts[::2], amounts[1::2], strict=True))
        padding = Padding(pairs, str(dict(spec.settings)["padding_mode"]))
        return cls(stride=numbers["stride"], padding=padding, dilation=numbers["dilation"], groups=groups)

    @property
    def axes(self) -> int:
        return len(self.stride)

    @cached_property
    def _shapes(self) -> dict[tuple[Shape, Shape], Shape]:
        """Of outputs that were asked for: every pass asks for the same ones, and several times."""
        return {}

    def output_shape(self, x_shape: Shape, w_shape: Shape) -> Shape:
        known = self._shapes.get((x_shape, w_shape))
        if known is None:
            known = self._output_shape(x_shape, w_shape)
            if len(self._shapes) >= _SHAPES:
                self._shapes.clear()
            self._shapes[x_shape, w_shape] = known
        return known

    def _output_shape(self, x_shape: Shape, w_shape: Shape) -> Shape:
        fits = len(x_shape) == len(w_shape) == self.axes + 2
        if not fits or x_shape[1] != w_shape[1] * self.groups or w_shape[0] % self.groups:
            raise OpError(
                f"conv: input {x_shape} and weight {w_shape} with groups={self.groups}; needs (example, in, *spatial) "
                "and (out, in / groups, *kernel) with out divisible by groups."
            )
        padded = self.padding.padded(x_shape[2:])
        sizes = tuple(
            (size - hole * (kernel - 1) - 1) // step + 1
            for size, kernel, step, hole in zip(padded, w_shape[2:], self.stride, self.dilation, strict=True)
        )
        if min(sizes) < 1:
            raise OpError(f"conv: a kernel {w_shape[2:]} does not fit a padded input {padded}.")
        return (x_shape[0], w_shape[0], *sizes)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        self.output_shape(tuple(x.shape), tuple(w.shape))
        source, own = self._own_padding(x)
        return _CONVOLUTIONS[self.axes](source, w, None, self.stride, own, self.dilation, self.groups)

    def grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        self.expect(delta, x_shape, tuple(w.shape))
        spatial, own = self._padded_outside(x_shape[2:])
        inner = delta.new_empty(1).expand(*x_shape[:2], *spatial)
        grad = self._backward(delta, inner, w, own, (True, False, False))[0]
        return grad if spatial == x_shape[2:] else self.padding.transpose(grad, x_shape[2:])

    def grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        self.expect(delta, tuple(x.shape), w_shape)
        source, own = self._own_padding(x)
        return self._backward(delta, source, delta.new_empty(1).expand(w_shape), own, (False, True, False))[1]

    def fan_in(self, w: Tensor, x_shape: Shape) -> float:
        return float(w.abs().flatten(1).sum(1).max())

    def fan_out(self, w: Tensor, x_shape: Shape) -> float:
        grouped = w.abs().reshape(self.groups, w.shape[0] // self.groups, -1)
        taps = grouped.sum(1).view(self.groups, w.shape[1], -1)  # in two steps: torch is slow at both axes at once
        return float(taps.sum(2).max()) * self.copies(x_shape)

    def copies(self, x_shape: Shape) -> int:
        return self.padding.multiplicity(x_shape[2:])

    def positions(self, x_shape: Shape, y_shape: Shape) -> int:
        return prod(y_shape[2:])

    # --- projections ------------------------------------------------------------------------------------------------
    def rows(self, tensor: Tensor) -> Tensor:
        return tensor

    def row_shape(self, shape: Shape) -> Shape:
        return shape

    def channels(self, w_shape: Shape) -> tuple[int, int]:
        return w_shape[0], w_shape[1] * self.groups

    def fold_channels(self, rows: Tensor, vectors: Tensor, groups: int) -> Tensor:
        reps = vectors.shape[0]
        if groups == 1:
            folded = torch.matmul(vectors, rows.flatten(2))
        else:
            weights = vectors.view(reps, groups, -1).transpose(0, 1)  # (group, rep, channel)
            grouped = rows.reshape(rows.shape[0], groups, vectors.shape[1] // groups, prod(rows.shape[2:]))
            folded = torch.matmul(weights, grouped)
        return folded.reshape(rows.shape[0], groups * reps, *rows.shape[2:])

    def fold_weight_output(self, w: Tensor, u: Tensor) -> Tensor:
        return self.fold_first(w, u)

    def fold_weight_input(self, w: Tensor, u: Tensor) -> Tensor:
        return self.fold_second(w, u)

    def contract_folded(self, folded: Tensor, v: Tensor) -> Tensor:
        return self.contract(folded, v)

    def project_forward(self, x: Tensor, w: Tensor, y_shape: Shape) -> Tensor:
        # One matrix product for all taps, then shifted adds: no unfolded copy of x. With a stride, a tap meets one part
        # in many of x's positions: with more taps than channels it pays to take those parts first. A few reps at a
        # time, so that the products are still in cache when they are added.
        spatial, skipped = self.padding.without_zeros(tuple(x.shape[2:]))
        source = x if spatial == tuple(x.shape[2:]) else self.padding.apply(x)
        total = x.new_zeros(*w.shape[:2], *y_shape[2:])
        kernel, every = tuple(w.shape[3:]), (slice(None), slice(None))
        steps = self.stride if prod(kernel) > w.shape[2] else (1,) * self.axes
        for phase, met in self._by_phase(steps, kernel, spatial, y_shape[2:], skipped).items():
            part = source[(*every, *(slice(first, None, step) for first, step in zip(phase, steps, strict=True)))]
            weights = w.flatten(3)[..., [tap for tap, _, _ in met]]
            reps = max(1, _IN_CACHE // max(1, w.shape[1] * len(met) * prod(part.shape[2:])))
            for some, these, sums in zip(*(torch.split(each, reps) for each in (part, weights, total)), strict=True):
                for (_, inputs, outputs), tap in zip(met, self._taps(these, some).unbind(2), strict=True):
                    sums[(*every, *outputs)] += tap[(*every, *inputs)]
        return total

    def project_grad_input(self, delta: Tensor, w: Tensor, x_shape: Shape) -> Tensor:
        taps = self._taps(w, delta)
        spatial, skipped = self.padding.without_zeros(x_shape[2:])
        total = delta.new_zeros(*w.shape[:2], *spatial)
        for tap, target, source in self._overlaps(tuple(w.shape[3:]), spatial, tuple(delta.shape[2:]), skipped):
            total[(slice(None), slice(None), *target)] += taps[:, :, tap][(slice(None), slice(None), *source)]
        return total if spatial == x_shape[2:] else self.padding.transpose(total, x_shape[2:])

    def project_grad_weight(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        spatial, skipped = self.padding.without_zeros(tuple(x.shape[2:]))
        source = x if spatial == tuple(x.shape[2:]) else self.padding.apply(x)
        axes = (0, *range(2, x.dim()))
        sums = x.new_zeros(x.shape[1], prod(w_shape[2:]))
        every = (slice(None), slice(None))
        met = list(self._overlaps(w_shape[2:], spatial, tuple(delta.shape[2:]), skipped))
        rows = max(1, _IN_CACHE // max(1, prod(source.shape[1:])))  # at a time: each is read once for every tap
        for some, others in zip(torch.split(source, rows), torch.split(delta, rows), strict=True):
            for tap, inputs, outputs in met:
                sums[:, tap] += (some[(*every, *inputs)] * others[(*every, *outputs)]).sum(axes)
        return sums.view(-1, *w_shape[2:])

    def project_grad_weight_inputs(self, x: Tensor, delta: Tensor, w_shape: Shape) -> Tensor:
        # Row by row, so that what is unfolded stays in cache: torch's own way takes twice as long in float64.
        windows = self.padding.apply(x)
        for axis, (taps, hole, step) in enumerate(zip(w_shape[2:], self.dilation, self.stride, strict=True)):
            windows = windows.unfold(2 + axis, hole * (taps - 1) + 1, step)[..., ::hole]
        order = (0, *range(1 + self.axes, 1 + 2 * self.axes), *range(1, 1 + self.axes))  # channel, taps, positions
        inputs, positions = self.channels(w_shape)[1], prod(delta.shape[2:])
        total = x.new_zeros(self.groups, delta.shape[1] // self.groups, inputs // self.groups * prod(w_shape[2:]))
        for row, weights in zip(windows, delta, strict=True):
            unfolded = row.permute(order).reshape(self.groups, -1, positions)
            total += torch.bmm(weights.reshape(self.groups, -1, positions), unfolded.transpose(1, 2))
        return total.transpose(0, 1).reshape(-1, inputs, *w_shape[2:])

    @cached_property
    def planes(self) -> Planes | None:
        if self.axes != 2 or self.groups > 1 or self.padding.mode != "zeros":
            return None
        (above, _), (left, _) = self.padding.amounts
        return Planes((self.stride[0], self.stride[1]), (self.dilation[0], self.dilation[1]), (above, left))

    def is_pointwise(self, w_shape: Shape) -> bool:
        bare = all(amounts == (0, 0) for amounts in self.padding.amounts)
        return bare and {*w_shape[2:], *self.stride} == {1}

    def trimmed(self, x: Tensor, w_shape: Shape) -> tuple[Conv, Tensor]:
        steps = tuple(
            step if taps == 1 and amounts == (0, 0) else 1
            for step, taps, amounts in zip(self.stride, w_shape[2:], self.padding.amounts, strict=True)
        )
        if all(step == 1 for step in steps):
            return self, x
        stride = tuple(step // taken for step, taken in zip(self.stride, steps, strict=True))
        return replace(self, stride=stride), x[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]

    @property
    def repeats_positions(self) -> bool:
        return self.padding.mode != "zeros"

    def forward_positions(self, weights: Sequence[Tensor], x_shape: Shape, w_shape: Shape) -> list[Tensor]:
        sums = []
        for axis, (vectors, size, taps) in enumerate(zip(weights, x_shape[2:], w_shape[2:], strict=True)):
            border = self._border(axis)
            seen, skipped = border.without_zeros((size,))
            met = self._overlaps_along(axis, taps, seen[0], vectors.shape[1], skipped[0])
            total = _met_at_taps(vectors, taps, seen[0], met)
            sums.append(total if seen == (size,) else border.transpose(total, (size,)))
        return sums

    def grad_input_positions(self, weights: Sequence[Tensor], x_shape: Shape, w_shape: Shape) -> list[Tensor]:
        outputs = self.output_shape(x_shape, w_shape)[2:]
        sums = []
        for axis, (vectors, size, taps) in enumerate(zip(weights, outputs, w_shape[2:], strict=True)):
            border = self._border(axis)
            seen, skipped = border.without_zeros((vectors.shape[1],))
            padded = vectors if seen == (vectors.shape[1],) else border.apply(vectors.unsqueeze(0)).squeeze(0)
            met = self._overlaps_along(axis, taps, seen[0], size, skipped[0])
            sums.append(_met_at_taps(padded, taps, size, [(tap, target, source) for tap, source, target in met]))
        return sums

    def fold_taps(self, x: Tensor, delta: Tensor, slide: Slide) -> tuple[Tensor, Tensor]:
        spatial, skipped = self.padding.without_zeros(tuple(x.shape[2:]))
        whole = spatial == tuple(x.shape[2:])
        source = x if whole else self.padding.apply(x.to(torch.float64)).to(x.dtype)  # torch has no borders of integers
        for axis in range(self.axes):  # the first axis first: what is left to be read with a stride is less
            count = delta.shape[2 + axis]
            source = slide(source, Sliding(axis, self.stride[axis], self.dilation[axis], skipped[axis], count))
        return source, delta

    # --- w as (group, first, second, tap): shared with the transposed convolution ----------------------------------
    def fold_first(self, w: Tensor, u: Tensor) -> Tensor:
        """Sums over w's first axis, which u (rep, first) weighs: (rep, group * second, *kernel)."""
        grouped = w.reshape(self.groups, w.shape[0] // self.groups, -1)
        folded = torch.bmm(u.reshape(u.shape[0], self.groups, -1).transpose(0, 1), grouped)
        return folded.transpose(0, 1).reshape(u.shape[0], -1, *w.shape[2:])

    def fold_second(self, w: Tensor, u: Tensor) -> Tensor:
        """Sums over w's second axis, which u (rep, group * second) weighs: (rep, first, *kernel)."""
        grouped = w.reshape(self.groups, w.shape[0] // self.groups, w.shape[1], -1)
        vectors = u.reshape(u.shape[0], self.groups, -1).transpose(0, 1).unsqueeze(1)  # (group, 1, rep, second)
        folded = torch.matmul(vectors, grouped)  # (group, first, rep, tap): w is not copied
        return folded.permute(2, 0, 1, 3).reshape(u.shape[0], -1, *w.shape[2:])

    def contract(self, folded: Tensor, v: Tensor) -> Tensor:
        """(rep, group * channel, *kernel) and v (rep, group * channel) -> (group * rep, *kernel)."""
        reps, channels = v.shape
        grouped = folded.reshape(reps, self.groups, channels // self.groups, -1)
        weights = v.reshape(reps, self.groups, channels // self.groups, 1)
        return (grouped * weights).sum(2).transpose(0, 1).reshape(-1, *folded.shape[2:])

    @staticmethod
    def _taps(w: Tensor, rows: Tensor) -> Tensor:
        """(rep, n, channel, *kernel) and (rep, channel, *spatial) -> (rep, n, tap, *spatial): channels summed."""
        reps, stack = w.shape[:2]
        weights = w.flatten(3).transpose(2, 3).reshape(reps, -1, w.shape[2])
        return torch.bmm(weights, rows.flatten(2)).view(reps, stack, -1, *rows.shape[2:])

    # --- helpers ----------------------------------------------------------------------------------------------------
    def _overlaps(
        self, kernel: Shape, inputs: Shape, outputs: Shape, skipped: Shape
    ) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
        """For each tap: its number, the input positions that it meets, and the output positions that it meets them for.

        `skipped` zeros stand before each axis of the input and are left out, as are those behind it.
        """
        along = [
            list(self._overlaps_along(axis, *sizes))
            for axis, sizes in enumerate(zip(kernel, inputs, outputs, skipped, strict=True))
        ]
        for each in product(*along):
            number = 0
            for (tap, _, _), size in zip(each, kernel, strict=True):
                number = number * size + tap
            yield number, tuple(source for _, source, _ in each), tuple(target for _, _, target in each)

    def _by_phase(
        self, steps: Shape, kernel: Shape, inputs: Shape, outputs: Shape, skipped: Shape
    ) -> dict[Shape, list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]]:
        """`_overlaps` by where the input positions begin, which are counted in `steps` from there on.

        steps: divisors of the stride.
        """
        phases: dict[Shape, list[tuple[int, tuple[slice, ...], tuple[slice, ...]]]] = {}
        for tap, source, target in self._overlaps(kernel, inputs, outputs, skipped):
            along = list(zip(source, steps, strict=True))
            parts = tuple(
                slice(part.start // step, (part.stop - 1) // step + 1, part.step // step) for part, step in along
            )
            phases.setdefault(tuple(part.start % step for part, step in along), []).append((tap, parts, target))
        return phases

    def _overlaps_along(
        self, axis: int, taps: int, inputs: int, outputs: int, skipped: int
    ) -> Iterator[tuple[int, slice, slice]]:
        """The same along one axis. Taps that meet zeros only are left out."""
        step = self.stride[axis]
        for tap in range(taps):
            shift = tap * self.dilation[axis] - skipped  # output position p meets input position p * step + shift
            first = max(0, -(shift // step))
            last = min(outputs - 1, (inputs - 1 - shift) // step)
            if first <= last:
                yield tap, slice(first * step + shift, last * step + shift + 1, step), slice(first, last + 1)

    def _border(self, axis: int) -> Padding:
        return _border_of(self.padding.amounts[axis], self.padding.mode)

    def _own_padding(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """x and the padding that torch's convolution adds itself; anything but symmetric zeros is added here."""
        if self.padding.symmetric_zeros:
            return x, tuple(left for left, _ in self.padding.amounts)
        return self.padding.apply(x), (0,) * self.axes

    def _padded_outside(self, spatial: Shape) -> tuple[Shape, tuple[int, ...]]:
        if self.padding.symmetric_zeros:
            return spatial, tuple(left for left, _ in self.padding.amounts)
        return self.padding.padded(spatial), (0,) * self.axes

    def _backward(
        self, delta: Tensor, x: Tensor, w: Tensor, own: tuple[int, ...], mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        zeros = [0] * self.axes
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            delta, x, w, None, self.stride, own, self.dilation, False, zeros, self.groups, mask
        )
        return result


def _met_at_taps(vectors: Tensor, taps: int, size: int, met: Iterable[tuple[int, slice, slice]]) -> Tensor:
    """(rep, n) -> (rep, taps, size): at each tap, these places are those of the vectors; everything else is zero.

    By NumPy: torch takes four times as long for so few numbers.
    """
    total, entries = np.zeros((vectors.shape[0], taps, size)), vectors.numpy()
    for tap, places, others in met:
        total[:, tap, places] = entries[:, others]
    return torch.from_numpy(total)


@lru_cache(maxsize=256)
def _border_of(amounts: tuple[int, int], mode: str) -> Padding:
    """Along one axis."""
    return Padding((amounts,), mode)


def per_axis(value: int | tuple[int, ...], axes: int) -> tuple[int, ...]:
    """One number for each spatial axis, as torch.nn reads it."""
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(values) != axes:
        raise OpError(f"{len(values)} numbers {values} for {axes} spatial axes.")
    return values
