"""Which strategy computes a pass: the one that was fastest here, by measurement.

Nothing is computed for the measurement alone. The first calls with a new shape go through the strategies in turn, each
answer is used, and then the fastest one keeps the shape; one that is clearly slower gets no second try. So a short job
loses little, and a long one nothing. All strategies give the same bits (darknight.ops.strategy). A device proves that
to this program before anything is computed on it: what is wrong at the edges of the field is never used there.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from darknight.errors import UsageError
from darknight.ops import BilinearOp, Conv, Linear, either
from darknight.ops.strategy import DOUBLES, STRATEGIES, Strategy, Work, round_up
from darknight.types import Pass

MEASURED = "measured"
VARIABLE = "DARKNIGHT_WORKER_STRATEGY"

_TRIES = 2  # of each strategy; the better one counts, because the first may have to compile
_HOPELESS = 1.5  # times the best: no second try
_CHEAP = 0.03  # seconds: but what takes no longer gets one, because the first may have had to fetch memory
_MOST_SHAPES = 4096  # are remembered, not what an enclave likes to fill memory with
_PRIMES, _WEIGHT = (2**25 - 39, 2**28 - 57), 1023  # those of the schemes

_log = logging.getLogger("darknight.worker")


def strategy_names() -> tuple[str, ...]:
    """What --strategy may be."""
    return (MEASURED, *STRATEGIES)


@dataclass
class _Trial:
    """One shape: the strategies that are still to be tried, and the best time of each that was."""

    waiting: list[Strategy]
    settled: Strategy | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class Choice:
    """The passes on one device. strategy: the name of one to use wherever it takes the shape, else MEASURED."""

    def __init__(self, device: torch.device, strategy: str = MEASURED) -> None:
        if strategy not in strategy_names():
            raise UsageError(f'strategy "{strategy[:40]}" is none of {", ".join(strategy_names())}.')
        wanted = STRATEGIES.values() if strategy == MEASURED else [STRATEGIES[strategy]]
        self._device = device
        self.strategies = [each for each in wanted if proven(each, device)]
        self._trials: dict[Work, _Trial] = {}

    @property
    def words(self) -> str:
        names = [each.name for each in self.strategies] or [DOUBLES.name]
        return names[0] if len(names) == 1 else f"the fastest of {', '.join(names)}"

    # --- the passes -------------------------------------------------------------------------------------------------
    def forward(self, op: BilinearOp, x: Tensor, w: Tensor, prime: int | None, largest: float | None = None) -> Tensor:
        """largest: an upper bound of |w|, if it is known; else it is looked for."""
        if prime is None:
            return either.forward(op, x, w, None)
        return self._computed(_work(op, Pass.FORWARD, tuple(x.shape), w, prime, largest), x, w)

    def grad_input(
        self,
        op: BilinearOp,
        delta: Tensor,
        w: Tensor,
        x_shape: tuple[int, ...],
        prime: int | None,
        largest: float | None = None,
    ) -> Tensor:
        if prime is None:
            return either.grad_input(op, delta, w, x_shape, None)
        work = _work(op, Pass.GRAD_INPUT, x_shape, w, prime, largest)
        op.expect(delta, work.x_shape, work.w_shape)
        return self._computed(work, delta, w)

    def grad_weight(
        self, op: BilinearOp, x: Tensor, delta: Tensor, w_shape: tuple[int, ...], prime: int | None
    ) -> Tensor:
        if prime is None:
            return either.grad_weight(op, x, delta, w_shape, None)
        shape = tuple(x.shape)
        work = Work(op=op, kind=Pass.GRAD_WEIGHT, x_shape=shape, w_shape=w_shape, prime=prime, largest=0.0)
        op.expect(delta, work.x_shape, work.w_shape)
        return self._computed(work, x, delta)

    # --- the measurement --------------------------------------------------------------------------------------------
    def _computed(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        trial = self._trials.get(work)
        if trial is None:
            trial = self._begin(work)
        if trial.settled is not None:
            return trial.settled.compute(work, first, second)
        strategy = trial.waiting.pop(0)
        begun = self._now()
        found = strategy.compute(work, first, second)
        self._note(work, trial, strategy, self._now() - begun)
        return found

    def _begin(self, work: Work) -> _Trial:
        work.op.output_shape(work.x_shape, work.w_shape)  # raises on what does not fit, before anybody looks at it
        takers = [each for each in self.strategies if each.takes(work, self._device)] or [DOUBLES]
        trial = _Trial(takers * _TRIES, settled=takers[0] if len(takers) == 1 else None)
        while len(self._trials) >= _MOST_SHAPES:
            self._trials.pop(next(iter(self._trials)))
        self._trials[work] = trial
        return trial

    def _note(self, work: Work, trial: _Trial, strategy: Strategy, seconds: float) -> None:
        trial.seconds[strategy.name] = min(seconds, trial.seconds.get(strategy.name, seconds))
        best = min(trial.seconds.values())
        most = max(_CHEAP, _HOPELESS * best)
        trial.waiting = [each for each in trial.waiting if trial.seconds.get(each.name, 0.0) <= most]
        fastest = min(trial.seconds, key=lambda name: trial.seconds[name])
        if all(each.name == fastest for each in trial.waiting):
            trial.settled = STRATEGIES[fastest]
            fields = {
                "strategy": fastest,
                "op": work.op.name,
                "pass": work.kind.value,
                "input": "x".join(map(str, work.x_shape)),
                "weights": "x".join(map(str, work.w_shape)),
                "milliseconds": ",".join(f"{name}:{1e3 * took:.3f}" for name, took in trial.seconds.items()),
            }
            _log.info("strategy chosen", extra={"fields": fields})

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif torch.get_num_threads() == 1:  # what it took of the processor, whoever else is busy on it
            return time.process_time()
        return time.perf_counter()


@cache
def proven(strategy: Strategy, device: torch.device) -> bool:
    """Whether it takes anything on this device, and gives the right numbers at the edges of the field: a driver or a
    library may round. Once for a program: it takes a tenth of a second, and many engines may share a device.
    """
    if strategy is DOUBLES:
        return True
    taken = False
    try:
        for work, first, second in _examples():
            if strategy.takes(work, device):
                taken = True
                found = strategy.compute(work, first.to(device), second.to(device)).cpu()
                if not torch.equal(found, DOUBLES.compute(work, first, second)):
                    _log.warning("strategy is wrong on this device", extra={"fields": {"strategy": strategy.name}})
                    return False
    except RuntimeError as error:  # torch has it not for this device
        words = str(error).splitlines()[0][:200]
        _log.warning("strategy fails on this device", extra={"fields": {"strategy": strategy.name, "reason": words}})
        return False
    return taken


def _examples() -> list[tuple[Work, Tensor, Tensor]]:
    """Small passes in which every number is as large as it can be, with either sign, and sums are long."""
    found = []
    dense, depthwise = Conv.make((3, 3), padding=1), Conv.make((3, 3), padding=1, groups=32)
    shapes: list[tuple[BilinearOp, tuple[int, ...], tuple[int, ...]]] = [
        (Linear(), (20, 512), (24, 512)),
        (dense, (2, 32, 9, 8), (40, 32, 3, 3)),
        (depthwise, (2, 32, 9, 8), (32, 1, 3, 3)),
    ]
    for prime in _PRIMES:
        for op, x_shape, w_shape in shapes:
            y_shape = op.output_shape(x_shape, w_shape)
            for edge, sign in ((prime // 2, 1), (prime // 2 + 1, -1), (prime - 1, 1)):
                x, delta = (torch.full(shape, edge, dtype=torch.int32) for shape in (x_shape, y_shape))
                w = torch.full(w_shape, sign * _WEIGHT, dtype=torch.int32)
                operands = {Pass.FORWARD: (x, w), Pass.GRAD_INPUT: (delta, w), Pass.GRAD_WEIGHT: (x, delta)}
                for kind, pair in operands.items():
                    work = Work(op=op, kind=kind, x_shape=x_shape, w_shape=w_shape, prime=prime, largest=_WEIGHT)
                    found.append((work, *pair))
    return found


def _work(op: BilinearOp, kind: Pass, x_shape: tuple[int, ...], w: Tensor, prime: int, largest: float | None) -> Work:
    if largest is None:
        largest = largest_of(w)
    bound = round_up(largest)  # so that the shape is not measured again
    return Work(op=op, kind=kind, x_shape=x_shape, w_shape=tuple(w.shape), prime=prime, largest=bound)


def largest_of(w: Tensor) -> float:
    if not w.numel():
        return 0.0
    low, high = torch.aminmax(w)
    return float(max(abs(int(low)), abs(int(high))))
