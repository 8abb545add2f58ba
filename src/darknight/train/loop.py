"""One training loop, for models in the clear and for protected ones alike."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from darknight.data import Dataset, Part
from darknight.errors import DarKnightError, UsageError
from darknight.runtime import Runtime
from darknight.train.batches import batches_per_epoch, evaluation_batch, order_of, seed_for, training_batch
from darknight.train.card import Card
from darknight.train.checkpoint import Checkpoint, check_tensors
from darknight.train.history import Best, Epoch, History, best_of
from darknight.train.interrupt import Interrupts
from darknight.train.optimizers import load_optimizer, make_optimizer, optimizer_tensors, set_learning_rate
from darknight.train.recipe import Recipe
from darknight.train.schedules import learning_rate_at

_SAVING_SHARE = 20  # between two checkpoints lies at least so many times what one takes
_NEW_LAYER = {"gradients": 0, "input_bound": None, "gradient_bound": None}

log = logging.getLogger("darknight")


class Progress(Protocol):
    """Whoever wants to show how far a training is."""

    def started(self, *, epochs: int, steps: int, done: int) -> None:
        """Training begins; `steps` is their number over all epochs, `done` those before a resume."""

    def step(self, *, epoch: int, step: int, loss: float, learning_rate: float) -> None:
        """A step is complete, the one with the number `step` of all."""

    def epoch(self, epoch: Epoch) -> None:
        """An epoch and its evaluation are complete."""


class Keeper(Protocol):
    """Where checkpoints go: a Store, or whoever seals them first."""

    @property
    def folder(self) -> Path: ...

    def save(self, checkpoint: Checkpoint) -> object:
        """Write one more checkpoint."""

    def save_best(self, card: Card, model: nn.Module, best: Best) -> None:
        """Keep the weights that are best so far."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where checkpoints go, and how often: after the first step that ends `every` seconds or more after the last one,
    and less often if saving is slow; 0 for every step.

    card: what the model is. extra: plain values to find again in the checkpoint.
    """

    store: Keeper
    card: Card
    every: float = 60.0
    extra: Mapping[str, Any] = field(default_factory=dict)


def fit(
    model: nn.Module,
    data: Dataset,
    recipe: Recipe,
    *,
    runtime: Runtime | None = None,
    saving: Saving | None = None,
    resume: Checkpoint | None = None,
    progress: Sequence[Progress] = (),
) -> History:
    """Train `model` in place, testing it after every epoch.

    runtime: the one that protects the model, so that its state is saved too. resume: go on where it was taken.

    Guarantees: batches, augmentation, dropout and learning rate depend on the recipe and the position alone, and
        torch's global generator is left as it was. So two calls give the same weights, and a training that was
        interrupted after any step and resumed gives those of one that was not: bit for bit in the clear, in a field,
        and without workers. Contract tests: tests/train/test_resume.py.

    A step that fails, in the model or by a second Ctrl-C, leaves parameters and buffers as they were before it, and no
    gradients. The first Ctrl-C lets the current step finish, saves, then raises KeyboardInterrupt. After an error of a
    step or of an evaluation, what was reached before it is saved.
    """
    training = _Training(model, data, recipe, runtime, saving, progress)
    if resume is not None:
        training.restore(resume)
    return training.run()


def evaluate(model: nn.Module, part: Part, *, batch_size: int | None = None) -> float:
    """The share of examples that `model` classifies correctly. The model's training mode is restored afterwards."""
    was_training, hits = model.training, 0
    model.eval()
    try:
        with torch.no_grad():
            for chosen in torch.split(torch.arange(len(part)), batch_size or evaluation_batch(part.shape)):
                hits += int((model(part.examples(chosen)).argmax(dim=1) == part.labels[chosen]).sum())
    finally:
        model.train(was_training)
    return hits / len(part)


