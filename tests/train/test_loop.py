"""The training loop: what it reaches, that it repeats itself, and what a failure leaves behind."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from darknight.data import Augmentation, Dataset, Tensors, read_dataset
from darknight.errors import DarKnightError
from darknight.models import build_model
from darknight.train import Recipe, evaluate, fit

pytestmark = pytest.mark.usefixtures("one_thread")


def toy(examples=30, classes=3) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(examples, 1, 4, 6, generator=generator), torch.arange(examples) % classes
    return Dataset("toy", Tensors(x, y), Tensors(x[:9], y[:9]), classes)


def recipe(**change) -> Recipe:
    return Recipe(**{"epochs": 2, "batch_size": 8, "learning_rate": 0.05, **change})


def model_for(data, name="small-cnn"):
    return build_model(name, shape=data.shape, classes=data.classes, seed=1)


def test_eight_epochs_reach_97_percent_on_digits():
    data = read_dataset("digits", seed=0)
    model = model_for(data)
    history = fit(model, data, recipe(epochs=8, batch_size=64))
    assert history.accuracy >= 0.97
    assert history.accuracy == evaluate(model, data.test)
    assert history.loss < history.epochs[0].loss
    assert [epoch.number for epoch in history.epochs] == list(range(1, 9))
    assert history.seconds >= sum(epoch.seconds for epoch in history.epochs) > 0


def test_the_same_seed_gives_the_same_weights_bit_for_bit():
    data = toy()
    results = []
    for seed in (3, 3, 4):
        model = model_for(data)
        torch.rand(1)  # the global generator plays no part
        fit(model, data, recipe(seed=seed))
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
        fit(model, toy(), recipe())
    assert all(torch.equal(a, b) for a, b in zip(few.batches, many.batches, strict=True))
    assert [len(batch) for batch in few.batches] == [8, 8, 8, 6] * 2
    assert not torch.equal(few.batches[0], few.batches[4])  # shuffled anew in every epoch


def test_batches_of_one_example_work():
    model = Seen(1)
    fit(model, toy(), recipe(batch_size=1, epochs=1))
    assert len(model.batches) == 30


def test_progress_hears_every_step_and_epoch():
    class Listener:
        def __init__(self):
            self.heard = []

        def started(self, *, epochs, steps, done):
            self.heard.append(("started", epochs, steps, done))

        def step(self, *, epoch, step, loss, learning_rate):
            assert isinstance(loss, float)
            assert learning_rate == 0.05
            self.heard.append(("step", epoch, step))

        def epoch(self, epoch):
            self.heard.append(("epoch", epoch))

    listener = Listener()
    history = fit(model_for(toy()), toy(), recipe(), progress=[listener])
    one, two = history.epochs
    steps = [("step", 1 + number // 4, number + 1) for number in range(8)]
    assert listener.heard == [("started", 2, 8, 0), *steps[:4], ("epoch", one), *steps[4:], ("epoch", two)]


def test_evaluate_restores_the_mode_and_counts_hits():
    data = toy()
    model = model_for(data).train()
    hits = (model.eval()(data.test_x).argmax(1) == data.test_y).double().mean()
    model.train()
    assert evaluate(model, data.test, batch_size=4) == float(hits)
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
        fit(plain, data, recipe(), progress=[StopAfterTwo()])
    with pytest.raises(type(error)):
        fit(broken, data, recipe())
    assert list(plain.state_dict()) == list(broken.state_dict())
    for (name, one), other in zip(plain.state_dict().items(), broken.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert all(p.grad is None for p in broken.parameters())


def trained(how, model=None):
    model = model or model_for(toy(), "mlp")
    fit(model, toy(), how)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(optimizer, steps):
    """The same batches through torch's own optimizer, driven by hand."""
    model = model_for(toy(), "mlp")
    seen = Seen(0)
    fit(seen, toy(), recipe())
    made, data = optimizer(model), toy()
    for batch in seen.batches[:steps]:
        labels = torch.stack([data.train_y[(data.train_x == x).flatten(1).all(1)][0] for x in batch])
        made.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        made.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("change", "make"),
    [
        ({}, partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
        ({"nesterov": True}, partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)),
        ({"optimizer": "adam"}, partial(torch.optim.Adam, lr=0.05)),
        ({"optimizer": "adamw"}, partial(torch.optim.AdamW, lr=0.05, weight_decay=0.0)),
    ],
)
def test_optimizers_are_torchs(change, make):
    found = trained(recipe(**change))
    assert torch.equal(found, by_hand(lambda model: make(model.parameters(), fused=True), 8))
    # The same formulas in another order of rounding, which Adam carries further.
    torch.testing.assert_close(found, by_hand(lambda model: make(model.parameters()), 8), rtol=1e-3, atol=1e-4)


