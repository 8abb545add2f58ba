"""Workers that die, hang, lag, babble and come back: training goes on, and nobody gets a share that it may not have.

With a field the weights are bit for bit those of a training that nothing disturbed.
"""

import string
from collections import defaultdict
from functools import cache

import pytest
import torch

import darknight as dk
from darknight.coding import PRIME_28
from darknight.coding.algebra import inverse
from darknight.fleet import Custody, Fleet
from darknight.runtime import crew
from darknight.runtime.trial import WRONG
from darknight.types import ForwardTask, Pass, Refusal
from fleet.faults import Plan, faulty_fleet, redial
from fleet.workers import eventually
from runtime.scripts import batch, forced, network

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = dk.Scheme(inputs=2, colluders=1)
SCHEMES = {
    "field": SCHEME,
    "a spare": dk.Scheme(inputs=2, colluders=1, spares=1),
    "two colluders": dk.Scheme(inputs=2, colluders=2),
    "dense": dk.Scheme(inputs=2, colluders=1, mixing="dense"),
    "parity": dk.Scheme(inputs=2, colluders=1, spares=1, mixing="dense", integrity="parity"),
    "both": dk.Scheme(inputs=2, colluders=1, integrity="both"),
    "off": dk.Scheme(inputs=2, colluders=1, integrity="off"),
    "clear gradients": dk.Scheme(inputs=2, colluders=1, mask_gradients=False),
}
STEPS = 3


