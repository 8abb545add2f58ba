"""The budget: never exceeded, and refused at the beginning of a step where that can be known."""

import gc
import math

import pytest

import darknight as dk
from darknight.accounting import Accountant, Budget, Masked, check_budget
from darknight.errors import PrivacyBudgetError, SchemeError, UsageError

REAL = dk.Scheme(inputs=3, colluders=1, arithmetic=dk.Real(1e3))


class Call:
    """Stands for a forward call whose backward pass may come."""


class Script:
    """Layers that cost 1 nat forward and 2 backward, in the order that autograd calls them."""

    def __init__(self, limit, layers=3):
        self.accountant = Accountant()
        self.budget = Budget(limit, self.accountant)
        self.layers = layers

    @property
    def used(self):
        return self.accountant.total.nats

    def spend(self, nats):
        self.accountant.masked(Masked(layer="a", what="input", examples=1, groups=1, features=1, nats=nats))

    def forward(self, keep=True, recomputed=False):
        later = 2.0 if keep else 0.0
        self.budget.forward("a", 1.0, later=later, keep=keep, recomputed=recomputed)
        self.spend(1.0)
        call = Call()
        if keep and not recomputed:
            self.budget.promise(call, later)
        return call

    def backward(self, call):
        self.budget.backward("a", 2.0, call)
        self.spend(2.0)

    def step(self, recompute=False):
        self.budget.model_called()
        calls = [self.forward() for _ in range(self.layers)]
        for call in reversed(calls):
            if recompute:
                self.forward(recomputed=True)
            self.backward(call)

    def forwards(self, calls):
        """As many as there may be."""
        while True:
            calls.append(self.forward())

    def steps(self):
        while True:
            self.step()

    def evaluate(self):
        for _ in range(self.layers):
            self.forward(keep=False)


def test_without_a_limit_everything_goes_and_the_costliest_step_is_known():
    script = Script(None)
    script.step()
    script.evaluate()
    script.step(recompute=True)
    script.step()
    assert script.used == 9 + 3 + 12 + 9
    assert script.accountant.costliest_step == 12
    assert script.budget.left is None


def test_the_last_step_that_fits_is_the_last():
    script = Script(27.0)
    for _ in range(3):
        script.step()
    assert script.used == 27  # the budget may be used up
    with pytest.raises(PrivacyBudgetError, match="one more step") as refusal:
        script.step()
    assert script.used == 27
    assert (refusal.value.budget, refusal.value.used, refusal.value.needed) == (27, 27, 9)


@pytest.mark.parametrize("limit", [27.0, 28.5, 35.9])
def test_from_the_second_step_on_it_is_refused_when_it_begins(limit):
    script = Script(limit)
    for _ in range(3):
        script.step()
    for _ in range(2):  # and again, if somebody tries again
        with pytest.raises(PrivacyBudgetError, match="one more step"):
            script.budget.model_called()
    assert script.used == 27


@pytest.mark.parametrize("limit", [0.5, 1.0, 4.0, 8.9])
def test_the_first_step_is_refused_in_its_forward_pass(limit):
    """A forward call is let through only if its backward pass can follow: gradients never are half done."""
    script = Script(limit)
    script.budget.model_called()
    calls = []
    with pytest.raises(PrivacyBudgetError, match="layer a: its input"):
        script.forwards(calls)
    assert len(calls) == limit // 3
    for call in calls:
        script.backward(call)
    assert script.used == 3 * (limit // 3) <= limit


def test_what_is_not_differentiated_after_all_is_free_again():
    script = Script(9.0)
    dropped = script.forward()
    with pytest.raises(PrivacyBudgetError):
        [script.forward() for _ in range(3)]
    del dropped
    gc.collect()
    assert script.used == 3
    script.layers = 2
    script.step()
    assert script.used == 9


def test_recomputed_activations_belong_to_the_step():
    script = Script(25.0)
    for _ in range(2):
        script.step(recompute=True)
    with pytest.raises(PrivacyBudgetError, match="one more step"):
        script.step(recompute=True)
    assert script.used == 24


def test_a_graph_that_is_differentiated_twice_is_checked_again():
    script = Script(10.0)
    script.budget.model_called()
    calls = [script.forward() for _ in range(3)]
    for call in calls:
        script.backward(call)
    with pytest.raises(PrivacyBudgetError, match="layer a: its gradient"):
        script.backward(calls[0])
    assert script.used == 9


def test_an_evaluation_is_no_step_but_stays_within_the_limit():
    script = Script(20.0)
    script.step()
    for _ in range(3):
        script.evaluate()
    assert script.accountant.costliest_step == 9
    with pytest.raises(PrivacyBudgetError, match="one more step"):
        script.step()
    with pytest.raises(PrivacyBudgetError, match="layer a: its input"):
        script.evaluate()
    assert script.used == 20


def test_layers_that_are_frozen_belong_to_the_step_of_their_model():
    script = Script(None)
    for _ in range(2):
        script.budget.model_called()
        script.forward(keep=False)
        call = script.forward()
        script.backward(call)
    assert script.accountant.costliest_step == 4


def test_a_resumed_run_knows_what_a_step_costs():
    first = Script(None)
    first.step()
    script = Script(17.0)
    script.accountant.add(Accountant.of(first.accountant.state()))
    with pytest.raises(PrivacyBudgetError, match="one more step"):
        script.step()
    assert script.used == 9


def test_an_accountant_that_forgets_maskings_would_exceed_it():
    """The tests above can fail: this one counts every second masking."""
    script = Script(27.0)
    counted, real = [], script.accountant.masked

    def forgetful(event):
        counted.append(event)
        if len(counted) % 2:
            real(event)

    script.accountant.masked = forgetful
    with pytest.raises(PrivacyBudgetError):
        script.steps()
    assert sum(event.nats for event in counted) > 27


# --- what it is compared with -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0, -1e-3, math.inf, math.nan, True, "1e-3", [1]])
def test_a_budget_is_a_positive_number(value):
    with pytest.raises(UsageError, match=r"leakage_budget=.*positive number of nats"):
        check_budget(value, REAL, one_operator=False)


@pytest.mark.parametrize("value", [None, 1, 1e-9])
def test_these_are(value):
    check_budget(value, REAL, one_operator=False)


def test_a_scheme_without_a_bound_has_no_budget():
    for scheme in (dk.Scheme.paper(), dk.Scheme(inputs=2, colluders=1, mask_gradients=False)):
        with pytest.raises(SchemeError, match="mask_gradients=True"):
            check_budget(1.0, scheme, one_operator=False)
        check_budget(1.0, scheme.for_inference(), one_operator=False)
        check_budget(None, scheme, one_operator=False)
    with pytest.raises(SchemeError, match="insecure_one_operator"):
        check_budget(1.0, REAL, one_operator=True)