def test_every_ingredient_changes_the_result():
    """None of them is only written down."""
    plain = {"epochs": 3, "learning_rate": 0.1}
    changes = [
        {},
        {"optimizer": "adam"},
        {"momentum": 0.5},
        {"nesterov": True},
        {"weight_decay": 0.1},
        {"schedule": "cosine"},
        {"schedule": "step", "step_epochs": 1},
        {"schedule": "one-cycle"},
        {"warmup_epochs": 1},
        {"clip": 0.01},
        {"label_smoothing": 0.1},
        {"augment": Augmentation(crop_padding=1)},
        {"seed": 1},
    ]
    results = [trained(recipe(**plain, **change)) for change in changes]
    for one in range(len(results)):
        for other in range(one):
            assert not torch.equal(results[one], results[other]), (changes[one], changes[other])


def test_clipping_bounds_the_step():
    model = model_for(toy(), "mlp")
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    how = recipe(epochs=1, batch_size=30, learning_rate=1.0, momentum=0.0, clip=0.001)
    assert float((trained(how, model) - before).norm()) == pytest.approx(0.001, rel=1e-3)


def test_augmentation_is_drawn_anew_for_every_batch_and_repeats_itself():
    def seen(**change):
        model = Seen(0)
        fit(model, toy(), recipe(batch_size=30, **change))
        return [batch.flatten(1).sum(1).sort().values for batch in model.batches]

    plain, one, again = seen(), seen(augment=Augmentation(flip=False)), seen(augment=Augmentation(flip=False))
    assert torch.equal(plain[0], plain[1])
    assert not torch.equal(one[0], plain[0])
    assert not torch.equal(one[0], one[1])
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))


def test_dropout_repeats_itself_and_torchs_generator_is_left_alone():
    def once():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(24, 30), nn.Dropout(0.5), nn.Linear(30, 3))
        torch.manual_seed(once.other)
        once.other += 1
        state = torch.get_rng_state()
        result = trained(recipe(), model)
        assert torch.equal(state, torch.get_rng_state())
        return result

    once.other = 5
    assert torch.equal(once(), once())


class Scripted(nn.Module):
    """Gets as many of nine test examples right as a script says, evaluation by evaluation."""

    def __init__(self, *hits):
        super().__init__()
        self.layer, self.hits = nn.Linear(24, 3), list(hits)

    def forward(self, x):
        scores = self.layer(x.flatten(1))
        if self.training:
            return scores
        right, hits = toy().test_y, self.hits.pop(0)
        answers = torch.where(torch.arange(9) < hits, right, (right + 1) % 3)
        return nn.functional.one_hot(answers, 3).float()


@pytest.mark.parametrize(
    ("hits", "patience", "epochs"),
    [((3, 4, 4, 4, 5), 2, 4), ((3, 4, 3, 5, 1, 1), 2, 6), ((3, 2, 9), None, 3), ((5, 5, 5), 1, 2), ((1, 2, 2), 1, 3)],
)
def test_early_stop(hits, patience, epochs):
    model = Scripted(*hits)
    history = fit(model, toy(), recipe(epochs=len(hits), early_stop=patience))
    assert len(history.epochs) == epochs
    assert history.stopped_early == (epochs < len(hits))
    assert history.best.accuracy == max(hits[:epochs]) / 9
    assert history.best.epoch == hits.index(max(hits[:epochs])) + 1


def test_a_training_that_diverges_says_so():
    with pytest.raises(DarKnightError, match="Lower the learning rate"):
        fit(model_for(toy(), "mlp"), toy(), recipe(learning_rate=1e30, epochs=20))