def train(scheme, fleet, steps=STEPS, between=lambda step: None):
    """The weights after some steps, and the ledger."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with dk.Runtime(scheme, fleet, seed=3) as runtime:
        dk.protect_(model, runtime)
        for step in range(steps):
            x, target = batch(6)
            x.requires_grad_()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
            between(step)
        dk.unprotect_(model)
    return [parameter.detach().clone() for parameter in model.parameters()], runtime.ledger


def disturbed(scheme, plans, standbys=0, between=lambda step: None, **options):
    operators = string.ascii_lowercase[: scheme.workers + standbys]
    options.setdefault("patience", 60.0)  # a machine that is busy with other things makes nobody late
    with faulty_fleet(operators, plans, **options) as fleet:
        return train(scheme, fleet, between=between)


@cache
def undisturbed(scheme):
    return train(scheme, None)[0]


def assert_undisturbed(weights, scheme):
    for found, expected in zip(weights, undisturbed(scheme), strict=True):
        assert torch.equal(found, expected)


# A step of the network is 3 forward replies and 3 backward replies of each worker that takes part.
MORE_PLACES = [(1, 1), (3, 0), (9, 0), (9, 1)]


@pytest.mark.parametrize(
    ("reply", "standbys"),
    [(1, 0), (3, 1), (5, 0), (5, 1), *(pytest.param(*place, marks=pytest.mark.full) for place in MORE_PLACES)],
)
@pytest.mark.parametrize("fault", ["die", "restart", "hang", "twice", "other", "refuse"])
def test_one_fault_changes_no_bit(fault, reply, standbys):
    plans = {0: Plan({reply: fault})}
    weights, ledger = disturbed(SCHEME, plans, standbys, patience=0.4 if fault == "hang" else 60.0)
    plans[0].woken.set()
    assert_undisturbed(weights, SCHEME)
    assert plans[0].count >= reply
    assert "w0" in ledger.missed or fault in ("twice", "restart")  # those may be noticed between two tasks


@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("label", SCHEMES)
def test_every_scheme_survives_the_loss_of_any_worker(label, standbys, full):
    scheme = SCHEMES[label]
    # A data worker, a carrier of noise and the last one; the usual scheme loses each in turn.
    some = (0, scheme.inputs, scheme.workers - 1)
    for worker in range(scheme.workers) if full or scheme is SCHEME else some:
        weights, ledger = disturbed(scheme, {worker: Plan({4: "die"})}, standbys)
        assert_undisturbed(weights, scheme)
        assert ledger.missed


@pytest.mark.parametrize("label", ["real", "paper"])
def test_real_arithmetic_survives_within_its_precision(label):
    scheme = dk.Scheme.paper() if label == "paper" else dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(1e3))
    weights, ledger = disturbed(scheme, {1: Plan({4: "die"})}, standbys=1)
    assert ledger.missed
    assert not ledger.failed
    for found, expected in zip(weights, train(scheme, None)[0], strict=True):
        # The paper's own setting rounds so coarsely that undisturbed trainings differ by several per cent as well.
        assert (found - expected).norm() < (0.15 if label == "paper" else 0.02) * expected.norm()


def test_forward_and_grad_input_need_nobody_instead_of_a_missing_worker():
    """The workers that idle in a pass answer in its place; only the weight gradient is done in the enclave."""
    weights, ledger = disturbed(SCHEME, {0: Plan({1: "die"})})
    assert_undisturbed(weights, SCHEME)
    assert not ledger.done_in_enclave[Pass.FORWARD]
    assert not ledger.done_in_enclave[Pass.GRAD_INPUT]
    assert ledger.done_in_enclave[Pass.GRAD_WEIGHT] == 3 * STEPS
    assert not ledger.resent


def test_a_standby_gets_the_lost_shares_and_the_enclave_does_nothing():
    weights, ledger = disturbed(SCHEME, {0: Plan({4: "die"})}, standbys=1)
    assert_undisturbed(weights, SCHEME)
    assert not ledger.done_in_enclave
    assert ledger.resent  # shares that the dead worker held
    assert [change.worker for change in ledger.reseated] == [None, "w4"]


def test_only_who_holds_shares_is_told_to_forget_them(monkeypatch):
    """A standby that reads nothing would otherwise collect such messages in the enclave, step after step."""
    monkeypatch.setattr(crew, "WORTH", 0)
    plans = {0: Plan()}
    disturbed(SCHEME, plans, standbys=1)
    assert len(plans[0].forgot) >= 3 * (STEPS - 1)
    assert not plans[4].forgot
    plans = {0: Plan({8: "die"})}
    disturbed(SCHEME, plans, standbys=1)
    assert plans[4].forgot  # it took the seat


def test_a_worker_that_hangs_is_asked_nothing_more_until_it_answers():
    plan, tasks = Plan({2: "hang"}), []
    with faulty_fleet("abcd", {0: plan}, patience=5.0) as fleet:

        def between(step):
            tasks.append(len(plan.seen))
            if step == 1:
                plan.woken.set()
                assert eventually(lambda: fleet.ready(0), 60)

        weights, ledger = train(SCHEME, fleet, between=between)
    assert_undisturbed(weights, SCHEME)
    assert tasks == [2, 2, 8]
    assert ledger.missed["w0"] == 1
    assert [change.worker for change in ledger.reseated if change.seat == 0] == [None, "w0"]


def test_a_worker_that_dies_and_comes_back_works_again():
    plan = Plan({2: "die"})
    with faulty_fleet("abcd", {0: plan}, patience=60.0) as fleet:

        def between(step):
            if step == 0:
                plan.reborn.set()
                fleet._lines[0].dial(now=True)

        weights, ledger = train(SCHEME, fleet, between=between)
    assert_undisturbed(weights, SCHEME)
    assert plan.count > 6
    assert [change.worker for change in ledger.reseated] == [None, "w0"]


def test_a_share_that_is_kept_without_a_word_makes_its_worker_late(monkeypatch):
    """Otherwise that one question would stay open, and with it all the memory that was lent since then."""
    monkeypatch.setattr("darknight.runtime.crew._AT_ONCE", 0.3)
    plans = {0: Plan({4: "die"}), 4: Plan({1: "skip"})}  # the standby's first reply is that it keeps a share again
    weights, ledger = disturbed(SCHEME, plans, standbys=1)
    assert_undisturbed(weights, SCHEME)
    assert [change.reason for change in ledger.reseated if change.seat == 0][2:3] == ["it did not answer in time"]


def test_one_stand_in_that_refuses_does_not_end_the_training():
    """Everybody refuses only if everybody was asked."""
    plans = {0: Plan({1: "die"}), 3: Plan(dict.fromkeys(range(2, 60), "refuse"))}
    weights, _ = disturbed(SCHEME, plans)
    assert_undisturbed(weights, SCHEME)


def test_an_input_whose_values_changed_places_is_not_masked_again():
    """A share made again from it would be another share under the same noise: the difference is the data's."""
    model = torch.nn.Linear(8, 3)
    plans = {0: Plan({1: "restart"})}
    with faulty_fleet("abcd", plans, patience=60.0) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        dk.protect_(model, runtime)
        x = torch.randn(4, 8)
        y = model(x)
        x.data[0] = x.data[0].view(4, 2).flip(0).flatten()  # places of one parity only
        redial(fleet)
        with pytest.raises(dk.errors.ProtectError, match="overwritten"):
            y.sum().backward()
    assert max(map(len, shares_by_operator("abcd", plans).values())) == 1


def test_a_worker_that_breaks_the_protocol_between_tasks_is_out_as_well():
    plan = Plan()
    with faulty_fleet("abcd", {0: plan}) as fleet:
        train(SCHEME, fleet, steps=1)
        plan.seats[-1].write(10_000, Refusal(message="nobody asked"))
        redial(fleet)
        assert "broke the protocol" in fleet.trouble(0)
        assert len(plan.seats) == 1


