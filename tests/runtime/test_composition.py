"""What the ledger adds up over a real training is what workers really received, counted from their own recordings."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import darknight as dk
from darknight.accounting import Accountant, coalition_bounds
from darknight.coding import draw_code
from darknight.randomness import Randomness
from fleet.faults import Plan, faulty_fleet
from fleet.threads import thread_fleet
from runtime.scripts import batch, forced, network

pytestmark = pytest.mark.usefixtures("one_thread")

STD = 1e3
REAL = dk.Scheme(inputs=3, colluders=1, arithmetic=dk.Real(STD))
PER_SCALAR = 0.5 * math.log1p(1 / STD**2)  # K=3, M=1: for every row
FORWARD = 2 * 6 * 6 + 6 * 6 * 6 + 8 * 2 * 2  # features of the inputs of the network's three layers
BACKWARD = 6 * 6 * 6 + 8 * 2 * 2 + 5  # and of their outputs
SHARES = ("forward.share", "backward.share")


def witnessed(fleet):
    """Maskings, nats about one example, nats in all: from what worker 0 received, which has a share of every masking.

    A share is (group, *feature).
    """
    shares = [record.tensor for record in fleet.transcript(0) if record.kind in SHARES]
    return (
        len(shares),
        PER_SCALAR * sum(math.prod(share.shape[1:]) for share in shares),
        PER_SCALAR * sum(share.numel() for share in shares),
    )


def check(runtime, fleet):
    """The accounts agree with the witness, in all and layer by layer."""
    accountant = runtime.ledger.accountant
    maskings, nats, everything = witnessed(fleet)
    assert accountant.total.maskings == maskings
    assert accountant.total.nats == pytest.approx(nats)
    assert accountant.total.everything == pytest.approx(everything)
    for (layer, what), account in accountant.layers.items():
        kind = SHARES[what == "gradient"]
        seen = [r for r in fleet.transcript(0) if r.kind == kind and r.layer == layer]
        assert account.maskings == len(seen)
        assert account.scalar == pytest.approx(PER_SCALAR * len(seen))


def step(model, x, target):
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    return loss


def epochs(model):
    """2 epochs of 3 steps, the last of 2 examples alone, and an evaluation in one batch after each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, target = batch(16)
    for _ in range(2):
        for begin in (0, 7, 14):
            optimizer.zero_grad()
            step(model, x[begin : begin + 7], target[begin : begin + 7])
            optimizer.step()
        with torch.no_grad():
            model(x[:5])


def recomputed(model, reentrant):
    """The first two layers are masked again in the backward pass: torch recomputes their activations."""
    x, target = batch(7)
    hidden = checkpoint(model[:4], x.requires_grad_(), use_reentrant=reentrant)
    nn.functional.cross_entropy(model[4:](hidden), target).backward()


def kept_graph(model):
    x, target = batch(7)
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward(retain_graph=True)
    loss.backward()


def repeated(model):
    """A step that fails half-way, and is done again: what was sent was sent."""
    x, target = batch(7)
    hook = model[5].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, x, target)
    hook.remove()
    step(model, x, target)


# what happens, maskings, features of an example that was in every batch
SCRIPTS = {
    "layers": (lambda model: step(model, *batch(7)), 6, FORWARD + BACKWARD),
    "epochs": (epochs, 6 * 6 + 2 * 3, 6 * (FORWARD + BACKWARD) + 2 * FORWARD),
    "recomputation": (lambda model: recomputed(model, False), 8, FORWARD + BACKWARD + 72 + 216),
    "recomputation, reentrant": (lambda model: recomputed(model, True), 8, FORWARD + BACKWARD + 72 + 216),
    "a graph differentiated twice": (kept_graph, 9, FORWARD + 2 * BACKWARD),
    "a step done again": (repeated, 3 + 1 + 6, 2 * FORWARD + BACKWARD + 5),
}


@pytest.mark.parametrize("label", SCRIPTS)
def test_every_masking_of_a_training_is_counted_in_full(label):
    script, maskings, features = SCRIPTS[label]
    model = network()
    with thread_fleet(REAL, record=True) as fleet, dk.Runtime(REAL, fleet) as runtime:
        dk.protect_(model, runtime)
        script(model)
        check(runtime, fleet)
        assert runtime.ledger.maskings == maskings
        assert runtime.ledger.nats_per_example == pytest.approx(features * PER_SCALAR)
        summary = runtime.ledger.summary()["leakage"]
        assert summary["bits_per_example"] == pytest.approx(features * PER_SCALAR / math.log(2))
        assert sum(row["nats_per_example"] for row in summary["layers"]) == pytest.approx(features * PER_SCALAR)


def forgets_remaskings(event, accountant):
    """Counts a layer once."""
    return (event.layer, event.what) not in accountant.layers


