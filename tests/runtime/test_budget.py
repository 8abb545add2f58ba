"""The budget of a runtime: what would exceed it is refused before it is sent, and nothing has changed."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import darknight as dk
from fleet.threads import thread_fleet
from runtime.scripts import batch, network
from runtime.test_composition import BACKWARD, FORWARD, PER_SCALAR, REAL, SHARES, witnessed
from train.saved import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = (FORWARD + BACKWARD) * PER_SCALAR


class Normalised(nn.Module):
    """Running statistics change before anything is masked."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm2d(2)
        self.rest = network()

    def forward(self, x):
        return self.rest(self.first(x))


def normalised():
    torch.manual_seed(0)
    return Normalised()


def everything(model, optimizer):
    """Parameters, buffers, gradients, the optimizer's memory: copies."""
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()["state"], grads))


def unchanged(before, after):
    flat = [torch.utils._pytree.tree_leaves(each) for each in (before, after)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True))


def step(model, optimizer, seed=0):
    x, target = batch(7, seed=seed)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), target).backward()
    optimizer.step()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("spare", [0.0, 0.4, 0.99])
def test_a_step_is_refused_before_it_begins_and_nothing_has_changed(steps, spare):
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    budget = (steps + spare) * STEP
    with (
        thread_fleet(REAL, record=True) as fleet,
        dk.Runtime(REAL, fleet, leakage_budget=budget) as runtime,
    ):
        dk.protect_(model, runtime)
        for seed in range(steps):
            step(model, optimizer, seed)
        before, sent = everything(model, optimizer), runtime.ledger.sent_bytes
        state, received = runtime.state_dict(), len(fleet.transcript(0))
        x, target = batch(7)
        for _ in range(2):  # however often it is tried
            with pytest.raises(dk.errors.PrivacyBudgetError, match="one more step") as refusal:
                nn.functional.cross_entropy(model(x), target).backward()
        assert unchanged(before, everything(model, optimizer))
        assert runtime.ledger.sent_bytes == sent
        assert len(fleet.transcript(0)) == received
        assert runtime.state_dict() == state
        assert witnessed(fleet)[1] == pytest.approx(steps * STEP)
        assert witnessed(fleet)[1] <= budget * (1 + 1e-9)
        error = refusal.value
        assert (error.budget, error.used, error.needed) == pytest.approx((budget, steps * STEP, STEP))
        left = runtime.ledger.summary()["leakage"]["budget"]
        assert left == {"nats": budget, "left": pytest.approx(spare * STEP, abs=1e-12)}


def test_without_the_check_it_would_be_exceeded(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr("darknight.accounting.budget.Budget._refuse", lambda *_: None)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with thread_fleet(REAL, record=True) as fleet, dk.Runtime(REAL, fleet, leakage_budget=STEP) as runtime:
        dk.protect_(model, runtime)
        for seed in range(2):
            step(model, optimizer, seed)
        assert witnessed(fleet)[1] > 1.9 * STEP


def test_if_the_model_did_not_ask_first_its_running_statistics_would_move(monkeypatch):
    """Batch norm comes before the first masked layer: that is why the runtime is asked when the model is called."""
    monkeypatch.setattr(dk.Runtime, "model_called", lambda self: None)
    model = normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with thread_fleet(REAL) as fleet, dk.Runtime(REAL, fleet, leakage_budget=STEP) as runtime:
        dk.protect_(model, runtime)
        step(model, optimizer)
        before = everything(model, optimizer)
        with pytest.raises(dk.errors.PrivacyBudgetError):
            step(model, optimizer)
        assert not unchanged(before, everything(model, optimizer))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8, 0.999])