def test_a_worker_that_breaks_the_protocol_does_not_come_back():
    plan = Plan({2: "other"})
    with faulty_fleet("abcd", {0: plan}) as fleet:
        weights, ledger = train(SCHEME, fleet, between=lambda step: redial(fleet))
        assert "broke the protocol" in fleet.trouble(0)
    assert_undisturbed(weights, SCHEME)
    assert plan.count == 2
    assert "not asked" in ledger.reasons["w0"]


def test_all_workers_may_die():
    weights, ledger = disturbed(SCHEME, {j: Plan({5: "die"}) for j in range(4)})
    assert_undisturbed(weights, SCHEME)
    assert ledger.done_in_enclave[Pass.FORWARD] > 0


# --- rule 1 -----------------------------------------------------------------------------------------------------------
def shares_by_operator(operators, plans):
    """What each operator ever received: distinct shares of each masking. A masking is a call, and a direction."""
    held = defaultdict(set)
    for worker, plan in plans.items():
        for task in plan.seen:
            key = (operators[worker], task.layer, task.call, type(task) is ForwardTask)
            held[key].add(task.tensor.numpy().tobytes())
    return held


def test_no_operator_ever_gets_a_second_share_of_a_masking():
    """Every share that anybody ever received, while workers restart all the time, in a fleet of few operators."""
    operators = "abcdbca"
    plans = {j: Plan(dict.fromkeys(range(2 + j, 60, 5 + j), "restart")) for j in range(len(operators))}
    with faulty_fleet(operators, plans, patience=60.0) as fleet:
        weights, ledger = train(SCHEME, fleet, between=lambda step: redial(fleet))
    assert_undisturbed(weights, SCHEME)
    held = shares_by_operator(operators, plans)
    assert len(held) > 30
    assert len(ledger.reseated) > 5
    assert max(map(len, held.values())) == 1


@pytest.mark.parametrize("broken", [False, True])
def test_a_worker_that_leaves_and_comes_back_gets_no_second_share(monkeypatch, broken):
    """M = 2: one more share in the hands of two workers would be one too many. Worker 3 is away in the forward pass;
    then worker 0 leaves, a standby takes its seat, and worker 0 comes back while seat 3 is still empty."""
    scheme = dk.Scheme(inputs=2, colluders=2)
    if broken:
        monkeypatch.setattr(Custody, "may_send", lambda *_: True)
    plans = {j: Plan() for j in range(7)}

    def away(*workers):
        for j, plan in plans.items():
            plan.dead = j in workers
            if plan.dead:
                plan.seats[-1].close()

    with faulty_fleet("abcdefg", plans, patience=60.0) as fleet, dk.Runtime(scheme, fleet) as runtime:
        model = torch.nn.Linear(6, 4)
        dk.protect_(model, runtime)
        away(3, 6)
        y = model(torch.randn(4, 6))
        away(0, 3)
        redial(fleet)
        with torch.no_grad():
            model(torch.randn(4, 6))  # worker 6 takes the seat of worker 0
        away(3)
        redial(fleet)
        y.sum().backward()  # worker 0 takes the seat of worker 3
    assert max(map(len, shares_by_operator("abcdefg", plans).values())) == (2 if broken else 1)


@pytest.mark.parametrize("broken", [False, True])
def test_a_standby_of_an_operator_that_saw_another_share_gets_none(monkeypatch, broken):
    """Two workers die in a backward pass. The only standby belongs to the operator of one, and takes the other's seat.

    For the calls that come, that is, and not for this one: without the rule it would get a second share.
    """
    operators = "abcdb"
    plans = {0: Plan({4: "die"}), 1: Plan({4: "die"})}
    if broken:
        monkeypatch.setattr(Custody, "may_send", lambda *_: True)
    with faulty_fleet(operators, plans, patience=60.0) as fleet:
        weights, ledger = train(SCHEME, fleet)
    assert_undisturbed(weights, SCHEME)
    assert [change.worker for change in ledger.reseated] == [None, None, "w4"]
    assert max(map(len, shares_by_operator(operators, plans).values())) == (2 if broken else 1)


def test_a_share_that_is_sent_again_is_the_same_share():
    plans = {0: Plan({4: "die"})}
    disturbed(SCHEME, plans, standbys=1)
    first = {(task.layer, task.call): task.tensor for task in plans[0].seen if isinstance(task, ForwardTask)}
    again = {(task.layer, task.call): task.tensor for task in plans[4].seen if isinstance(task, ForwardTask)}
    both = first.keys() & again.keys()
    assert both
    for key in both:
        assert torch.equal(first[key], again[key])


