"""Real arithmetic: bounds, their events, and the leakage that the ledger adds up."""

import math

import pytest
import torch
from torch import nn

import darknight as dk
from fleet.threads import thread_fleet
from runtime.scripts import batch, network, train, trained_by_fleet

pytestmark = pytest.mark.usefixtures("one_thread")

REAL = dk.Scheme(inputs=3, colluders=1, arithmetic=dk.Real(1e3))


def layer(scheme, **options):
    fleet = thread_fleet(scheme)
    runtime = dk.Runtime(scheme, fleet, **{key: options.pop(key) for key in ("strict_bounds",) if key in options})
    model = nn.Sequential(nn.Linear(6, 4, bias=False))
    dk.protect_(model, runtime, **options)
    return fleet, runtime, model


@pytest.mark.parametrize("scheme", [REAL, dk.Scheme(inputs=2, colluders=2, arithmetic=dk.Real(1e2))])
def test_float64_training_is_plain_training(scheme):
    torch.testing.assert_close(trained_by_fleet(scheme), train(network()), rtol=1e-4, atol=1e-6)


def test_the_papers_setting_trains():
    start = torch.cat([parameter.detach().flatten() for parameter in network().parameters()])
    moved = nn.functional.cosine_similarity(
        trained_by_fleet(dk.Scheme.paper()) - start, train(network()) - start, dim=0
    )
    assert moved > 0.95


def test_an_undeclared_bound_is_a_power_of_two_and_grows_with_what_comes():
    fleet, runtime, model = layer(REAL)
    with fleet, runtime, torch.no_grad():
        for largest, bound in ((0.7, 1.0), (0.3, 1.0), (3.0, 4.0), (100.0, 128.0), (1.0, 128.0)):
            model(torch.full((4, 6), largest))
            assert runtime.state_dict()["layers"]["0"]["input_bound"] == bound
        assert [event.bound for event in runtime.ledger.bounds_raised] == [1.0, 4.0, 128.0]


def test_a_declared_bound_holds_until_it_is_broken():
    fleet, runtime, model = layer(REAL, bounds={"0": 1.5})
    with fleet, runtime, torch.no_grad():
        model(torch.full((4, 6), 1.5))
        assert not runtime.ledger.bounds_raised
        model(torch.full((4, 6), 2.0))
        assert [event.bound for event in runtime.ledger.bounds_raised] == [3.0]


def test_strict_bounds_raise_before_anything_is_sent():
    fleet, runtime, model = layer(REAL, bounds={"0": 1.0}, strict_bounds=True)
    with fleet, runtime, torch.no_grad():
        sent = runtime.ledger.sent_bytes
        with pytest.raises(dk.errors.EncodingError, match=r"layer 0: the input exceeds its bound 1"):
            model(torch.full((4, 6), 1.01))
        assert runtime.ledger.sent_bytes == sent


def test_the_ledger_adds_up_the_bound_of_every_sending():
    fleet, runtime, model = layer(REAL)
    per_scalar = 0.5 * math.log1p(1e-6)  # one row, M=1: C1^2 / (2 sigma^2)
    with fleet, runtime:
        with torch.no_grad():
            model(torch.randn(5, 6))
        assert runtime.ledger.nats_per_example == pytest.approx(6 * per_scalar, rel=1e-6)
        model(torch.randn(5, 6)).sum().backward()
        assert runtime.ledger.nats_per_example == pytest.approx((6 + 6 + 4) * per_scalar, rel=1e-6)
        assert runtime.ledger.maskings == 3
        assert "nats" in str(runtime.ledger)


def test_zeros_first_are_no_bound_of_zero():
    fleet, runtime, model = layer(REAL)
    with fleet, runtime, torch.no_grad():
        assert torch.allclose(model(torch.zeros(4, 6)), torch.zeros(4, 4), atol=1e-9)


def test_alone_sends_nothing_and_counts_nothing():
    with dk.Runtime(REAL, None) as runtime:
        model = network()
        dk.protect_(model, runtime)
        torch.testing.assert_close(train(model), train(network()), rtol=1e-4, atol=1e-6)
        assert runtime.ledger.sent_bytes == runtime.ledger.maskings == 0


PAPER = dk.Scheme.paper()


@pytest.mark.parametrize(
    ("scheme", "weight", "value", "fits"),
    [
        (REAL, 1e34, 1.0, True),
        (REAL, 1e307, 1.0, False),
        (REAL, 1.0, 1e25, True),
        (REAL, 1.0, 1e30, False),
        (REAL, 1.0, 1e308, False),
        (PAPER, 1e30, 1.0, True),
        (PAPER, 1e34, 1.0, False),
        (PAPER, 1e39, 1.0, False),
        (PAPER, 1.0, 1e30, False),
    ],
)
def test_what_leaves_the_range_of_floats_is_refused_and_nobody_is_blamed(scheme, weight, value, fits):
    model = nn.Linear(6, 4, bias=False).double()
    nn.init.constant_(model.weight, weight)
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        x = torch.full((4, 6), value, dtype=torch.float64)
        if not fits:
            with pytest.raises(dk.errors.EncodingError, match="layer"):
                model(x)
        else:
            torch.testing.assert_close(model(x), torch.full((4, 4), 6 * weight * value).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("scale", [1e39, 1e307])
def test_so_are_gradients(scale):
    scheme = dk.Scheme.paper()
    model = nn.Linear(6, 4, bias=False).double()
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        y = model(torch.ones(4, 6, dtype=torch.float64))
        with pytest.raises(dk.errors.EncodingError, match="layer"):
            y.backward(torch.full_like(y, scale))


def test_strict_bounds_hold_declared_inputs_and_nothing_else():
    fleet, runtime, model = layer(REAL, strict_bounds=True)
    with fleet, runtime:
        for scale in (1.0, 10.0, 100.0):  # neither this input's bound nor its gradient's was declared
            (model(torch.full((4, 6), scale)).sum() * scale).backward()


def test_leakage_goes_on_where_an_earlier_run_ended_and_is_counted_once():
    scheme = dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(1e3))

    def one_step(state=None, again=False):
        with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
            model = network()
            dk.protect_(model, runtime)
            for _ in range(1 + again):
                if state is not None:
                    runtime.load_state_dict(state)
            torch.nn.functional.cross_entropy(*_scored(model)).backward()
            runtime.load_state_dict(runtime.state_dict())  # of its own: as after a step that is taken back
            return runtime.ledger.leaked, runtime.state_dict()

    alone, state = one_step()
    assert alone["nats"] > 0
    together, _ = one_step(state, again=True)
    for name in ("nats", "everything", "paper", "maskings", "scalar"):
        assert together[name] == pytest.approx(2 * alone[name])
    assert together["step"] == pytest.approx(alone["step"])
    assert [seats for seats, _ in together["coalitions"]] == [seats for seats, _ in alone["coalitions"]]
    assert [entry["nats"] for entry in together["layers"]] == pytest.approx([2 * e["nats"] for e in alone["layers"]])
    for damage in ({"nats": -1.0, "maskings": 0, "clear": 0}, {"nats": 1.0}, 3):
        with dk.Runtime(scheme, None) as runtime, pytest.raises(dk.errors.UsageError, match="leakage is damaged"):
            runtime.load_state_dict({**runtime.state_dict(), "leaked": damage})


def _scored(model):
    x, target = batch(6)
    return model(x), target
