"""One plain training loop, for models in the clear and for protected ones alike."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from darknight.data import Dataset
from darknight.errors import DarKnightError, UsageError
from darknight.train.interrupt import Interrupts

_MOMENTUM = 0.9
_EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Epoch:
    """One pass over the training examples: its mean loss, the test accuracy after it, its seconds."""

    number: int
    loss: float
    accuracy: float
    seconds: float


@dataclass(frozen=True)
class History:
    """What a training did, epoch by epoch, and how long it took with its evaluations."""

    epochs: tuple[Epoch, ...]
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.epochs[-1].accuracy

    @property
    def loss(self) -> float:
        return self.epochs[-1].loss


class Progress(Protocol):
    """Whoever wants to show how far a training is."""

    def started(self, *, epochs: int, steps: int) -> None:
        """Training begins; `steps` is their number over all epochs."""

    def step(self, *, epoch: int, loss: float) -> None:
        """A step is complete."""

    def epoch(self, epoch: Epoch) -> None:
        """An epoch and its evaluation are complete."""


def check_settings(epochs: int, batch_size: int, learning_rate: float, seed: int) -> None:
    """Refuse settings that `fit` cannot work with."""
    for name, value in (("epochs", epochs), ("batch size", batch_size)):
        if value < 1:
            raise UsageError(f"{name} {value}; needs a whole number of at least 1.")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise UsageError(f"learning rate {learning_rate:g}; needs a finite number above 0.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed {seed}; needs a whole number from 0 to 2^63 - 1.")


def fit(
    model: nn.Module,
    data: Dataset,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    progress: Progress | None = None,
) -> History:
    """Train `model` in place by SGD with momentum, testing it after every epoch.

    Everything drawn here comes from `seed`: two calls see the same batches in the same order, whatever the model does.

    A step that fails, in the model or by a second Ctrl-C, leaves parameters and buffers as they were before it, and no
    gradients. The first Ctrl-C lets the current step finish, then raises KeyboardInterrupt.
    """
    check_settings(epochs, batch_size, learning_rate, seed)
    batches = math.ceil(len(data.train_x) / batch_size)
    steps, done = epochs * batches, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=_MOMENTUM)
    optimizer.zero_grad()
    shuffle = torch.Generator().manual_seed(seed)
    history: list[Epoch] = []
    begin = time.perf_counter()
    if progress:
        progress.started(epochs=epochs, steps=steps)
    with Interrupts() as interrupts:
        for number in range(1, epochs + 1):
            epoch_begin, total = time.perf_counter(), 0.0
            model.train()
            for chosen in torch.split(torch.randperm(len(data.train_x), generator=shuffle), batch_size):
                loss = _step(model, optimizer, data.train_x[chosen], data.train_y[chosen], interrupts)
                total += loss * len(chosen)
                done += 1
                if progress:
                    progress.step(epoch=number, loss=loss)
                interrupts.stop_if_asked(f"after step {done} of {steps}")
            accuracy = evaluate(model, data.test_x, data.test_y)
            seconds = time.perf_counter() - epoch_begin
            history.append(Epoch(number, total / len(data.train_x), accuracy, seconds))
            if progress:
                progress.epoch(history[-1])
            interrupts.stop_if_asked(f"after step {done} of {steps}")
    return History(tuple(history), time.perf_counter() - begin)


def evaluate(model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int = _EVALUATION_BATCH) -> float:
    """The share of examples that `model` classifies correctly. The model's training mode is restored afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            hits = [
                model(examples).argmax(dim=1) == labels
                for examples, labels in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True)
            ]
    finally:
        model.train(was_training)
    return float(torch.cat(hits).double().mean())


def _step(model: nn.Module, optimizer: torch.optim.SGD, x: Tensor, y: Tensor, interrupts: Interrupts) -> float:
    with _undone_on_failure(model, optimizer):
        loss = cross_entropy(model(x), y)
        value = loss.item()
        if not math.isfinite(value):
            raise DarKnightError("the loss is no longer a finite number: training diverged. Lower the learning rate.")
        loss.backward()  # type: ignore[no-untyped-call]
    with interrupts.held():
        optimizer.step()
    optimizer.zero_grad()
    return value


@contextmanager
def _undone_on_failure(model: nn.Module, optimizer: torch.optim.SGD) -> Iterator[None]:
    """Restore what a forward and backward pass change: running statistics and gradients."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)
        optimizer.zero_grad()
        raise
