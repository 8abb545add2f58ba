"""Trainings that save, for the tests of checkpoints."""

import copy
from contextlib import nullcontext

import torch
from torch import nn

import darknight as dk
from darknight.train import Card, Saving, Store, fit
from train.test_loop import recipe, toy

SCHEME = dk.Scheme(inputs=2, colluders=1)


class Net(nn.Module):
    """A convolution, a batch norm, a dropout, a linear layer."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.4))
        self.head = nn.Linear(4 * 24, 3)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Net()


class StopAfter:
    """Ends a training after some steps, as Ctrl-C does, and says so by KeyboardInterrupt."""

    def __init__(self, steps, how):
        self.steps, self.how = steps, how

    def started(self, **_):
        pass

    def step(self, *, step, **_):
        if step == self.steps:
            self.how()

    def epoch(self, epoch):
        pass


def card(data=None):
    return Card.of("net", data or toy())


def train(folder, model, how=None, *, every=1e9, resume=False, runtime=None, progress=(), extra=None, data=None):
    """One call of fit with a store in `folder`. Returns the history."""
    with Store(folder) as store:
        saving = Saving(store=store, card=card(data), every=every, extra=extra or {})
        latest = store.latest() if resume else None
        return fit(
            model,
            data or toy(),
            how or recipe(),
            runtime=runtime,
            saving=saving,
            resume=latest,
            progress=progress,
        )


def protected(model, runtime):
    if runtime is not None:
        dk.protect_(model, runtime)
    return model


def runtime_for(where, fleet=None):
    """None for a model in the clear."""
    if where == "clear":
        return nullcontext()
    return dk.Runtime(SCHEME, fleet, seed=3)


def weights(model):
    return copy.deepcopy(model.state_dict())


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)