# --- liars ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", [label for label in SCHEMES if label != "off"])
def test_liars_of_every_scheme_are_out_and_change_no_bit(label):
    scheme = SCHEMES[label]
    plans = {0: Plan({2: "lie"}), 1: Plan({6: "lie"})}
    weights, ledger = disturbed(scheme, plans, standbys=1)
    assert_undisturbed(weights, scheme)
    assert {event.worker for event in ledger.blamed} == {"w0", "w1"}
    assert {event.worker for event in ledger.reseated if event.worker is not None} == {f"w{scheme.workers}"}


def test_all_workers_may_lie_at_once():
    weights, ledger = disturbed(SCHEME, {j: Plan(dict.fromkeys(range(1, 99), "lie")) for j in range(4)})
    assert_undisturbed(weights, SCHEME)
    assert {event.worker for event in ledger.blamed} == {"w0", "w1", "w2", "w3"}
    assert ledger.done_in_enclave[Pass.FORWARD] > 0
    assert not ledger.missed  # nobody is asked again once it is out


def test_a_liar_that_says_no_more_is_out_all_the_same(monkeypatch):
    """It is asked what was wrong, and hangs. That decides nothing, holds up nobody for long, and is no fault."""
    monkeypatch.setattr("darknight.runtime.crew._AT_ONCE", 0.3)
    monkeypatch.setattr(Fleet, "late_after", lambda fleet, key: 0.0)
    plans = {0: Plan({2: "lie", 3: "hang"})}
    weights, ledger = disturbed(SCHEME, plans)
    plans[0].woken.set()
    assert_undisturbed(weights, SCHEME)
    assert [(event.worker, event.finding) for event in ledger.blamed] == [("w0", WRONG)]
    assert not ledger.missed


def test_a_stand_in_may_lie_as_well():
    always = dict.fromkeys(range(1, 99), "lie")
    plans = {0: Plan({2: "lie"}), 4: Plan(always), 5: Plan(always)}
    weights, ledger = disturbed(SCHEME, plans, standbys=2)
    assert_undisturbed(weights, SCHEME)
    assert {event.worker for event in ledger.blamed} == {"w0", "w4", "w5"}


def mixes(parts: torch.Tensor, mixture: torch.Tensor) -> bool:
    """Whether `mixture` (1, ...) is a combination of `parts` (group, ...) modulo the prime, with any coefficients."""
    columns, wanted = parts.flatten(1).tolist(), mixture.flatten().tolist()
    places = range(len(columns))
    solved = inverse([[columns[group][place] for group in places] for place in places], PRIME_28)
    assert solved is not None
    factors = [sum(solved[group][place] * wanted[place] for place in places) % PRIME_28 for group in places]
    return all(
        sum(factor * column[place] for factor, column in zip(factors, columns, strict=True)) % PRIME_28 == value
        for place, value in enumerate(wanted)
    )


@pytest.mark.parametrize("reply", [1, 5])
def test_liars_get_no_share_beyond_their_own_and_are_asked_about_nothing_else(reply):
    """A liar in the first forward pass, or backward; its share goes to a standby whose operator has none."""
    operators = "abcdba"
    plans = {0: Plan({reply: "lie"})}
    with faulty_fleet(operators, plans, patience=60.0) as fleet:
        weights, ledger = train(SCHEME, fleet)
    assert_undisturbed(weights, SCHEME)
    assert {event.worker for event in ledger.blamed} == {"w0"}
    question = plans[0].seen.pop()
    assert question.tensor.shape[0] == 1
    asked_before = plans[0].seen[-1]
    assert type(question) is type(asked_before)
    assert mixes(asked_before.tensor, question.tensor)
    assert not mixes(asked_before.tensor.roll(1, -1), question.tensor)
    assert max(map(len, shares_by_operator(operators, plans).values())) == 1


def test_an_overflow_is_blamed_on_nobody_and_a_lie_in_it_on_the_liar(monkeypatch):
    scheme = dk.Scheme(inputs=2, colluders=1)
    forced(monkeypatch, 3)
    undisturbed, _ = train(scheme, None)
    with faulty_fleet("abcd", {}, patience=60.0) as fleet:
        weights, ledger = train(scheme, fleet)
    assert all(map(torch.equal, weights, undisturbed))
    assert ledger.overflows.total() > 0
    assert not ledger.failed
    with faulty_fleet("abcd", {0: Plan({1: "lie", 2: "lie"})}, patience=60.0) as fleet:
        weights, ledger = train(scheme, fleet)
    assert all(map(torch.equal, weights, undisturbed))
    assert {event.worker for event in ledger.blamed} == {"w0"}
