"""A runtime whose workers are processes that lie on command, beside the enclave alone, which knows the truth."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import darknight as dk
from darknight.coding import Code, draw_code
from darknight.integrity.real import deviations
from darknight.randomness import Randomness
from darknight.types import Pass
from fleet.workers import eventually
from runtime.rounding import spreads_of_checks

EXAMPLES = 6  # with two inputs to a share: three groups, all full. In the padding of another a lie changes nothing.

LAYERS = {
    "linear": (lambda: nn.Linear(6, 4, bias=False), (6,)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding=1, bias=False), (3, 5)),
    "conv2d": (lambda: nn.Conv2d(2, 5, 3, stride=2, padding=1, bias=False), (2, 6, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 5, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), (2, 3, 4, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, bias=False), (3, 3, 2)),
}

_RESULT = 2.0**-23  # two results in float32 differ by this part of themselves, however exact they were before


@dataclass
class Outcome:
    """What came of the three passes of a layer: results, what they should be, and who was put out in between.

    spread: by pass, the standard deviation of the error of an honest result, per element. In the field there is none.
    """

    found: dict[Pass, Tensor]
    expected: dict[Pass, Tensor]
    named: frozenset[int]
    failed: tuple[Pass, ...]
    spread: dict[Pass, float]

    @property
    def wrong(self) -> frozenset[Pass]:
        """Passes whose result is not what it should be: off by what honest calls exceed once in 1e9, or no number."""
        return frozenset(
            kind
            for kind, spread in self.spread.items()
            if not bool((self._error(kind).abs() <= deviations(self.expected[kind].numel()) * spread).all())
        )

    def spreads_off(self, kind: Pass) -> float:
        """The root of the mean square of the error, in spreads."""
        return float(self._error(kind).square().mean().sqrt()) / self.spread[kind]

    def part_off(self, kind: Pass) -> float:
        """The largest error, as a part of the largest element."""
        return float(self._error(kind).abs().max()) / float(self.expected[kind].abs().max())

    def _error(self, kind: Pass) -> Tensor:
        return self.found[kind].to(torch.float64) - self.expected[kind]


class Arena:
    """Workers of `scheme` that read their plans from files, one runtime over them, and one without workers."""

    def __init__(self, scheme: dk.Scheme, folder: Path) -> None:
        self.scheme = scheme
        self._files = {worker: folder / f"plan-{worker}" for worker in range(scheme.workers)}
        self._plans = dict.fromkeys(self._files, "")
        for file in self._files.values():
            file.write_text("")
        with ExitStack() as stack:
            plans = {worker: f"@{file}" for worker, file in self._files.items()}
            self.fleet = stack.enter_context(dk.local_fleet(scheme, hostile=plans, patience=120.0))
            self.runtime = stack.enter_context(dk.Runtime(scheme, self.fleet))
            self._alone = stack.enter_context(dk.Runtime(scheme, None))
            self._masked, self._truth = (self._models(runtime) for runtime in (self.runtime, self._alone))
            self._stack = stack.pop_all()
        self._generator = torch.Generator().manual_seed(0)
        self.changes = 0  # of weights

    def close(self) -> None:
        self._stack.close()

    @property
    def code(self) -> Code:
        """The public coefficients (systematic), or some that were never used (dense)."""
        return draw_code(self.scheme, Randomness(bytes(32)).fresh())

    def seats(self, kind: Pass) -> tuple[int, ...]:
        """The workers whose answers make the result of a pass."""
        code = self.code
        return {Pass.FORWARD: code.A.base, Pass.GRAD_INPUT: code.B.base, Pass.GRAD_WEIGHT: code.grad_rows}[kind]

    def arm(self, plans: Mapping[int, str]) -> None:
        """From now on these workers lie, in sessions that begin now, and all others are honest."""
        for worker, file in self._files.items():
            plan = plans.get(worker, "")
            if plan or self._plans[worker] or worker in self.fleet.quarantined:
                file.write_text(plan)
                self._plans[worker] = plan
                self.fleet.expel(worker, "the test begins its session anew")
                self.fleet.readmit(worker)
        everyone = range(self.fleet.workers)
        assert eventually(lambda: all(map(self.fleet.ready, everyone)), 60), "a worker did not come back"

    def new_weights(self, name: str) -> None:
        """Another version, far from the one before."""
        self.changes += 1
        weight = self._truth[name].weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=self._generator))
            self._masked[name].weight.copy_(weight)

    def call(self, name: str, *, backward: bool = True) -> Outcome:
        """The passes of a layer on new data, by the workers and alone."""
        x = torch.randn(EXAMPLES, *LAYERS[name][1], generator=self._generator)
        seen, failed = set(self.fleet.quarantined), len(self.runtime.ledger.failed)
        delta = None
        results = []
        with spreads_of_checks() as spreads:
            for models in (self._masked, self._truth):
                module, leaf = models[name], x.clone().requires_grad_(backward)
                module.zero_grad()
                y = module(leaf) if backward else module(leaf).detach()
                found = {Pass.FORWARD: y.detach()}
                if backward:
                    delta = torch.randn(y.shape, generator=self._generator) if delta is None else delta
                    y.backward(delta)
                    found |= {Pass.GRAD_INPUT: leaf.grad, Pass.GRAD_WEIGHT: module.weight.grad.clone()}
                results.append(found)
        events = self.runtime.ledger.failed[failed:]
        named = frozenset(set(self.fleet.quarantined) - seen)
        exact = isinstance(self.scheme.arithmetic, dk.Field)
        spread = {
            kind: 0.0 if exact else spreads.get(kind, 0.0) + _RESULT * float(expected.abs().max())
            for kind, expected in results[1].items()
        }
        return Outcome(*results, named, tuple(event.kind for event in events), spread)

    @staticmethod
    def _models(runtime: dk.Runtime) -> nn.ModuleDict:
        torch.manual_seed(0)
        models = nn.ModuleDict({name: make() for name, (make, _) in LAYERS.items()})
        dk.protect_(models, runtime)
        return models
