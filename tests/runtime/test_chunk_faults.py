"""Workers that fail or lie while two chunks are with them: every chunk in turn, and no bit changes."""

import string
from collections import defaultdict

import pytest
import torch

import darknight as dk
from darknight.types import ForwardTask, Pass
from fleet.faults import Plan, faulty_fleet
from runtime.cutting import EXAMPLES, cut  # noqa: F401 - a fixture
from runtime.scripts import network, train, trained_alone

pytestmark = pytest.mark.usefixtures("one_thread", "cut")

SCHEME = dk.Scheme(inputs=2, colluders=1)
FORWARD, BACKWARD = range(1, 10), range(10, 19)  # replies of a worker in a step: three layers, three chunks of each
MORE_REPLIES = [2, 5, 10, 12, 14]


def disturbed(scheme, plans, standbys=0, **options):
    operators = string.ascii_lowercase[: scheme.workers + standbys]
    options.setdefault("patience", 60.0)  # a machine that is busy with other things makes nobody late
    model = network()
    with faulty_fleet(operators, plans, **options) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        return train(model, EXAMPLES), runtime.ledger


def shares_of(plans):
    """By call: how many different shares every worker was sent."""
    shares = defaultdict(list)
    for worker, plan in plans.items():
        for task in plan.seen:
            if isinstance(task, ForwardTask):
                known = shares[task.call, worker]
                if not any(torch.equal(task.tensor, other) for other in known):
                    known.append(task.tensor)
    return shares


@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("fault", ["die", "restart", "refuse", "lie", "other"])
@pytest.mark.parametrize("reply", [1, 3, 11, *(pytest.param(reply, marks=pytest.mark.full) for reply in MORE_REPLIES)])
def test_a_fault_in_any_chunk_changes_no_bit(fault, reply, standbys):
    plans = {0: Plan({reply: fault})}
    weights, ledger = disturbed(SCHEME, plans, standbys)
    assert torch.equal(weights, trained_alone(SCHEME, EXAMPLES))
    assert plans[0].count >= reply
    assert {event.worker for event in ledger.blamed} == ({"w0"} if fault in ("lie", "other") else set())
    if fault == "lie":
        kinds = {event.kind for event in ledger.blamed}
        assert kinds == {Pass.FORWARD} if reply in FORWARD else kinds <= {Pass.GRAD_INPUT, Pass.GRAD_WEIGHT}
    assert all(len(known) == 1 for known in shares_of(plans).values())


@pytest.mark.parametrize("reply", [2, 11])
def test_who_hangs_with_two_chunks_costs_nothing_but_its_answers(reply):
    plans = {0: Plan({reply: "hang"})}
    weights, ledger = disturbed(SCHEME, plans, patience=5.0)
    plans[0].woken.set()
    assert torch.equal(weights, trained_alone(SCHEME, EXAMPLES))
    assert set(ledger.missed) == {"w0"}
    assert ledger.missed["w0"] >= 2  # the answer that comes after a late one is late too


@pytest.mark.parametrize("label", ["parity", "off", "clear gradients", "two colluders", "both"])
def test_other_schemes_lose_a_worker_between_chunks(label):
    scheme = {
        "parity": dk.Scheme(inputs=2, colluders=1, spares=1, mixing="dense", integrity="parity"),
        "off": dk.Scheme(inputs=2, colluders=1, integrity="off"),
        "clear gradients": dk.Scheme(inputs=2, colluders=1, mask_gradients=False),
        "two colluders": dk.Scheme(inputs=2, colluders=2),
        "both": dk.Scheme(inputs=2, colluders=1, integrity="both"),
    }[label]
    for reply in (2, 11):
        weights, ledger = disturbed(scheme, {1: Plan({reply: "die"})}, standbys=1)
        assert torch.equal(weights, trained_alone(scheme, EXAMPLES))
        assert ledger.missed


def test_two_liars_in_different_chunks_are_both_named():
    scheme = dk.Scheme(inputs=2, colluders=2)
    weights, ledger = disturbed(scheme, {0: Plan({1: "lie"}), 1: Plan({3: "lie"})})
    assert torch.equal(weights, trained_alone(scheme, EXAMPLES))
    assert {event.worker for event in ledger.blamed} == {"w0", "w1"}
