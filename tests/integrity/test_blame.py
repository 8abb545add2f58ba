"""The contract of blame: a worker is named if and only if its own answer does not fit its own share.

Shares in the field are uniform residues, so products wrap around: that is no lie, and a check that took it for one
would name honest workers.
"""

import pytest
import torch

import darknight as dk
from darknight.coding import PRIME_28, WITNESS
from darknight.integrity import Given, blame
from darknight.integrity import real as checks
from darknight.integrity.weighing import Moduli
from darknight.ops import either
from darknight.randomness import Randomness, uniform_below
from darknight.types import Pass
from integrity.masked import Call
from integrity.thresholds import threshold
from ops.cases import CASES, Case, conv, linear, transposed

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),  # torch about its own speed
]

SMALL = [
    linear("small", (3, 4), 2),
    conv("small", (2, 4, 3, 2), 6, (2, 1), groups=2),
    transposed("small", (2, 3, 2), 2, (2,), stride=2),
]
every_pass = pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
PAPER = dk.Scheme.paper()
REAL = dk.Scheme(inputs=3, colluders=1, spares=1, arithmetic=dk.Real(1e3))


@pytest.fixture
def randomness() -> Randomness:
    return Randomness(bytes(range(32)))


def in_field(case: Case, kind: Pass, randomness: Randomness, bits: int = 10) -> tuple[Given, torch.Tensor]:
    """Uniform shares, small weights, and the honest answer."""
    x, delta = (
        uniform_below(randomness.fresh(), shape, PRIME_28).to(torch.int32) for shape in (case.x_shape, case.y_shape)
    )
    w = uniform_below(randomness.fresh(), case.w_shape, 2 << bits).sub_(1 << bits).to(torch.int32)
    given = Given(op=case.op, kind=kind, w=w, x_shape=case.x_shape, x=x, delta=delta)
    return given, answer_to(given, PRIME_28)


def answer_to(given: Given, prime: int | None, w: torch.Tensor | None = None) -> torch.Tensor:
    weights = given.w if w is None else w
    if given.kind is Pass.FORWARD:
        return either.forward(given.op, given.x, weights, prime)
    if given.kind is Pass.GRAD_INPUT:
        return either.grad_input(given.op, given.delta, weights, given.x_shape, prime)
    return either.grad_weight(given.op, given.x, given.delta, tuple(weights.shape), prime)


# --- field ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.label)
@every_pass
def test_honest_answers_are_right_and_any_other_is_wrong(case: Case, kind: Pass, randomness: Randomness):
    given, answer = in_field(case, kind, randomness)
    assert blame.right_in_field(given, answer, PRIME_28, randomness.fresh())
    lie = answer.clone()
    lie.view(-1)[-1] = (lie.view(-1)[-1] + 1) % PRIME_28
    assert not blame.right_in_field(given, lie, PRIME_28, randomness.fresh())
    assert not blame.right_in_field(given, torch.zeros_like(answer), PRIME_28, randomness.fresh())
    if kind is not Pass.GRAD_WEIGHT:
        other = given.w.clone()
        other.view(-1)[0] += 1
        stale = answer_to(given, PRIME_28, other)
        assert not blame.right_in_field(given, stale, PRIME_28, randomness.fresh())


@every_pass
def test_nobody_honest_is_named_and_no_liar_escapes_in_many_calls(kind: Pass, randomness: Randomness, full: bool):
    count, named, escaped = (4000 if full else 60), 0, 0
    for number in range(count):
        case = SMALL[number % len(SMALL)]
        given, answer = in_field(case, kind, randomness)
        named += not blame.right_in_field(given, answer, PRIME_28, randomness.fresh())
        place, step = number % answer.numel(), 1 + number % (PRIME_28 - 1)
        lie = answer.clone()
        lie.view(-1)[place] = (int(lie.view(-1)[place]) + step) % PRIME_28
        escaped += blame.right_in_field(given, lie, PRIME_28, randomness.fresh())
    print(f"\n{kind.value}: {count} honest answers, {named} named; {count} lies, {escaped} escaped")
    assert (named, escaped) == (0, 0)


@every_pass
def test_a_check_that_took_wrapping_for_a_lie_would_name_honest_workers(
    kind: Pass, randomness: Randomness, monkeypatch
):
    """The test above can fail: in the second field an honest product of residues is wrong."""
    given, answer = in_field(SMALL[0], kind, randomness)
    for module in ("freivalds", "weighed"):
        monkeypatch.setattr(f"darknight.integrity.{module}.moduli_for", lambda prime, wraps: Moduli((WITNESS[prime],)))
    assert not blame.right_in_field(given, answer, PRIME_28, randomness.fresh())


def test_equality_in_the_field_is_that_of_residues():
    own = torch.tensor([0, 5, PRIME_28 - 1], dtype=torch.int32)
    assert blame.equal_in_field(own.clone(), own, PRIME_28)
    assert not blame.equal_in_field(own + 1, own, PRIME_28)


# --- floats -----------------------------------------------------------------------------------------------------------
def in_floats(scheme: dk.Scheme, case: Case, kind: Pass, seat: int, randomness: Randomness, seed: int = 0):
    """What the worker of a seat was given in a real masking, its honest answer, and the spread of that."""
    generator, dtype = case.generator(seed), scheme.arithmetic.dtype
    shapes = (case.x_shape, case.w_shape, case.y_shape)
    operands = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    call = Call(scheme, case.op, *operands, randomness)
    given = Given(
        op=case.op, kind=kind, w=call.w, x_shape=call.share_shape, x=call.shares[seat], delta=call.deltas[seat]
    )
    return given, call.answers(kind)[seat], call.answer_spreads(kind)[seat]


@pytest.mark.parametrize("scheme", [REAL, PAPER], ids=["float64", "paper"])
@every_pass
def test_in_floats_honest_answers_are_right_and_certain_errors_wrong(
    scheme: dk.Scheme, kind: Pass, randomness: Randomness, full: bool
):
    count, named, escaped = (1000 if full else 20), 0, 0
    for number in range(count):
        case, seat = SMALL[number % len(SMALL)], number % scheme.base_workers
        given, answer, spread = in_floats(scheme, case, kind, seat, randomness, number)
        named += not blame.right_in_floats(given, answer, spread, randomness.fresh())
        certain = 1.01 * threshold(given.op, kind, given.x_shape, tuple(given.w.shape), spread).rms
        lie = answer.to(torch.float64) + certain  # everywhere, so this is also its rms
        escaped += blame.right_in_floats(given, lie, spread, randomness.fresh())
    print(f"\n{kind.value}: {count} honest answers, {named} named; {count} certain errors, {escaped} escaped")
    assert (named, escaped) == (0, 0)


@pytest.mark.parametrize("scheme", [REAL, PAPER], ids=["float64", "paper"])
@every_pass
def test_element_by_element_a_single_small_error_is_found(scheme: dk.Scheme, kind: Pass, randomness: Randomness):
    """One element among many hides from Freivalds' weighted sums, and not from the enclave's own answer."""
    case = conv("many", (8, 3, 6, 5), 16, (3, 3), padding=1)
    given, answer, spread = in_floats(scheme, case, kind, 1, randomness)
    own = answer_to(given, None)
    assert blame.equal_in_floats(answer, own, spread)
    lie = answer.clone()
    lie.view(-1)[3] += 4 * checks.deviations(answer.numel()) * spread
    assert not torch.equal(lie, answer)
    assert not blame.equal_in_floats(lie, own, spread)
    assert not blame.equal_in_floats(torch.full_like(answer, torch.nan), own, spread)