def test_the_first_step_is_refused_before_it_has_gradients(share):
    """What it will cost is not known yet, so it is refused where the budget ends: in its forward pass."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = copy.deepcopy(dict(model.named_parameters()))
    with thread_fleet(REAL, record=True) as fleet, dk.Runtime(REAL, fleet, leakage_budget=share * STEP) as runtime:
        dk.protect_(model, runtime)
        with pytest.raises(dk.errors.PrivacyBudgetError, match="its input may show"):
            step(model, optimizer)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert unchanged(weights, dict(model.named_parameters()))
        assert not [record for record in fleet.transcript(0) if record.kind == SHARES[1]]
        assert witnessed(fleet)[1] <= share * STEP


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_are_part_of_a_step(reentrant):
    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = network()[:5], nn.Sequential(nn.Flatten(), nn.Linear(32, 5))

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=reentrant))

    model, cost = Recomputing(), STEP + (72 + 216) * PER_SCALAR

    def once():
        x, target = batch(7)
        nn.functional.cross_entropy(model(x.requires_grad_()), target).backward()

    with thread_fleet(REAL, record=True) as fleet, dk.Runtime(REAL, fleet, leakage_budget=2.9 * cost) as runtime:
        dk.protect_(model, runtime)
        once()
        once()
        assert witnessed(fleet)[1] == pytest.approx(2 * cost)
        with pytest.raises(dk.errors.PrivacyBudgetError, match="one more step"):
            once()
        assert witnessed(fleet)[1] == pytest.approx(2 * cost)


def test_an_evaluation_ends_where_the_budget_does():
    model = network()
    budget = 2.5 * FORWARD * PER_SCALAR
    with thread_fleet(REAL, record=True) as fleet, dk.Runtime(REAL, fleet, leakage_budget=budget) as runtime:
        dk.protect_(model, runtime)
        with torch.no_grad():
            for _ in range(2):
                model(batch(5)[0])
            with pytest.raises(dk.errors.PrivacyBudgetError, match="layer 2: its input"):
                model(batch(5)[0])
        assert witnessed(fleet)[1] <= budget


def test_a_field_leaks_nothing_and_never_uses_it_up():
    scheme = dk.Scheme(inputs=3, colluders=1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet, leakage_budget=1e-300) as runtime:
        dk.protect_(model, runtime)
        for seed in range(3):
            step(model, optimizer, seed)
        assert runtime.ledger.budget.left == 1e-300


def test_without_workers_nothing_is_used():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dk.Runtime(REAL, None, leakage_budget=1e-300) as runtime:
        dk.protect_(model, runtime)
        step(model, optimizer)
        assert runtime.ledger.nats_per_example == 0.0


# --- what it takes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, True, "1e-3"])
def test_it_is_a_positive_number_of_nats(value):
    with pytest.raises(dk.errors.UsageError, match="leakage_budget"):
        dk.Runtime(REAL, None, leakage_budget=value)


@pytest.mark.parametrize("scheme", [dk.Scheme.paper(), dk.Scheme(inputs=2, colluders=1, mask_gradients=False)])
def test_gradients_in_the_clear_have_no_bound_and_so_no_budget(scheme):
    with pytest.raises(dk.errors.SchemeError, match=r"gradients in the clear.*mask_gradients=True"):
        dk.Runtime(scheme, None, leakage_budget=1.0)
    dk.Runtime(scheme.for_inference(), None, leakage_budget=1.0).close()


def test_neither_has_a_fleet_in_one_hand():
    operators = ["one"] * REAL.workers
    with (
        thread_fleet(REAL, operators=operators, insecure_one_operator=True) as fleet,
        pytest.raises(dk.errors.SchemeError, match="insecure_one_operator"),
    ):
        dk.Runtime(REAL, fleet, leakage_budget=1.0)


# --- the training loop and its checkpoints ----------------------------------------------------------------------------
class First(nn.Module):
    """Batch norm before the convolution and after it, as some networks have it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4 * 24, 3)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def fitted(folder, model, budget, **options):
    """(ledger, error): a training of 8 steps in 2 epochs."""
    with thread_fleet(REAL) as fleet, dk.Runtime(REAL, fleet, seed=3, leakage_budget=budget) as runtime:
        dk.protect_(model, runtime)
        error = None
        try:
            train(folder, model, runtime=runtime, **options)
        except dk.errors.PrivacyBudgetError as refusal:
            error = refusal
        dk.unprotect_(model)
        return runtime.ledger, error


def first():
    torch.manual_seed(1)
    return First()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A training without a budget: its ledger, and its weights."""
    model = first()
    ledger, error = fitted(tmp_path_factory.mktemp("whole"), model, None)
    assert error is None
    return ledger, copy.deepcopy(model.state_dict())


@pytest.mark.parametrize("share", [0.08, 0.3, 0.7])
def test_darknights_own_loop_stops_saved_and_goes_on_with_more(share, whole, tmp_path):
    """In the first step, in a later one, in the second epoch: what was saved goes on to the weights of `whole`."""
    budget = share * whole[0].nats_per_example
    model = first()
    ledger, error = fitted(tmp_path, model, budget)
    assert error is not None
    assert 0 < ledger.nats_per_example <= budget
    if share == 0.08:  # less than one step: nothing is saved, and nothing has changed
        assert unchanged(dict(model.state_dict()), dict(first().state_dict()))
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    used = ledger.nats_per_example
    again, error = fitted(tmp_path, first(), budget, resume=True)
    assert error is not None  # it goes on counting
    assert again.nats_per_example == pytest.approx(used)
    resumed = first()
    ledger, error = fitted(tmp_path, resumed, 2 * whole[0].nats_per_example, resume=True)
    assert error is None
    for name, value in whole[1].items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=1e-3, atol=1e-5)
    assert ledger.nats_per_example == pytest.approx(whole[0].nats_per_example, rel=0.2)
    assert ledger.accountant.costliest_step == pytest.approx(whole[0].accountant.costliest_step)
