"""Results that were weighed while they were decoded, and operands that are rounded where they are read: the same check.

What the check promises is in tests/integrity/test_freivalds.py; here, that nothing of it is lost on this way.
"""

import pytest
import torch
from torch import Tensor

from darknight.coding import PRIME_28
from darknight.errors import IntegrityError, OpError, RangeError
from darknight.integrity import (
    Rounded,
    Weighed,
    agree_forward,
    agree_grad_input,
    agree_grad_weight,
    gradient_weighed_as,
    verified_forward,
    verified_grad_weight,
    weighed_as,
    weighing_for,
    weighing_for_gradient,
)
from darknight.integrity.weighed import weigh_gradient
from darknight.kernels import Weighing, residues
from darknight.randomness import Randomness
from darknight.types import Pass
from integrity.test_freivalds import LIES, Call, call_in_range, call_that_wraps
from ops.cases import CASES, Case

PASSES = pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),
]


@pytest.fixture
def randomness() -> Randomness:
    return Randomness(bytes(range(32)))


def weighed(call: Call, result: Tensor, randomness: Randomness) -> Weighed:
    """As the decoding does it, from the vectors that it is handed."""
    op, shape = call.case.op, tuple(result.shape)
    if call.kind is Pass.GRAD_WEIGHT:
        drawn = weighing_for_gradient(op, shape, call.prime, randomness.fresh())
        if drawn is None:
            assert op.groups > 1 or op.output_axis != 0
            stream = randomness.fresh()
            return weigh_gradient(op, result.to(torch.int32), call.prime, stream, wraps=False, further=False)
        vectors, how = drawn
        return gradient_weighed_as(shape, vectors, summed(how, result.to(torch.int32).unsqueeze(0)))
    vectors, how = weighing_for(op, shape, call.prime, randomness.fresh())
    return weighed_as(op, shape, vectors, summed(how, op.rows(result.to(torch.int32))))


def summed(how: Weighing, rows: Tensor) -> Tensor:
    return residues.weigh_rows(
        rows.reshape(rows.shape[0], rows.shape[1], how.positions),
        how.channels,
        how.rows,
        how.primes,
        longest=how.longest,
        often=how.often,
    )


def agree(call: Call, given: Weighed) -> None:
    x, w, delta = (operand.to(torch.int32) for operand in (call.x, call.w, call.delta))
    if call.kind is Pass.FORWARD:
        agree_forward(call.case.op, given, x, w, call.prime)
    elif call.kind is Pass.GRAD_WEIGHT:
        agree_grad_weight(call.case.op, given, x, delta, call.prime)
    else:
        agree_grad_input(call.case.op, given, delta, w, call.prime)


@EVERY
@PASSES
def test_right_results_agree_and_lies_do_not(case: Case, kind: Pass, randomness: Randomness):
    call = call_in_range(case, kind, PRIME_28)
    agree(call, weighed(call, call.result, randomness))
    for what in ("one element one too high", "one sign flipped", "negated"):
        lie = LIES[what](call)
        if torch.equal(lie, call.result):
            continue
        with pytest.raises(IntegrityError):
            agree(call, weighed(call, lie, randomness))


@PASSES
def test_what_wrapped_around_is_told_apart(kind: Pass, randomness: Randomness):
    call = call_that_wraps(CASES[0], kind, PRIME_28)
    with pytest.raises(RangeError):
        agree(call, weighed(call, call.decoded, randomness))


def test_vectors_of_another_shape_are_refused(randomness: Randomness):
    call = call_in_range(CASES[0], Pass.FORWARD, PRIME_28)
    given = weighed(call, call.result, randomness)
    with pytest.raises(OpError):
        agree(call, Weighed((*given.shape[:-1], given.shape[-1] + 1), given.vectors, given.sums))


@EVERY
def test_an_operand_is_rounded_where_it_is_read(case: Case, randomness: Randomness):
    """The same verdict as of its integers, and another one if a single number rounds to another integer."""
    forward, weight = (call_in_range(case, kind, PRIME_28) for kind in (Pass.FORWARD, Pass.GRAD_WEIGHT))
    x, w, delta = (operand.to(torch.int32) for operand in (forward.x, forward.w, weight.delta))
    values = (forward.x.to(torch.float32) + 0.4) * 2.0**-5  # rounded to nearest, it is x
    assert torch.equal(values.mul(2.0**5).round().to(torch.int32), x)
    y, gw = forward.result.to(torch.int32), weight.result.to(torch.int32)

    def check(given: Tensor) -> None:
        rounded = Rounded(given, 5)
        verified_forward(case.op, y, rounded, w, PRIME_28, randomness.fresh())
        verified_grad_weight(case.op, gw, rounded, delta, tuple(w.shape), PRIME_28, randomness.fresh())

    check(values)
    wrong = values + 2.0**-5
    with pytest.raises(IntegrityError):
        verified_forward(case.op, y, Rounded(wrong, 5), w, PRIME_28, randomness.fresh())
    with pytest.raises(IntegrityError):
        verified_grad_weight(case.op, gw, Rounded(wrong, 5), delta, tuple(w.shape), PRIME_28, randomness.fresh())
