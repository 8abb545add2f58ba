"""What a product costs the enclave's processor: to compute it, or to have it computed on masked shares.

Seconds, from shapes and from how fast a machine is (`Rates`). The same rates give the same seconds, on every machine.
They are estimates, good for comparing the two; tests/runtime/test_rates.py holds them against measurements.

To send a layer means, for each of its passes: scale, encode, copy shares out, copy answers in, decode, check. All of it
is counted in numbers that are read or written, so a product with few multiplications for its numbers is cheaper to
compute, and one with many is cheaper to send.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil, isfinite, prod

from darknight.errors import UsageError
from darknight.ops.op import BilinearOp, Shape

_FLOAT = 4
_INTEGER = 4


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of one processor of the enclave.

    product: for a multiplication or addition of a float32 product; grouped: of one with a single channel in each group.
    copy: for a byte that is copied. encode, decode: for a byte that masking and unmasking read or write. survey: for a
    number whose scale is found and that is remembered by a checksum. rounding: for a number that is rounded at random.
    weigh: for a number that a check weighs; fold: for a position, of each group, that the check of a weight gradient
    folds. check: for a check, however small. message: for a message to a worker and its answer. call: for a pass of a
    layer.
    """

    product: float
    grouped: float
    copy: float
    encode: float
    decode: float
    survey: float
    rounding: float
    weigh: float
    fold: float
    check: float
    message: float
    call: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
                raise UsageError(f"the rate {each.name} is {value!r}; needs seconds, 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The numbers of a scheme that decide what sending costs.

    workers: that get a share. computing: that answer in a forward pass. answering: that make a weight gradient.
    width: bytes of a number on the wire. checked: by products, of each pass. seeded: workers that get a seed in the
    place of a share.
    """

    inputs: int
    colluders: int
    workers: int
    computing: int
    answering: int
    training: bool
    width: int = _INTEGER
    checked: bool = True
    seeded: int = 0


@dataclass(frozen=True, kw_only=True)
class Form:
    """One call of a product in a step: the op, the shape of its batch and of its weight, and what has gradients."""

    op: BilinearOp
    x_shape: Shape
    w_shape: Shape
    grad_input: bool = True

    @property
    def y_shape(self) -> Shape:
        return self.op.output_shape(self.x_shape, self.w_shape)


def alone_seconds(form: Form, rates: Rates, *, training: bool) -> float:
    """To compute it in float32: as fast as it multiplies, or as its numbers come from memory."""
    passes = 2 + form.grad_input if training else 1
    numbers = prod(form.x_shape) + prod(form.y_shape) + prod(form.w_shape)
    each = max(rates.product, rates.grouped / _channels_of_a_group(form)) if form.op.groups > 1 else rates.product
    return passes * max(form.op.flops(form.x_shape, form.w_shape) * each, numbers * _FLOAT * rates.copy)


def sent_seconds(form: Form, sharing: Sharing, rates: Rates) -> float:
    """To mask it, to send and receive shares, to unmask and to check. In training weights are new in every step."""
    x, y, w = prod(form.x_shape), prod(form.y_shape), prod(form.w_shape)
    width, workers = sharing.width, sharing.workers
    messages = workers * (2 if sharing.training else 1)  # a share, and new weights
    total = rates.call + messages * rates.message
    total += _masked(form.x_shape, sharing, rates) + _unmasked(form.y_shape, sharing, rates)
    total += _checked(x + y + w, sharing, rates)
    if not sharing.training:
        return total + w * rates.survey  # are they still those that workers have?
    total += w * (rates.survey + width * rates.encode) + workers * w * width * rates.copy
    total += rates.call + workers * rates.message
    total += _masked(form.y_shape, sharing, rates) + y * rates.rounding + x * width * rates.encode
    if form.grad_input:
        total += _unmasked(form.x_shape, sharing, rates) + _checked(x + y + w, sharing, rates)
    answers = sharing.answering * w * width
    folded = form.x_shape[0] * form.op.groups * (_positions(form, form.x_shape) + _positions(form, form.y_shape))
    total += answers * rates.copy + (answers + w * (width + _FLOAT)) * rates.decode
    return total + rates.check + (x + y + w) * rates.weigh + folded * rates.fold


def _masked(shape: Shape, sharing: Sharing, rates: Rates) -> float:
    """A batch is read, and written as integers, noise, and shares that are copied out."""
    numbers = prod(shape)
    share, sent = _groups(shape, sharing) * prod(shape[1:]), sharing.workers - sharing.seeded
    written = numbers * sharing.width + (sharing.colluders + sent) * share * sharing.width
    copied = sent * share * sharing.width
    return numbers * rates.survey + (numbers * _FLOAT + written) * rates.encode + copied * rates.copy


def _unmasked(shape: Shape, sharing: Sharing, rates: Rates) -> float:
    """Answers are copied in, read, and written as integers and floats."""
    answers = sharing.computing * _groups(shape, sharing) * prod(shape[1:]) * sharing.width
    return answers * rates.copy + (answers + prod(shape) * (sharing.width + _FLOAT)) * rates.decode


def _checked(numbers: int, sharing: Sharing, rates: Rates) -> float:
    return rates.check + numbers * rates.weigh if sharing.checked else 0.0


def _groups(shape: Shape, sharing: Sharing) -> int:
    return ceil(shape[0] / sharing.inputs)


def _channels_of_a_group(form: Form) -> int:
    return max(1, form.op.channels(form.w_shape)[1] // form.op.groups)


def _positions(form: Form, shape: Shape) -> int:
    """Of an example, in one channel: of a linear layer the vectors along its last axis."""
    return prod(shape[1:-1]) if len(form.w_shape) == 2 else prod(shape[2:])
