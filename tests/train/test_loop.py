"""The training loop: what it reaches, that it repeats itself, and what a failure leaves behind."""

import copy

import pytest
import torch
from torch import nn

from darknight.data import Dataset, read_dataset
from darknight.errors import DarKnightError, UsageError
from darknight.models import build_model
from darknight.train import evaluate, fit

pytestmark = pytest.mark.usefixtures("one_thread")


def toy(examples=30, classes=3) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(examples, 1, 4, 6, generator=generator), torch.arange(examples) % classes
    return Dataset("toy", x, y, x[:9], y[:9], classes)


def settings(**change):
    return {"epochs": 2, "batch_size": 8, "learning_rate": 0.05, "seed": 0, **change}


def model_for(data, name="small-cnn"):
    return build_model(name, shape=data.shape, classes=data.classes, seed=1)


def test_eight_epochs_reach_97_percent_on_digits():
    data = read_dataset("digits", seed=0)
    model = model_for(data)
    history = fit(model, data, epochs=8, batch_size=64, learning_rate=0.05, seed=0)
    assert history.accuracy >= 0.97
    assert history.accuracy == evaluate(model, data.test_x, data.test_y)
    assert history.loss < history.epochs[0].loss
    assert [epoch.number for epoch in history.epochs] == list(range(1, 9))
    assert history.seconds >= sum(epoch.seconds for epoch in history.epochs) > 0


def test_the_same_seed_gives_the_same_weights_bit_for_bit():
    data = toy()
    results = []
    for seed in (3, 3, 4):
        model = model_for(data)
        torch.rand(1)  # the global generator plays no part
        fit(model, data, **settings(seed=seed))
        results.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


class Seen(nn.Module):
    """Remembers the batches that it was trained on, and draws random numbers, as dropout would."""

    def __init__(self, draws: int) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 3)
        self.draws = draws
        self.batches: list[torch.Tensor] = []

    def forward(self, x):
        if self.training:
            self.batches.append(x.clone())
        torch.rand(self.draws)
        return self.layer(x.flatten(1))


def test_batches_do_not_depend_on_what_the_model_draws():
    few, many = Seen(1), Seen(100)
    for model in (few, many):
        fit(model, toy(), **settings())
    assert all(torch.equal(a, b) for a, b in zip(few.batches, many.batches, strict=True))
    assert [len(batch) for batch in few.batches] == [8, 8, 8, 6] * 2
    assert not torch.equal(few.batches[0], few.batches[4])  # shuffled anew in every epoch


def test_batches_of_one_example_work():
    model = Seen(1)
    fit(model, toy(), **settings(batch_size=1, epochs=1))
    assert len(model.batches) == 30


def test_progress_hears_every_step_and_epoch():
    class Listener:
        def __init__(self):
            self.heard = []

        def started(self, *, epochs, steps):
            self.heard.append(("started", epochs, steps))

        def step(self, *, epoch, loss):
            assert isinstance(loss, float)
            self.heard.append(("step", epoch))

        def epoch(self, epoch):
            self.heard.append(("epoch", epoch))

    listener = Listener()
    history = fit(model_for(toy()), toy(), **settings(), progress=listener)
    one, two = history.epochs
    steps = [[("step", number)] * 4 for number in (1, 2)]
    assert listener.heard == [("started", 2, 8), *steps[0], ("epoch", one), *steps[1], ("epoch", two)]


def test_evaluate_restores_the_mode_and_counts_hits():
    data = toy()
    model = model_for(data).train()
    hits = (model.eval()(data.test_x).argmax(1) == data.test_y).double().mean()
    model.train()
    assert evaluate(model, data.test_x, data.test_y, batch_size=4) == float(hits)
    assert model.training


class Fails(nn.Module):
    """A layer whose forward or backward pass fails at a chosen call, as one whose workers lie would."""

    def __init__(self, where: str, at: int, error: BaseException) -> None:
        super().__init__()
        self.where, self.at, self.error = where, at, error
        self.calls = 0

    def forward(self, x):
        if self.training:
            self.calls += 1
            if self.calls == self.at:
                if self.where == "forward":
                    raise self.error
                x.register_hook(self.fail)
        return x

    def fail(self, gradient):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("a worker lied"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_fails_leaves_the_model_as_it_was(where, error):
    data = toy()
    plain = model_for(data)
    broken = copy.deepcopy(plain)
    # Behind the batch norms, so that running statistics of the failed step must be taken back.
    broken.features.append(Fails(where, 3, error))

    class StopAfterTwo:
        steps = 0

        def started(self, **_):
            pass

        def step(self, **_):
            self.steps += 1
            if self.steps == 2:
                raise StopIteration

    with pytest.raises(StopIteration):
        fit(plain, data, **settings(), progress=StopAfterTwo())
    with pytest.raises(type(error)):
        fit(broken, data, **settings())
    assert list(plain.state_dict()) == list(broken.state_dict())
    for (name, one), other in zip(plain.state_dict().items(), broken.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert all(p.grad is None for p in broken.parameters())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"epochs": 0}, "epochs 0"),
        ({"batch_size": 0}, "batch size 0"),
        ({"learning_rate": 0.0}, "learning rate 0"),
        ({"learning_rate": float("nan")}, "learning rate nan"),
        ({"learning_rate": float("inf")}, "learning rate inf"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_changes(change, complaint):
    model = model_for(toy())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=complaint):
        fit(model, toy(), **settings(**change))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_training_that_diverges_says_so():
    with pytest.raises(DarKnightError, match="Lower the learning rate"):
        fit(model_for(toy(), "mlp"), toy(), **settings(learning_rate=1e30, epochs=20))
