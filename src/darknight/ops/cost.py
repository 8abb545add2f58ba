"""What a product costs the enclave's processor: to compute it, or to have it computed on masked shares.

Seconds, from shapes and from how fast a machine is (`Rates`). The same rates give the same seconds, on every machine.
They are estimates, good for comparing the two; tests/runtime/test_rates.py holds them against measurements.

To send a layer means, for each of its passes: scale, encode, decode, check; and to seal and open what goes to other
machines. All of it is counted in numbers that are read or written, so a product with few multiplications for its
numbers is cheaper to compute, and one with many is cheaper to send.
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
    number whose scale is found, or that is compared with what it was. rounding: for a number that is rounded at random.
    weigh: for a number that a check weighs by itself; fold: for a position, of each group, that the check of a weight
    gradient folds. check: for a check, however small. message: for a message to a worker and its answer. link: for a
    byte that is sealed and sent to another machine, or received and opened. call: for a pass of a layer.
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
    link: float
    call: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
                raise UsageError(f"the rate {each.name} is {value!r}; needs seconds, 0 or more.")


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The numbers of a scheme, and of a fleet, that decide what sending costs.

    workers: that get a share. computing: that answer in a forward pass. answering: that make a weight gradient. width:
    bytes of a number on the wire. checked: by products, of each pass; gradients_checked: of weight gradients, which no
    other check is for. seeded: workers that get a seed in the place of a share. elsewhere: how many of all workers are
    on other machines, as a part of 1; the rest share memory with the enclave.
    """

    inputs: int
    colluders: int
    workers: int
    computing: int
    answering: int
    training: bool
    width: int = _INTEGER
    checked: bool = True
    gradients_checked: bool = True
    seeded: int = 0
    elsewhere: float = 0.0


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
    """To compute it in float32: its multiplications, and its numbers, which are put in order for them."""
    passes = 2 + form.grad_input if training else 1
    numbers = prod(form.x_shape) + prod(form.y_shape) + prod(form.w_shape)
    each = max(rates.product, rates.grouped / _channels_of_a_group(form)) if form.op.groups > 1 else rates.product
    return passes * (form.op.flops(form.x_shape, form.w_shape) * each + numbers * _FLOAT * rates.copy)


def sent_seconds(form: Form, sharing: Sharing, rates: Rates) -> float:
    """To mask it, to send and receive shares, to unmask and to check. In training weights are new in every step.

    A check reads the two operands of its product; what it needs of the result is found while that is unmasked.
    """
    x, y, w = prod(form.x_shape), prod(form.y_shape), prod(form.w_shape)
    width, workers = sharing.width, sharing.workers
    total = rates.call + _messages(workers * (2 if sharing.training else 1), sharing, rates)  # a share, and new weights
    total += _masked(form.x_shape, sharing, rates) + _unmasked(form.y_shape, sharing, rates)
    total += _checked(x + w, sharing, rates)
    total += w * rates.survey  # are they still those that workers have?
    if not sharing.training:
        return total
    # New weights: rounded and compared, and written once for all workers of this machine.
    total += 2 * w * width * rates.encode + w * width * (1 - sharing.elsewhere) * rates.copy
    total += rates.call + _messages(workers, sharing, rates)
    total += _masked(form.y_shape, sharing, rates) + y * (rates.rounding + width * rates.encode)
    total += x * rates.survey  # is it still what was masked?
    if form.grad_input:
        total += _unmasked(form.x_shape, sharing, rates) + _checked(y + w, sharing, rates)
    answers = sharing.answering * w * width
    folded = form.x_shape[0] * form.op.groups * (_positions(form, form.x_shape) + _positions(form, form.y_shape))
    total += (answers + w * _FLOAT) * rates.decode + _moved(workers * w * width + answers, sharing, rates)
    if not sharing.gradients_checked:
        return total
    return total + rates.check + (x + y) * rates.weigh + folded * rates.fold


def _masked(shape: Shape, sharing: Sharing, rates: Rates) -> float:
    """A batch is read twice, noise is written and read, and shares are written where they are sent from."""
    numbers = prod(shape)
    share, sent = _groups(shape, sharing) * prod(shape[1:]) * sharing.width, sharing.workers - sharing.seeded
    encoded = numbers * _FLOAT + (2 * sharing.colluders + sent) * share
    return numbers * rates.survey + encoded * rates.encode + _moved(sent * share, sharing, rates)


def _unmasked(shape: Shape, sharing: Sharing, rates: Rates) -> float:
    """Answers are read where they are, and written as floats."""
    answers = sharing.computing * _groups(shape, sharing) * prod(shape[1:]) * sharing.width
    return (answers + prod(shape) * _FLOAT) * rates.decode + _moved(answers, sharing, rates)


def _moved(nbytes: int, sharing: Sharing, rates: Rates) -> float:
    """To seal or open what goes to other machines, or comes from there."""
    return nbytes * sharing.elsewhere * rates.link


def _messages(count: int, sharing: Sharing, rates: Rates) -> float:
    """Between machines there are threads beside, which send and receive: as much again."""
    return count * (1 + sharing.elsewhere) * rates.message


def _checked(numbers: int, sharing: Sharing, rates: Rates) -> float:
    return rates.check + numbers * rates.weigh if sharing.checked else 0.0


def _groups(shape: Shape, sharing: Sharing) -> int:
    return ceil(shape[0] / sharing.inputs)


def _channels_of_a_group(form: Form) -> int:
    return max(1, form.op.channels(form.w_shape)[1] // form.op.groups)


def _positions(form: Form, shape: Shape) -> int:
    """Of an example, in one channel: of a linear layer the vectors along its last axis."""
    return prod(shape[1:-1]) if len(form.w_shape) == 2 else prod(shape[2:])
