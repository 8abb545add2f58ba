"""The contract of Freivalds' check: right results pass, lies and wrap-arounds do not, and they are told apart.

Every promise is tested both ways: a weakened check must let something through, or its test would prove nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from darknight.coding import PRIME_25, PRIME_28, WITNESS
from darknight.errors import IntegrityError, OpError, RangeError
from darknight.integrity import vectors, verified_forward, verified_grad_input, verified_grad_weight
from darknight.integrity.vectors import FURTHER, PLAN, Repetitions, soundness
from darknight.integrity.weighing import Moduli, Vector
from darknight.kernels import compiled_sides, reference, residues
from darknight.ops import Conv, Linear, field
from darknight.ops.field import centred
from darknight.randomness import Randomness, Stream
from darknight.types import Pass
from ops.cases import CASES, Case, conv, linear, transposed

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),  # torch about its own speed
]

PRIMES = [PRIME_25, PRIME_28]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
every_pass = pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
both_primes = pytest.mark.parametrize("prime", PRIMES, ids=["2^25", "2^28"])


def primes_for(case: Case, kind: Pass, full: bool) -> list[int]:
    """Both; in the short run one, in turns over the cases and passes."""
    return PRIMES if full else [PRIMES[(CASES.index(case) + list(Pass).index(kind)) % 2]]


# For counting: one case of each op, small enough to be checked thousands of times.
SMALL = [
    linear("small", (3, 4), 2),
    conv("small", (2, 4, 3, 2), 6, (2, 1), groups=2),
    transposed("small", (2, 3, 2), 2, (2,), stride=2),
]
every_small_case = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)


@pytest.fixture
def randomness() -> Randomness:
    return Randomness(bytes(range(32)))


@pytest.fixture
def without_library(monkeypatch):
    """As where nothing was compiled."""
    for module in (residues, compiled_sides):
        monkeypatch.setattr(module, "chosen", lambda: None)


@pytest.fixture(params=["chosen", "one by one", "reference"])
def either_kernel(request):
    """The kernels that this installation has, with both sides in one call or sum by sum, and the reference."""
    if request.param == "one by one":
        request.getfixturevalue("monkeypatch").setattr(compiled_sides, "chosen", lambda: None)
    if request.param == "reference":
        request.getfixturevalue("without_library")


@dataclass(frozen=True)
class Call:
    """One pass on quantised operands, with the true result over the integers.

    dtype: what operands and result are checked in; int32 is what the runtime hands over, and what is compiled.
    """

    case: Case
    kind: Pass
    prime: int
    x: Tensor
    w: Tensor
    delta: Tensor
    dtype: torch.dtype = torch.int32

    @classmethod
    def of(cls, case: Case, kind: Pass, prime: int, bits: int = 8, seed: int = 0) -> "Call":
        return cls(case, kind, prime, *case.integers(bits, seed))

    @property
    def result(self) -> Tensor:
        """Small integers in float64, so the op itself is exact."""
        return self.case.run(self.kind, self.x, self.w, self.delta)

    @property
    def decoded(self) -> Tensor:
        """What decoding in F_p gives: the centred residues of the result."""
        return centred(self.result, self.prime)

    def verified(self, result: Tensor, stream: Stream, wraps: bool = False, further: bool = False) -> Tensor:
        op, last = self.case.op, (self.prime, stream)
        x, w, delta = (operand.to(self.dtype) for operand in (self.x, self.w, self.delta))
        typed = result.to(self.dtype)
        if self.kind is Pass.FORWARD:
            given = verified_forward(op, typed, x, w, *last, wraps=wraps, further=further)
        elif self.kind is Pass.GRAD_INPUT:
            given = verified_grad_input(op, typed, delta, w, tuple(x.shape), *last, wraps=wraps, further=further)
        else:
            given = verified_grad_weight(op, typed, x, delta, tuple(w.shape), *last, wraps=wraps, further=further)
        assert given is typed
        assert torch.equal(given, result.to(self.dtype))  # and was not written to
        return result


def call_in_range(case: Case, kind: Pass, prime: int, bits: int = 8, seed: int = 0) -> Call:
    call = Call.of(case, kind, prime, bits, seed)
    assert call.result.abs().max() <= prime // 2
    return call


def call_that_wraps(case: Case, kind: Pass, prime: int) -> Call:
    """Operands of 16 bits: products exceed half of either prime, and stay exact in float64."""
    call = Call.of(case, kind, prime, bits=16)
    assert prime // 2 < call.result.abs().max() < 2**40
    assert not torch.equal(call.result, call.decoded)
    return call


def assert_blamed(call: Call, result: Tensor, stream: Stream, what: str = "a lie", wraps: bool = False) -> None:
    refusal = refused(call, result, stream, wraps)
    assert isinstance(refusal, IntegrityError), f"{what}: {refusal!r}"
    assert (refusal.kind, refusal.check) == (call.kind.value, "freivalds")


def refused(call: Call, result: Tensor, stream: Stream, wraps: bool = False) -> IntegrityError | RangeError | None:
    """With what the check refuses a result, if it does."""
    try:
        call.verified(result, stream, wraps)
    except (IntegrityError, RangeError) as refusal:
        return refusal
    return None


# --- right results pass ---------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("either_kernel")
@every_case
@every_pass
def test_a_right_result_is_accepted_and_given_back(case: Case, kind: Pass, randomness: Randomness, full: bool):
    for prime in primes_for(case, kind, full):
        call = call_in_range(case, kind, prime)
        call.verified(call.result, randomness.fresh())


@every_small_case
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64], ids=str)
@every_pass
def test_integers_may_come_in_any_dtype_that_holds_them(case, kind: Pass, dtype: torch.dtype, randomness: Randomness):
    call = replace(call_in_range(case, kind, PRIME_28), dtype=dtype)
    call.verified(call.result, randomness.fresh())
    with pytest.raises(IntegrityError):
        call.verified(call.result + 1, randomness.fresh())


@every_case
@every_pass
def test_results_at_the_edge_of_the_field_are_accepted(case: Case, kind: Pass, randomness: Randomness, full: bool):
    for prime in primes_for(case, kind, full):
        # All operands of one sign and as large as the range of the result allows: nothing cancels.
        ones = (torch.ones_like(operand) for operand in case.integers(bits=1))
        count = int(Call(case, kind, prime, *ones).result.max())
        size = int((prime // 2 / count) ** 0.5)
        call = Call(case, kind, prime, *(torch.full_like(operand, size) for operand in case.integers(bits=1)))
        assert prime / 3 < call.result.max() <= prime // 2
        call.verified(call.result, randomness.fresh())
        call = replace(call, w=-call.w, delta=-call.delta if kind is Pass.GRAD_WEIGHT else call.delta)
        call.verified(call.result, randomness.fresh())


@every_case
@every_pass
def test_an_empty_batch_is_verified(case: Case, kind: Pass, randomness: Randomness):
    call = call_in_range(case, kind, PRIME_25)
    call = replace(call, x=call.x[:0], delta=call.delta[:0])
    assert call.verified(call.result, randomness.fresh()).shape == call.result.shape


# --- lies do not ----------------------------------------------------------------------------------------------------
def with_element(result: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """One element changed: the largest, which is not zero."""
    lie = result.clone()
    flat = lie.view(-1)
    at = int(flat.abs().argmax())
    flat[at] = change(flat[at])
    return lie


def rows_swapped(result: Tensor) -> Tensor:
    """Two neighbours along the first axis that has two."""
    axis = next(axis for axis, size in enumerate(result.shape) if size > 1)
    order = list(range(result.shape[axis]))
    order[0], order[1] = 1, 0
    return result.index_select(axis, torch.tensor(order))


LIES: dict[str, Callable[[Call], Tensor]] = {
    "one element one too high": lambda call: with_element(call.result, lambda value: value + 1),
    "one element one too low": lambda call: with_element(call.result, lambda value: value - 1),
    "one sign flipped": lambda call: with_element(call.result, lambda value: -value),
    "rows swapped": lambda call: rows_swapped(call.result),
    "scaled by two": lambda call: 2 * call.result,
    "negated": lambda call: -call.result,
    "zeros": lambda call: torch.zeros_like(call.result),
    "another call's result": lambda call: call_in_range(call.case, call.kind, call.prime, seed=1).result,
}


@pytest.mark.usefixtures("either_kernel")
@every_case
@every_pass
def test_a_wrong_result_raises(case: Case, kind: Pass, randomness: Randomness, full: bool):
    for prime in primes_for(case, kind, full):
        call = call_in_range(case, kind, prime)
        for name, lie in LIES.items():
            wrong = lie(call)
            assert wrong.shape == call.result.shape, name
            assert not torch.equal(wrong, call.result), name
            assert_blamed(call, wrong, randomness.fresh(), name)


@every_case
@every_pass
def test_a_lie_in_any_single_element_raises(case: Case, kind: Pass, randomness: Randomness, full: bool):
    # No element may be outside the check: not in a corner of the output, not in the last group or example.
    call = call_in_range(case, kind, PRIME_25)
    result = call.result
    everywhere = range(result.numel())
    for at in everywhere if full else {*everywhere[:: max(1, len(everywhere) // 10)], everywhere[-1]}:
        lie = result.clone()
        lie.view(-1)[at] += 1
        assert_blamed(call, lie, randomness.fresh())


@every_small_case
@every_pass
def test_what_is_not_a_number_is_a_lie(case: Case, kind: Pass, randomness: Randomness):
    call = replace(call_in_range(case, kind, PRIME_25), dtype=torch.float64)
    for value in (float("nan"), float("inf"), -float("inf")):
        assert_blamed(call, with_element(call.result, lambda _, value=value: torch.tensor(value)), randomness.fresh())


@every_case
@every_pass
def test_a_result_of_another_shape_is_refused(case: Case, kind: Pass, randomness: Randomness):
    call = call_in_range(case, kind, PRIME_25)
    for wrong in (torch.cat([call.result, call.result]), call.result.unsqueeze(0)):
        with pytest.raises(OpError):
            call.verified(wrong, randomness.fresh())


@pytest.mark.usefixtures("either_kernel")
# --- wrap-arounds are noticed, and nobody is blamed -----------------------------------------------------------------
@every_case
@every_pass
def test_a_wrapped_result_raises_a_range_error(case: Case, kind: Pass, randomness: Randomness, full: bool):
    for prime in primes_for(case, kind, full):
        call = call_that_wraps(case, kind, prime)
        with pytest.raises(RangeError) as refusal:
            call.verified(call.decoded, randomness.fresh())
        assert (refusal.value.kind, refusal.value.check) == (call.kind.value, "freivalds")
        assert not isinstance(refusal.value, IntegrityError)


@every_case
@every_pass
def test_one_wrapped_element_is_enough(case: Case, kind: Pass, randomness: Randomness, full: bool):
    for prime in primes_for(case, kind, full):
        # A result off by the prime itself in one place, whatever the other elements are.
        call = call_in_range(case, kind, prime)
        for sign in (1, -1):
            with pytest.raises(RangeError):
                call.verified(with_element(call.result, lambda value, p=sign * prime: value + p), randomness.fresh())


@every_case
@every_pass
def test_operands_far_beyond_the_field_are_blamed_on_nobody(case: Case, kind: Pass, randomness: Randomness, full: bool):
    for prime in primes_for(case, kind, full):
        # 2^16 everywhere: nothing cancels, so the sums inside the check are as long as they get. Were one inexact, an
        # honest worker would be blamed.
        call = Call(case, kind, prime, *(torch.full_like(operand, 2**16) for operand in case.integers(bits=1)))
        for _ in range(3):
            with pytest.raises(RangeError):
                call.verified(call.decoded, randomness.fresh())


@pytest.mark.usefixtures("either_kernel")
@every_case
@every_pass
def test_a_lie_in_a_wrapped_result_is_still_a_lie(case: Case, kind: Pass, randomness: Randomness, full: bool):
    for prime in primes_for(case, kind, full):
        call = call_that_wraps(case, kind, prime)
        assert_blamed(call, with_element(call.decoded, lambda value: value - 1), randomness.fresh())


@every_small_case
@both_primes
@every_pass
def test_a_check_in_one_field_only_would_miss_the_wrap(case, kind: Pass, prime: int, randomness, monkeypatch):
    call = call_that_wraps(case, kind, prime)
    monkeypatch.setitem(WITNESS, prime, prime)  # both sides agree modulo p, and nothing else is looked at
    decoded = call.decoded
    call.verified(decoded, randomness.fresh())
    assert_blamed(call, decoded + 1, randomness.fresh())  # the weakened check is still one


# --- how sure -------------------------------------------------------------------------------------------------------
@both_primes
def test_forty_bits_in_both_fields_and_exact_sums(prime: int):
    widths = [*PLAN.widths, *[PLAN.widths[2]] * 2]  # three axes of positions
    # What the number stands for: all three passes of a layer call together, and 2^18 checks more.
    once = sum(Fraction(1, 2**bits) for bits in widths)
    for further in (0, 2**18):
        error = 3 * once**PLAN.count + further * once**FURTHER.count
        assert error <= Fraction(1, 2**40)
        assert float(error) == pytest.approx(2.0 ** -soundness(further))
    assert FURTHER.widths == PLAN.widths
    for moduli in (Moduli((prime, WITNESS[prime])), Moduli((prime,))):
        for bits in widths[:3]:
            assert 2**bits <= min(prime, WITNESS[prime])  # distinct in both fields
            longest_sum = moduli.at_once(bits) * (prime // 2) * 2 ** (bits - 1)
            assert longest_sum + prime <= 2**53  # the next multiple of the prime too: reduction is exact
            assert 2 * longest_sum > 2**52  # and not much shorter than it may be


# The longest sums that every step can meet: all operands at the edge of the field, all vectors at the edge of theirs.
# More rows, channels and taps than one exact sum holds, in numbers that do not divide.
LONG = [
    linear("long", (1100, 70), 130),
    linear("longer", (37, 1100), 600),
    conv("long", (37, 70, 4, 3), 130, (3, 1), padding=(1, 0)),
    conv("many taps", (3, 2, 80), 3, (70,), padding=5, padding_mode="replicate"),
    conv("long groups", (3, 140, 9), 132, (2,), groups=2),
    conv("many positions", (2, 2, 30_000), 2, (2,)),
    conv("3d", (2, 67, 3, 3, 3), 66, (2, 2, 2)),
    transposed("long", (35, 130, 3, 3), 70, (2, 2), stride=2),
]


@pytest.mark.usefixtures("either_kernel")
@pytest.mark.parametrize("case", LONG, ids=lambda case: case.label)
@every_pass
def test_the_longest_sums_are_exact(case: Case, kind: Pass, randomness: Randomness, full: bool, monkeypatch):
    for prime in PRIMES if full else [PRIMES[(LONG.index(case) + list(Pass).index(kind)) % 2]]:
        half = prime // 2
        signs = [1 - 2 * (operand % 2) for operand in case.integers(bits=4)]
        ones = [sign**2 for sign in signs]
        # (Products of the edge itself are 1/4 modulo p, and further sums small; those of a value near it are not.)
        for sizes in (
            [(half - 123_457) * one for one in ones],
            [half * one for one in ones],
            [half * s for s in signs],
        ):
            call = Call(case, kind, prime, *(size.to(torch.int64) for size in sizes))
            result = modular_result(call)
            for draw in (vectors._entries, lowest_entries):
                with monkeypatch.context() as patch:
                    patch.setattr(vectors, "_entries", draw)
                    # The integers are far beyond the field: modulo the witness they are wrong.
                    assert refused(call, result, randomness.fresh(), wraps=True) is None
                    assert isinstance(refused(call, result, randomness.fresh()), RangeError)
                    assert_blamed(call, with_element(result, lambda value: value - 1), randomness.fresh(), wraps=True)


def modular_result(call: Call) -> Tensor:
    """The pass modulo the prime, of operands as large as the field, centred."""
    op, x, w, delta, prime = call.case.op, call.x, call.w, call.delta, call.prime
    if call.kind is Pass.FORWARD:
        result = field.forward(op, x.remainder(prime), w, prime)
    elif call.kind is Pass.GRAD_INPUT:
        result = field.grad_input(op, delta.remainder(prime), w, tuple(x.shape), prime)
    else:
        result = field.grad_weight(op, x.remainder(prime), delta.remainder(prime), tuple(w.shape), prime)
    return torch.where(result > prime // 2, result - prime, result)


def lowest_entries(stream: Stream, count: int, lengths: tuple[int, ...], widths: tuple[int, ...]) -> list[Vector]:
    sizes = zip(lengths, widths, strict=True)
    return [
        Vector(torch.full((count, length), -(2.0 ** (width - 1)), dtype=torch.float64), width)
        for length, width in sizes
    ]


@pytest.mark.parametrize(("prime", "rows"), [(PRIME_25, 70_000), (PRIME_28, 140_000)])
@every_pass
def test_many_rows_are_checked_exactly_and_soundly(prime: int, rows: int, kind: Pass, randomness: Randomness):
    # Three bits, because the gradient of the weight sums over all rows.
    call = call_in_range(linear("many rows", (rows, 3), 2), kind, prime, bits=3)
    call.verified(call.result, randomness.fresh())
    assert_blamed(call, LIES["one element one too high"](call), randomness.fresh())


def test_vectors_are_spread_over_all_their_values(randomness: Randomness):
    lengths, widths = (20_000, 10_000, 5_000), PLAN.widths
    for vector, length, bits in zip(
        vectors._entries(randomness.fresh(), 2, lengths, widths), lengths, widths, strict=True
    ):
        half, drawn = 2 ** (bits - 1), vector.entries
        assert vector.bits == bits
        assert tuple(drawn.shape) == (2, length)
        assert drawn.min() >= -half
        assert drawn.max() < half
        # Sixteen equal bins of about n/16, by the highest bits and by the lowest: six standard deviations of room.
        mean = drawn.numel() / 16
        for counts in (torch.histc(drawn, bins=16, min=-half, max=half), torch.bincount(drawn.flatten().long() % 16)):
            assert (counts - mean).abs().max() < 6 * mean**0.5


@every_small_case
@every_pass
def test_no_lie_passes_and_no_truth_fails_in_many_calls(case: Case, kind: Pass, randomness: Randomness, full: bool):
    count = 10_000 if full else 200
    accepted = alarms = 0
    for trial in range(count):
        call = Call.of(case, kind, PRIMES[trial % 2], seed=trial % 50)
        result = call.result
        accepted += passes(call, tampered(result, trial), randomness)
        alarms += not passes(call, result, randomness)
    assert (accepted, alarms) == (0, 0)


@every_small_case
@every_pass
def test_vectors_of_two_bits_let_lies_pass_so_the_count_above_can_fail(case, kind: Pass, randomness, monkeypatch):
    weak = Repetitions(1, 2)
    monkeypatch.setattr(vectors, "PLAN", weak)
    count, call = 500, call_in_range(case, kind, PRIME_25)
    result = call.result
    accepted = sum(passes(call, tampered(result, trial), randomness) for trial in range(count))
    # An error in one element vanishes when its entry of a vector is zero: 1 - 3/4 * 7/8 * (15/16)^2 = 0.42 of the time.
    assert accepted / count > 0.01
    assert accepted / count <= weak.error  # and no more often than the bound says
    assert all(passes(call, result, randomness) for _ in range(20))


def tampered(result: Tensor, trial: int) -> Tensor:
    """One element off by a power of two, which is what a small vector is most easily blind to."""
    lie = result.clone()
    lie.view(-1)[trial % result.numel()] += 2 ** (trial % 10)
    return lie


def passes(call: Call, result: Tensor, randomness: Randomness) -> bool:
    return refused(call, result, randomness.fresh()) is None


@pytest.mark.parametrize(
    "case",
    [conv("3x3", (4, 5, 7, 9), 6, (3, 3), padding=1), linear("two axes", (7, 2, 5), 3)],
    ids=lambda case: case.label,
)
@every_pass
def test_a_verdict_that_is_always_equal_lets_lies_pass(case: Case, kind: Pass, randomness: Randomness, monkeypatch):
    """Of both sides in one call, so that it is this verdict which the tests above are about."""
    if compiled_sides.chosen() is None:
        pytest.skip("nothing was compiled")
    call = call_in_range(case, kind, PRIME_28)
    for name, lie in LIES.items():
        assert_blamed(call, lie(call), randomness.fresh(), name)
    monkeypatch.setattr(compiled_sides, "_done", lambda function, what: 0)
    assert all(passes(call, lie(call), randomness) for lie in LIES.values())


# --- secret and fresh -----------------------------------------------------------------------------------------------
@every_case
@every_pass
def test_a_further_check_is_the_same_check_with_a_repetition_more(case: Case, kind: Pass, randomness, monkeypatch):
    counts = []
    draw = vectors._entries
    monkeypatch.setattr(vectors, "_entries", lambda *given: (counts.append(given[1]), draw(*given))[1])
    call = call_in_range(case, kind, PRIME_28)
    for wraps in (False, True):
        call.verified(call.result, randomness.fresh(), wraps, further=True)
        with pytest.raises(IntegrityError):
            call.verified(LIES["one element one too high"](call), randomness.fresh(), wraps, further=True)
    assert counts == [3] * 4
    call.verified(call.result, randomness.fresh())
    assert counts[4:] == [2]


@every_small_case
@every_pass
def test_every_call_draws_new_vectors(case: Case, kind: Pass, randomness: Randomness, monkeypatch):
    drawn: list[Vector] = []
    draw = vectors._entries

    def recorded(*arguments) -> list[Vector]:
        drawn.extend(draw(*arguments))
        return drawn[-len(arguments[2]) :]

    monkeypatch.setattr(vectors, "_entries", recorded)
    call = call_in_range(case, kind, PRIME_25)
    stream = randomness.fresh()
    for source in (stream, stream, randomness.fresh()):  # the same stream goes on; it does not start again
        call.verified(call.result, source)
    assert len(drawn) == 3 * (2 + len(case.w_shape) - 2)  # u, v and one for each axis of the positions, three times
    entries = [row.tolist() for vector in drawn for row in vector.entries]
    assert len({tuple(row) for row in entries}) == len(entries)


@every_small_case
@every_pass
def test_a_lie_made_for_known_vectors_passes_so_they_must_be_secret(case, kind: Pass, randomness, monkeypatch):
    # Whoever knows the weights 2 and -3 of two channels can add 3 to the one and 2 to the other.
    known = torch.tensor([2.0, -3.0], dtype=torch.float64).repeat(10)
    monkeypatch.setattr(
        vectors,
        "_entries",
        lambda _, count, lengths, widths: [Vector(known[:length].repeat(count, 1), 22) for length in lengths],
    )
    call = call_in_range(case, kind, PRIME_25)
    lie = call.result.clone()
    lie[:, 0] += 3
    lie[:, 1] += 2
    assert passes(call, lie, randomness)
    monkeypatch.undo()
    assert_blamed(call, lie, randomness.fresh())


def test_the_shape_of_a_result_is_not_the_workers_to_choose(randomness: Randomness):
    """With stride 2 inputs of 7 and 8 positions have the same output; a result for the other one is refused."""
    op = Conv.make((3,), stride=2, padding=1)
    delta, w = torch.ones(2, 3, 4), torch.ones(3, 5, 3)
    for right, wrong in ((7, 8), (8, 7)):
        gx = op.grad_input(delta.double(), w.double(), (2, 5, right)).to(torch.int32)
        verified_grad_input(op, gx, delta, w, (2, 5, right), PRIME_28, randomness.fresh())
        with pytest.raises(OpError):
            verified_grad_input(op, gx, delta, w, (2, 5, wrong), PRIME_28, randomness.fresh())
    x = torch.ones(2, 5, 8)
    for kernel in (3, 4):
        gw = op.grad_weight(x.double(), delta.double(), (3, 5, kernel)).to(torch.int32)
        verified_grad_weight(op, gw, x, delta, (3, 5, kernel), PRIME_28, randomness.fresh())
        with pytest.raises(OpError):
            verified_grad_weight(op, gw, x, delta, (3, 5, 7 - kernel), PRIME_28, randomness.fresh())


@pytest.mark.usefixtures("without_library")
def test_a_check_in_inference_mode_leaves_nothing_behind(randomness: Randomness):
    """The reference's buffer must not become an inference tensor, which could not be written outside that mode."""
    x, w = torch.ones(4, 700, dtype=torch.int32), torch.ones(900, 700, dtype=torch.int32)

    def check() -> None:
        reference.scratch.buffer = reference.scratch.buffer[:0]  # as in a new thread
        verified_forward(Linear(), (x.double() @ w.double().t()).to(torch.int32), x, w, PRIME_28, randomness.fresh())

    with torch.inference_mode():
        check()
    verified_forward(Linear(), (x.double() @ w.double().t()).to(torch.int32), x, w, PRIME_28, randomness.fresh())