class _Training:
    """How far a training is, and everything that takes it further."""

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        recipe: Recipe,
        runtime: Runtime | None,
        saving: Saving | None,
        progress: Sequence[Progress],
    ) -> None:
        self.model, self.data, self.recipe, self.runtime = model, data, recipe, runtime
        self.saving, self.progress = saving, progress
        self.batches = batches_per_epoch(recipe, len(data.train))
        self.steps = recipe.epochs * self.batches
        self.optimizer = make_optimizer(model, recipe)
        self.optimizer.zero_grad()
        self.step = 0
        self.epochs: tuple[Epoch, ...] = ()
        self.loss_sum = 0.0
        self.before = 0.0  # seconds of the present epoch before the resume
        self.total_before = 0.0
        self.epoch_begin = self.saved_at = time.perf_counter()
        self.saved = (0, 0)  # steps and epochs in the last checkpoint
        self.saving_seconds = 0.0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Everything is looked at before anything is changed."""
        check_recipe(self.recipe, checkpoint.recipe)
        if self.saving is not None:
            self.saving.card.check_same(checkpoint.card, self.saving.store.folder)
            check_tensors(self.model, checkpoint.model, self.saving.store.folder)
        if (self.runtime is None) != (checkpoint.runtime is None):
            then = "in the clear" if checkpoint.runtime is None else "on shares"
            raise UsageError(f"the checkpoint is of a training {then}; this one is not. Start anew in another folder.")
        load_optimizer(self.optimizer, self.model, self.recipe, checkpoint.optimizer)
        if self.runtime is not None and checkpoint.runtime is not None:
            self.runtime.load_state_dict(checkpoint.runtime)
        self.model.load_state_dict(checkpoint.model)
        self.step, self.epochs, self.loss_sum = checkpoint.step, checkpoint.epochs, checkpoint.loss_sum
        self.before = checkpoint.seconds
        self.total_before = checkpoint.seconds + sum(epoch.seconds for epoch in checkpoint.epochs)
        self.saved = (self.step, len(self.epochs)) if checkpoint.finished else (0, 0)

    def run(self) -> History:
        begin = time.perf_counter()
        for each in self.progress:
            each.started(epochs=self.recipe.epochs, steps=self.steps, done=self.step)
        with torch.random.fork_rng(devices=[]), Interrupts() as interrupts:
            while not self._over:
                self._epoch(interrupts)
            self._save(interrupts)
        return History(self.epochs, self.total_before + time.perf_counter() - begin, self._stopped_early)

    @property
    def _stopped_early(self) -> bool:
        best, patience = best_of(self.epochs), self.recipe.early_stop
        done = len(self.epochs)
        return best is not None and patience is not None and done - best.epoch >= patience and done < self.recipe.epochs

    @property
    def _over(self) -> bool:
        return len(self.epochs) == self.recipe.epochs or self._stopped_early

    def _epoch(self, interrupts: Interrupts) -> None:
        number, examples = len(self.epochs) + 1, len(self.data.train)
        self.epoch_begin = time.perf_counter()
        done = self.step - (number - 1) * self.batches
        self.model.train()
        for index, chosen in enumerate(order_of(self.recipe, number, examples)):
            if index < done:
                continue
            with self._saved_on_failure(interrupts):
                x, y = training_batch(self.data, self.recipe, chosen, number, index)
                rate = learning_rate_at(self.recipe, self.step, self.batches)
                loss = self._step(x, y, rate, interrupts)
            for each in self.progress:
                each.step(epoch=number, step=self.step, loss=loss, learning_rate=rate)
            if index < self.batches - 1:
                self._save_if_due(interrupts)
            self._stop_if_asked(interrupts)
        with self._saved_on_failure(interrupts):
            accuracy = evaluate(self.model, self.data.test)
        with interrupts.held():
            epoch = Epoch(number, self.loss_sum / examples, accuracy, self._seconds)
            self.epochs, self.loss_sum, self.before = (*self.epochs, epoch), 0.0, 0.0
            self.epoch_begin = time.perf_counter()
            best = best_of(self.epochs)
            if self.saving is not None and best is not None and best.epoch == number:
                self.saving.store.save_best(self.saving.card, self.model, best)
        for each in self.progress:
            each.epoch(epoch)
        if not self._over:
            self._save_if_due(interrupts)
            self._stop_if_asked(interrupts)

    @property
    def _seconds(self) -> float:
        return self.before + time.perf_counter() - self.epoch_begin

    # --- one step ---------------------------------------------------------------------------------------------------
    def _step(self, x: Tensor, y: Tensor, rate: float, interrupts: Interrupts) -> float:
        torch.default_generator.manual_seed(seed_for(self.recipe.seed, "dropout", self.step))
        with self._undone_on_failure():
            loss = cross_entropy(self.model(x), y, label_smoothing=self.recipe.label_smoothing)
            value = _finite(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.recipe.clip is not None:
                _finite(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip))
        with interrupts.held():
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.step += 1
            self.loss_sum += value * len(y)
        self.optimizer.zero_grad()
        return value

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Restore what a forward and backward pass change: running statistics, gradients, the runtime's counters."""
        before = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        state = None if self.runtime is None else self.runtime.state_dict()
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
            self.optimizer.zero_grad()
            if self.runtime is not None and state is not None:
                # Products that no module stands for have a layer from their first call on, perhaps the one that failed.
                # It keeps its place.
                found = self.runtime.state_dict()["layers"]
                layers = {name: state["layers"].get(name, {**now, **_NEW_LAYER}) for name, now in found.items()}
                self.runtime.load_state_dict({**state, "layers": layers})
            raise

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def _save_if_due(self, interrupts: Interrupts) -> None:
        if self.saving is not None:
            wait = self.saving.every and max(self.saving.every, _SAVING_SHARE * self.saving_seconds)
            if time.perf_counter() - self.saved_at >= wait:
                self._save(interrupts)

    def _save(self, interrupts: Interrupts) -> None:
        if self.saving is None or self.saved == (self.step, len(self.epochs)):
            return
        begin = time.perf_counter()
        with interrupts.held():
            self.saving.store.save(self._checkpoint(self.saving))
        self.saved, self.saved_at = (self.step, len(self.epochs)), time.perf_counter()
        self.saving_seconds = self.saved_at - begin

    def _checkpoint(self, saving: Saving) -> Checkpoint:
        return Checkpoint(
            card=saving.card,
            recipe=self.recipe,
            step=self.step,
            epochs=self.epochs,
            loss_sum=self.loss_sum,
            seconds=0.0 if self._over else self._seconds,
            best=best_of(self.epochs),
            runtime=None if self.runtime is None else self.runtime.state_dict(),
            finished=self._over,
            extra=saving.extra,
            model=self.model.state_dict(),
            optimizer=optimizer_tensors(self.optimizer, self.model),
        )

    def _stop_if_asked(self, interrupts: Interrupts) -> None:
        if interrupts.asked:
            self._save(interrupts)
            interrupts.stop_if_asked(f"after step {self.step} of {self.steps}")

    @contextmanager
    def _saved_on_failure(self, interrupts: Interrupts) -> Iterator[None]:
        """A fleet that is lost after hours must not cost them."""
        try:
            yield
        except Exception:
            try:
                if self.step:
                    self._save(interrupts)
            except DarKnightError as second:  # the first one is what has to be told
                log.warning("%s", second)
            raise


def _finite(value: Tensor) -> float:
    number = value.item()
    if not math.isfinite(number):
        raise DarKnightError("the loss is no longer a finite number: training diverged. Lower the learning rate.")
    return number


def check_recipe(now: Recipe, then: Recipe) -> None:
    """Refuse to go on with another one; more epochs are fine where no learning rate depends on their number."""
    if now.schedule in ("constant", "step") and now.epochs > then.epochs:
        then = replace(then, epochs=now.epochs)
    differ = [name for name, value in now.words().items() if then.words()[name] != value]
    if differ:
        raise UsageError(
            f"the checkpoint was made with another {', '.join(differ).replace('_', ' ')}. Use the same recipe, or "
            "start anew in another folder. (More epochs are possible with the schedules constant and step.)"
        )
