"""The contract of the parity check: codewords pass, single faults do not, and what it cannot see is shown as well.

The figures: pytest -s tests/integrity/test_parity.py
"""

from itertools import combinations

import pytest
import torch
from torch import Tensor

import darknight as dk
from darknight.coding import PRIME_25, PRIME_28, Code, draw_code, field, virtual_batches
from darknight.errors import EncodingError, SchemeError
from darknight.integrity import parity
from darknight.integrity import real as checks
from darknight.ops import Conv, Linear
from darknight.ops import field as field_ops
from darknight.randomness import Randomness
from darknight.types import Pass
from integrity.masked import Call, accepts
from ops.cases import CASES, Case

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),  # torch about its own speed
]
LINEAR_PASSES = [Pass.FORWARD, Pass.GRAD_INPUT]
each_pass = pytest.mark.parametrize("kind", LINEAR_PASSES, ids=lambda kind: kind.value)


@pytest.fixture
def randomness() -> Randomness:
    return Randomness(bytes(range(32)))


# --- in the field ---------------------------------------------------------------------------------------------------
FIELD = {
    f"K={K} M={M} E={E} {mixing} {'masked' if masked else 'clear'} 2^{bits}": dk.Scheme(
        inputs=K,
        colluders=M,
        spares=E,
        mixing=mixing,
        mask_gradients=masked,
        integrity="parity",
        arithmetic=dk.Field(prime=PRIME_25 if bits == 25 else PRIME_28, bits=8),
    )
    for (K, M, E, mixing, masked, bits) in [
        (1, 1, 0, "systematic", True, 28),
        (3, 1, 1, "systematic", True, 25),
        (4, 1, 0, "systematic", True, 28),
        (3, 2, 1, "systematic", True, 28),
        (3, 1, 1, "systematic", False, 28),
        (3, 1, 1, "dense", True, 25),
        (3, 2, 1, "dense", True, 28),
        (3, 2, 2, "dense", False, 28),
        (12, 1, 1, "dense", True, 28),
    ]
}
each_field = pytest.mark.parametrize("scheme", FIELD.values(), ids=FIELD)
OP, X, W = Linear(), (24, 5), (3, 5)


def field_answers(scheme: dk.Scheme, kind: Pass, randomness: Randomness, stale: bool = False) -> tuple[Code, dict]:
    """Every worker's residues for one layer call."""
    generator = torch.Generator().manual_seed(1)
    prime = scheme.arithmetic.prime
    code = draw_code(scheme, randomness.fresh())
    forward = kind is Pass.FORWARD
    shape = X if forward else (X[0], W[0])
    values = torch.randint(-200, 201, shape, generator=generator, dtype=torch.int32)
    w = torch.randint(-200, 201, W, generator=generator, dtype=torch.int32) + int(stale)
    groups = virtual_batches(values, scheme.inputs)
    if forward or code.masks_gradients:
        shares = field.encode(code.A if forward else code.B, groups, prime, randomness.fresh())
    else:
        rows = [[int(value) for value in row] for row in code.B.data]
        shares = [field_ops.combine_clear(row, groups, prime) for row in rows]
    if forward:
        return code, {j: field_ops.forward(OP, share, w, prime) for j, share in enumerate(shares)}
    x_shape = (len(groups), X[1])
    return code, {j: field_ops.grad_input(OP, share, w, x_shape, prime) for j, share in enumerate(shares)}


def mixing_of(code: Code, kind: Pass):
    return code.A if kind is Pass.FORWARD else code.B


def accepted(code: Code, answers: dict[int, Tensor], kind: Pass) -> bool:
    mixing, prime = mixing_of(code, kind), code.prime
    return accepts(lambda: parity.verified_field_answers(mixing, answers, prime, kind), kind, "parity")


@each_field
@each_pass
def test_a_fault_of_any_worker_in_any_set_of_answers_is_found(scheme, kind: Pass, randomness: Randomness):
    code, answers = field_answers(scheme, kind, randomness)
    mixing = mixing_of(code, kind)
    needed = mixing.inputs + mixing.colluders
    seen = [j for j in answers if any(mixing.rows[j])]  # a spare's row of a clear B is zero: it takes no part
    assert accepted(code, answers, kind)
    for count in range(needed + 1, len(seen) + 1):
        for workers in list(combinations(seen, count))[:10]:
            some = {j: answers[j] for j in workers}
            assert accepted(code, some, kind)
            for liar in workers:
                lie = some[liar].clone()
                lie.view(-1)[-1] = (lie.view(-1)[-1] + 1) % code.prime
                assert not accepted(code, {**some, liar: lie}, kind)