def forgets_gradients(event, accountant):
    return event.what == "input"


def forgets_recomputation(event, accountant):
    """Takes an input that follows a gradient of the same training step for known."""
    return event.what == "gradient" or not any(what == "gradient" for _, what in accountant.layers)


BROKEN = {
    "re-maskings": (forgets_remaskings, "a step done again"),
    "steps": (forgets_remaskings, "epochs"),
    "gradients": (forgets_gradients, "layers"),
    "recomputation": (forgets_recomputation, "recomputation"),
}


@pytest.mark.parametrize("label", BROKEN)
def test_an_accountant_that_forgets_is_found_out(label, monkeypatch):
    counts, name = BROKEN[label]
    real = Accountant.masked
    monkeypatch.setattr(Accountant, "masked", lambda self, event: real(self, event) if counts(event, self) else None)
    model = network()
    with thread_fleet(REAL, record=True) as fleet, dk.Runtime(REAL, fleet) as runtime:
        dk.protect_(model, runtime)
        SCRIPTS[name][0](model)
        with pytest.raises(AssertionError):
            check(runtime, fleet)


def test_a_share_that_is_sent_again_unchanged_adds_nothing():
    """Worker 0 dies after its forward share; a standby gets the same one. Masked again, it would count again."""
    scheme = dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(STD))
    plans = {0: Plan({2: "die"})}
    operators = [f"operator {j}" for j in range(scheme.workers + 1)]
    with faulty_fleet(operators, plans) as fleet, dk.Runtime(scheme, fleet) as runtime:
        model = nn.Linear(6, 4, bias=False)
        dk.protect_(model, runtime)
        model(torch.randn(5, 6)).sum().backward()
        standby = plans[scheme.workers].seen
        assert torch.equal(standby[0].tensor, plans[0].seen[0].tensor)
        assert runtime.ledger.resent > 0
        assert runtime.ledger.maskings == 2
        assert runtime.ledger.nats_per_example == pytest.approx((6 + 4) * PER_SCALAR)


def test_in_the_field_maskings_again_are_counted_and_show_nothing(monkeypatch):
    forced(monkeypatch, 4)
    scheme = dk.Scheme(inputs=3, colluders=1)
    model = network()
    with thread_fleet(scheme, record=True) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        step(model, *batch(7))
        ledger = runtime.ledger
        assert ledger.overflows.total() > 0
        assert ledger.maskings == witnessed(fleet)[0] == 6 + ledger.overflows.total()
        assert ledger.nats_per_example == ledger.accountant.total.everything == 0.0


@pytest.mark.parametrize(
    "scheme",
    [
        dk.Scheme(inputs=2, colluders=2, arithmetic=dk.Real(1e2)),
        dk.Scheme(inputs=3, colluders=1, arithmetic=dk.Real(1e3)),
    ],
    ids=["M=2", "M=1"],
)
def test_every_coalition_of_seats_has_its_own_sum(scheme):
    model = nn.Linear(6, 4, bias=False)
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        for _ in range(3):
            model(torch.randn(5, 6)).sum().backward()
        code = draw_code(scheme, Randomness(bytes(32)).fresh())  # constants
        std = scheme.arithmetic.noise_std
        of_x, of_delta = (coalition_bounds(mixing, bound=1.0, noise_std=std) for mixing in code.masking)
        accountant = runtime.ledger.accountant
        for seats in of_x:
            assert accountant.seen_by(seats) == pytest.approx(3 * (6 * of_x[seats] + 4 * of_delta[seats]))
        assert accountant.seen_by(range(scheme.colluders + 1)) == math.inf
        worst = runtime.ledger.summary()["leakage"]["worst_seats"]
        assert worst["names"] == [scheme.seats[seat] for seat in worst["seats"]]
        assert worst["nats_per_example"] == pytest.approx(max(map(accountant.seen_by, of_x)))
        assert worst["nats_per_example"] <= runtime.ledger.nats_per_example * (1 + 1e-9)


def test_what_the_paper_would_say_stands_beside():
    """Theorem 1 takes K C1^2 ratio / (2 sigma^2) for every scalar; the ratio of these coefficients is 1."""
    model = network()
    with thread_fleet(REAL) as fleet, dk.Runtime(REAL, fleet) as runtime:
        dk.protect_(model, runtime)
        step(model, *batch(7))
        said = runtime.ledger.summary()["leakage"]["paper"]
        assert said == {"theorem": 1, "nats_per_example": pytest.approx((FORWARD + BACKWARD) * 3 / (2 * STD**2))}
        assert f"would say {said['nats_per_example']:.3g} nats; we say {runtime.ledger.nats_per_example:.3g}" in str(
            runtime.ledger
        )
