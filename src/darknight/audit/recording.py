"""A real training by worker processes that keep everything they see, and what went into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from darknight.coding import Field, Scheme
from darknight.fleet import local_fleet
from darknight.nn import protect_at, unprotect_
from darknight.ops.place import WORKERS
from darknight.runtime import Runtime
from darknight.types import Record

_RECEIVED = ("weights", "forward.share", "backward.share")


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One step of a training: the truth, which only the enclave has, and what each worker saw of it.

    examples: the number of each example in the data, in the order of the batch. before, after: the model's state.
    views[j]: what worker j received, in order, of the layers that the recording keeps.
    """

    epoch: int
    examples: Tensor
    images: Tensor
    labels: Tensor
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    views: tuple[tuple[Record, ...], ...]
    inputs: int

    def place(self, position: int) -> tuple[int, int]:
        """The virtual batch of the example at `position` of the batch, and its place there."""
        return position // self.inputs, position % self.inputs

    def seen(self, worker: int, layer: str, kind: str) -> Tensor:
        """The last such tensor: a pass that was repeated was masked again, and the last one counted."""
        return [record.tensor for record in self.views[worker] if (record.layer, record.kind) == (layer, kind)][-1]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sent:
    """Shares of the first layer, and for each an image that went into it: the only one, with the systematic code.

    examples, workers, epochs: of each share, the number of its example, who received it, and when.
    """

    shares: Tensor
    images: Tensor
    labels: Tensor
    examples: Tensor
    workers: Tensor
    epochs: Tensor

    def of(self, worker: int) -> Sent:
        """What one worker received."""
        mine = self.workers == worker
        return Sent(**{name: getattr(self, name)[mine] for name in self.__dataclass_fields__})


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording:
    """A training and the views of its workers. layers: the first protected layer and the last one."""

    scheme: Scheme
    learning_rate: float
    layers: tuple[str, str]
    steps: tuple[Step, ...]

    @property
    def views(self) -> tuple[tuple[Record, ...], ...]:
        """views[j]: what worker j received over the whole training."""
        return tuple(
            tuple(record for step in self.steps for record in step.views[worker])
            for worker in range(self.scheme.workers)
        )

    @property
    def prime(self) -> int | None:
        """Of the residues that are sent; None where floats are."""
        return self.scheme.arithmetic.prime if isinstance(self.scheme.arithmetic, Field) else None

    def sent(self, instead: Callable[[int, Step], Tensor] | None = None) -> Sent:
        """Every share of the first layer that went to a data worker, from all steps.

        instead: gives, for a step and its number, other shares (worker, group, *feature) in the place of the real ones.
        """
        parts = list(self._parts(instead or self._received))
        return Sent(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def _received(self, number: int, step: Step) -> Tensor:
        shares = [step.seen(worker, self.layers[0], "forward.share") for worker in range(self.scheme.inputs)]
        return torch.stack(shares)

    def _parts(self, shares: Callable[[int, Step], Tensor]) -> Iterator[dict[str, Tensor]]:
        inputs = self.scheme.inputs
        for number, step in enumerate(self.steps):
            sent = shares(number, step)
            for worker in range(inputs):
                chosen = torch.arange(worker, len(step.examples), inputs)
                yield {
                    "shares": sent[worker][: len(chosen)],  # without padding rows
                    "images": step.images[chosen],
                    "labels": step.labels[chosen],
                    "examples": step.examples[chosen],
                    "workers": torch.full((len(chosen),), worker),
                    "epochs": torch.full((len(chosen),), step.epoch),
                }


def record_training(
    scheme: Scheme,
    *,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    batch_size: int,
    epochs: int,
    learning_rate: float,
    seed: int,
) -> Recording:
    """Train `model` in place, by plain gradient descent, on worker processes of this machine that record all they see.

    The order of the examples depends on `seed`; the masks do not. What a step adds to the weights is -learning_rate
    times the gradient of its batch. Kept is what workers received of the first and the last protected layer, where
    images and labels are nearest; what they sent follows from it.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    steps: list[Step] = []
    model.train()
    with local_fleet(scheme, record=True) as fleet, Runtime(scheme, fleet, seed=seed) as runtime:
        protect_at(WORKERS, model, runtime, ())  # nothing stays for being cheap: workers see all that they can
        layers: tuple[str, str] | None = None
        try:
            before = _state(model)
            for epoch in range(epochs):
                for chosen in torch.split(torch.randperm(len(images), generator=generator), batch_size):
                    optimizer.zero_grad()
                    loss: Tensor = cross_entropy(model(images[chosen]), labels[chosen])
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    after = _state(model)
                    views = [fleet.transcript(worker, take=True) for worker in range(scheme.workers)]
                    layers = layers or _ends(views[0])
                    steps.append(
                        Step(
                            epoch=epoch,
                            examples=chosen,
                            images=images[chosen],
                            labels=labels[chosen],
                            before=before,
                            after=after,
                            views=tuple(_only(layers, view) for view in views),
                            inputs=scheme.inputs,
                        )
                    )
                    before = after
        finally:
            unprotect_(model)
    assert layers is not None
    return Recording(scheme=scheme, learning_rate=learning_rate, layers=layers, steps=tuple(steps))


def _ends(view: Sequence[Record]) -> tuple[str, str]:
    """The first layer and the last one of a forward pass."""
    called = [record.layer for record in view if record.kind == "forward.share"]
    return called[0], called[-1]


def _only(layers: tuple[str, str], view: Sequence[Record]) -> tuple[Record, ...]:
    return tuple(record for record in view if record.layer in layers and record.kind in _RECEIVED)


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