@each_field
@each_pass
def test_exchanged_answers_are_found_unless_their_coefficients_are_equal(scheme, kind: Pass, randomness: Randomness):
    code, answers = field_answers(scheme, kind, randomness)
    checks = parity._parity_checks(mixing_of(code, kind), answers, code.prime, kind)[1]
    found = 0
    for one, other in combinations(answers, 2):
        same = all(row[one] == row[other] for row in checks) or torch.equal(answers[one], answers[other])
        assert accepted(code, {**answers, one: answers[other], other: answers[one]}, kind) is same
        found += not same
    assert found


@each_pass
def test_what_is_not_a_residue_is_refused_though_it_is_congruent_to_one(kind: Pass, randomness: Randomness):
    code, answers = field_answers(FIELD["K=3 M=1 E=1 dense masked 2^25"], kind, randomness)
    for other in (answers[0] + code.prime, answers[0] - code.prime, answers[0].double()):
        assert not accepted(code, {**answers, 0: other}, kind)


@each_field
@each_pass
def test_parity_is_blind_when_all_workers_are_wrong_together(scheme, kind: Pass, randomness: Randomness):
    code, answers = field_answers(scheme, kind, randomness, stale=True)
    assert accepted(code, answers, kind)


@each_field
@each_pass
def test_a_liar_who_knows_the_coefficients_lies_along_the_code(scheme, kind: Pass, randomness: Randomness):
    # Why public coefficients find faults and not attackers: this lie needs all workers, and is a codeword.
    code, answers = field_answers(scheme, kind, randomness)
    rows = mixing_of(code, kind).rows
    lie = {j: (answer.long() + int(rows[j][0])).remainder(code.prime).int() for j, answer in answers.items()}
    assert accepted(code, lie, kind)
    lie[0] = (lie[0] + 1).remainder(code.prime)  # and a step beside the code is seen
    assert not accepted(code, lie, kind)


def test_a_codeword_is_given_back(randomness: Randomness):
    code, answers = field_answers(FIELD["K=3 M=1 E=1 dense masked 2^25"], Pass.FORWARD, randomness)
    assert parity.verified_field_answers(code.A, answers, code.prime, Pass.FORWARD) is answers


def test_large_coefficients_and_many_workers_are_exact():
    # 80 terms of nearly 2^56: an int64 sum without reductions would overflow.
    prime = PRIME_28
    answers = [torch.full((3,), prime - 1, dtype=torch.int32)] * 80
    checks = [[prime - 1] * 80, [prime - 1] * 79 + [prime - 2]]
    assert field.syndromes(checks, answers, prime).tolist() == [[80] * 3, [81] * 3]


@each_pass
def test_with_nothing_to_compare_it_says_so(kind: Pass, randomness: Randomness):
    code, answers = field_answers(FIELD["K=3 M=1 E=1 systematic masked 2^25"], kind, randomness)
    with pytest.raises(SchemeError, match="nothing is left to compare"):
        accepted(code, {j: answers[j] for j in range(4)}, kind)
    with pytest.raises(SchemeError, match="Freivalds"):
        accepted(code, answers, Pass.GRAD_WEIGHT)
    with pytest.raises(EncodingError, match="shape"):
        accepted(code, {**answers, 0: answers[0][:1]}, kind)


@pytest.mark.parametrize("broken", [False, True], ids=["the check", "a check of the first answers only"])
def test_a_check_that_ignores_the_redundant_answers_would_pass_a_fault(broken, randomness, monkeypatch):
    if broken:
        monkeypatch.setattr(parity, "syndromes", lambda checks, answers, prime: torch.zeros(1))
    code, answers = field_answers(FIELD["K=3 M=1 E=1 dense masked 2^25"], Pass.FORWARD, randomness)
    assert accepted(code, {**answers, 1: (answers[1] + 1).remainder(code.prime)}, Pass.FORWARD) is broken


# --- in the reals ---------------------------------------------------------------------------------------------------
REAL = {
    "K=1 M=1": dk.Scheme(inputs=1, colluders=1, arithmetic=dk.Real(1e2)),
    "K=3 M=1 E=1": dk.Scheme(inputs=3, colluders=1, spares=1, arithmetic=dk.Real(2e4)),
    "K=2 M=2": dk.Scheme(inputs=2, colluders=2, arithmetic=dk.Real(1e3)),
    "K=4 dense": dk.Scheme(inputs=4, colluders=1, spares=1, mixing="dense", arithmetic=dk.Real(2e4)),
    "float32, clear": dk.Scheme(
        inputs=3, colluders=1, spares=1, mask_gradients=False, arithmetic=dk.Real(1.5e3, dtype=torch.float32)
    ),
    "paper": dk.Scheme.paper(),
}
each_real = pytest.mark.parametrize("name", REAL)


