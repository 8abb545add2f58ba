"""What a plan predicts is what the ledger of a real step counts: bytes exactly, maskings, leakage, flops."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import darknight as dk
from darknight.models import build_model
from darknight.plan import MASKED, Candidate, Speeds, make_plan
from darknight.plan import traffic as traffic_of_plan
from fleet.threads import thread_fleet
from nn.three_ways import everything
from plan.requests import BATCH, CLASSES, SHAPE, request

KINDS = {
    "weights": "weights",
    "input_shares": "forward.share",
    "gradient_shares": "backward.share",
    "outputs": "forward.reply",
    "input_gradients": "grad_input.reply",
    "weight_gradients": "grad_weight.reply",
}
ARITHMETICS = {"field": {}, "real": {"arithmetic": "real", "leakage_target": 1e-2}}


def batch_of(size):
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, *SHAPE, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


class Done:
    """Steps of a model under the plan's scheme, by thread workers, and what everybody saw of it."""

    def __init__(self, plan, sizes, bounds=None):
        scheme, training = plan.scheme, plan.request.training
        model = build_model(plan.request.model, shape=SHAPE, classes=CLASSES, seed=0).train(training)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with thread_fleet(scheme, record=True) as fleet, dk.Runtime(scheme, fleet, seed=0) as runtime:
            where = everything if plan.request.place == "workers" else None
            self.report = dk.protect_(model, runtime, bounds=bounds, where=where)
            for size in sizes:
                images, labels = batch_of(size)
                if training:
                    optimizer.zero_grad()
                    cross_entropy(model(images), labels).backward()
                    optimizer.step()
                else:
                    with torch.no_grad():
                        model(images)
            self.records = [record for worker in range(scheme.workers) for record in fleet.transcript(worker)]
            self.shares = Counter(record.layer for record in self.records if record.kind == "forward.share")
        dk.unprotect_(model)
        self.ledger = runtime.ledger
        assert not self.ledger.overflows
        assert not self.ledger.missed

    def bytes(self, kind, layer=None):
        """Of tensors; a share that came as a seed was none on the wire."""
        found = (each for each in self.records if each.kind == kind and layer in (None, each.layer))
        return sum(each.tensor.nbytes for each in found if each.detail.get("seed") is None)


def compare_traffic(predicted, done, layer=None):
    for name, kind in KINDS.items():
        assert getattr(predicted, name) == done.bytes(kind, layer), (layer, name)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(
    ("model", "place"),
    [
        *((model, "structure") for model in ("small-cnn", "resnet-small", "mobilenet-small", "mlp")),
        ("mobilenet-small", "workers"),
    ],
)
def test_one_training_step(model, place, arithmetic):
    plan = make_plan(request(model=model, place=place, **ARITHMETICS[arithmetic]))
    assert (plan.scheme.inputs, plan.scheme.spares, plan.scheme.workers) == (3, 1, 6)
    done = Done(plan, [BATCH])
    step = plan.step.traffic
    assert (step.sent, step.received) == (done.ledger.sent_bytes, done.ledger.received_bytes)
    compare_traffic(step, done)
    for layer in plan.layers:
        if layer.form is not None:
            compare_traffic(layer.traffic, done, layer.name)
            assert layer.shares == done.shares[layer.name]
    assert plan.step.maskings == done.ledger.maskings
    assert plan.step.nats == pytest.approx(done.ledger.nats_per_example, rel=1e-12)
    assert (plan.step.nats > 0) == (arithmetic == "real")
    assert sum(layer.nats for layer in plan.layers) == pytest.approx(plan.step.nats)
    plain = {
        layer.name: layer.form.op.flops((BATCH, *layer.form.input_shape), layer.form.weight_shape)
        for layer in plan.layers
        if layer.where == MASKED
    }
    assert plain == {row.name: row.flops for row in done.report.masked}


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("model", ["small-cnn", "mobilenet-small"])
def test_one_batch_of_inference(model, arithmetic):
    plan = make_plan(request(model=model, training=False, **ARITHMETICS[arithmetic]))
    assert plan.scheme.workers == 5
    done = Done(plan, [BATCH])
    step = plan.step.traffic
    assert (step.sent, step.received) == (done.ledger.sent_bytes, done.ledger.received_bytes)
    compare_traffic(step, done)
    assert (plan.step.maskings, step.gradient_shares) == (done.ledger.maskings, 0)
    assert plan.step.nats == pytest.approx(done.ledger.nats_per_example, rel=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_chosen_spares_are_sent_shares_too(training):
    """The choice, not a number that was asked for: rounds that take long, and answers that are often missing."""
    slow = Speeds(pass_ms=500.0)
    plan = make_plan(request(model="small-cnn", training=training, spares=None, unreliable=0.2, speeds=slow))
    assert plan.scheme.spares > 0
    compare_traffic(plan.step.traffic, Done(plan, [BATCH]))


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("training", [True, False])
def test_parity_asks_everybody(training, arithmetic):
    asked = request(model="small-cnn", training=training, spares=None, integrity="parity", **ARITHMETICS[arithmetic])
    plan = make_plan(asked)
    done = Done(plan, [BATCH])
    compare_traffic(plan.step.traffic, done)
    assert done.ledger.sent_bytes == plan.step.traffic.sent
    without = make_plan(replace(asked, integrity="freivalds", spares=plan.scheme.spares))
    assert (plan.step.traffic.outputs > without.step.traffic.outputs) is training  # those who would idle answer too


def test_two_epochs_with_a_smaller_last_batch():
    """Weights change with every step, so they are sent in every one."""
    plan = make_plan(request(model="small-cnn", examples=2 * BATCH + 3))
    done = Done(plan, [BATCH, BATCH, 3] * 2)
    assert plan.run.steps == 6
    assert plan.run.maskings == done.ledger.maskings
    compare_traffic(plan.run.traffic, done)
    assert (plan.run.traffic.sent, plan.run.traffic.received) == (done.ledger.sent_bytes, done.ledger.received_bytes)


def test_inference_sends_its_weights_once():
    plan = make_plan(request(model="small-cnn", examples=2 * BATCH + 3, training=False))
    done = Done(plan, [BATCH, BATCH, 3])
    compare_traffic(plan.run.traffic, done)
    assert plan.run.traffic.weights == plan.step.traffic.weights


def test_leakage_does_not_depend_on_the_bounds_which_may_be_declared():
    plan = make_plan(request(model="small-cnn", **ARITHMETICS["real"]))
    declared = {layer.name: 64.0 for layer in plan.layers if layer.form is not None}
    assert plan.step.nats == pytest.approx(Done(plan, [BATCH], declared).ledger.nats_per_example, rel=1e-12)


def test_a_plan_that_forgets_the_workers_that_only_keep_a_share_is_found_out(monkeypatch):
    """The comparison can fail: who does not compute in a forward pass gets a share all the same."""
    plan = make_plan(request(model="small-cnn"))
    done = Done(plan, [BATCH])
    original = traffic_of_plan.traffic_of

    class Fewer(Candidate):
        workers = property(lambda self: self.computing)

    def wrong(product, candidate, *rest, **more):
        return original(product, Fewer(**vars(candidate)), *rest, **more)

    monkeypatch.setattr("darknight.plan.plan.traffic_of", wrong)
    with pytest.raises(AssertionError):
        compare_traffic(make_plan(request(model="small-cnn")).step.traffic, done)