def real_call(name: str, case: Case, randomness: Randomness, seed: int = 0) -> Call:
    scheme, generator = REAL[name], case.generator(seed)
    x, w, delta = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(scheme.arithmetic.dtype)
        for shape in (case.x_shape, case.w_shape, case.y_shape)
    )
    return Call(scheme, case.op, x, w, delta, randomness)


@each_real
@each_pass
def test_honest_real_answers_agree(name: str, kind: Pass, randomness: Randomness, full: bool):
    calls = alarms = 0
    for seed in range(20 if full else 1):
        for case in CASES:
            call = real_call(name, case, randomness, seed)
            answers = call.answers(kind)
            calls, alarms = calls + 1, alarms + (not call.agree(kind, answers))
    print(f"{name}, {kind.value}: {alarms} false alarms in {calls} calls")
    assert alarms == 0


@each_real
@each_pass
def test_a_faulty_real_answer_is_found(name: str, kind: Pass, randomness: Randomness):
    smallest = 0.0
    for case in CASES[::8]:
        call = real_call(name, case, randomness)
        answers, spreads = call.answers(kind), call.answer_spreads(kind)
        rows = call.mixing(kind).rows
        for liar in (j for j in answers if any(rows[j])):

            def lying(times: float, liar=liar, answers=answers, spreads=spreads) -> dict[int, Tensor]:
                lie = answers[liar].clone()
                lie.view(-1)[-1] += times * spreads[liar]
                return {**answers, liar: lie}

            # What the others' rounding hides behind grows with how much more they weigh in the parity column.
            caught = next((size for size in (10.0 * 2**n for n in range(12)) if not call.agree(kind, lying(size))), 0.0)
            assert caught, f"{case.label}: worker {liar}"
            smallest = max(smallest, caught)
            assert call.agree(kind, lying(caught), times=1e6)  # a check a million times too lenient sees nothing
            for wrong in (float("nan"), float("inf"), -float("inf")):
                assert not call.agree(kind, {**answers, liar: torch.full_like(answers[liar], wrong)})
        columns = parity._parity_checks(call.mixing(kind), answers, None, kind)[1]
        for i, j in combinations(answers, 2):
            same = all(abs(row[i] - row[j]) < 1e-9 for row in columns) or torch.equal(answers[i], answers[j])
            assert call.agree(kind, {**answers, i: answers[j], j: answers[i]}) is same, case.label
    print(f"{name}, {kind.value}: one element wrong by {smallest:g} spreads of its worker is caught, whoever it is")
    assert smallest <= 2000


@each_real
@each_pass
def test_real_parity_is_blind_to_weights_that_are_stale_everywhere(name: str, kind: Pass, randomness: Randomness):
    for case in CASES[::8]:
        call = real_call(name, case, randomness)
        answers = call.answers(kind, weights=call.w * 1.5)
        assert call.agree(kind, answers)
        assert not call.passes(kind, call.decoded(kind, answers))  # Freivalds is not


@each_pass
def test_a_spread_that_is_not_finite_is_refused(kind: Pass, randomness: Randomness):
    call = real_call("paper", CASES[0], randomness)
    for wrong in (float("nan"), float("inf")):
        spread = dict.fromkeys(range(call.scheme.workers), wrong)
        with pytest.raises(EncodingError):
            parity.verified_real_answers(call.mixing(kind), call.answers(kind), kind, spread=spread)


def test_answers_do_not_enter_the_spread(randomness: Randomness):
    # The tolerance is a function of bounds, weights and the code: a huge answer cannot widen it.
    call = Call(
        REAL["paper"], Conv.make((3,)), torch.randn(4, 2, 9), torch.randn(3, 2, 3), torch.randn(4, 3, 7), randomness
    )
    before = checks.answer_spreads(call.reaches[Pass.FORWARD], call.sent_x)
    answers = call.answers(Pass.FORWARD)
    assert not call.agree(Pass.FORWARD, {**answers, 0: answers[0] * 1e6})
    assert checks.answer_spreads(call.reaches[Pass.FORWARD], call.sent_x) == before
