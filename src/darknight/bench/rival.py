"""Against other ways of computing on data that is not shown: CrypTen and TenSEAL, in one run on this machine.

Training is compared with CrypTen (two parties, secret sharing), inference with TenSEAL (homomorphic encryption), which
does not train deep networks. Each plays at home, on the network of its own example (rival_networks). Everybody gets the
same data and initial weights, takes turns with the others, so that a busy moment hits all alike, and must come to the
losses or scores of plain PyTorch; the best of several turns counts. Wherever there was a choice it is the rival's:

- CrypTen's triples come from a trusted first party, its default and its fastest way; the loss is the squared error;
- of TenSEAL only the server's time counts, and it may use every core;
- all our workers share this machine with the enclave, where in earnest each has its own;
- everybody keeps memory that it has freed (keep_memory; rival_process sets the same for the rivals).

Plain and ours take some turns for themselves first, and then begin anew: our workers find out in the first calls of a
shape how to compute it, and a training has thousands.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from darknight.bench.crypten_party import LEARNING_RATE
from darknight.bench.processors import processor_seconds
from darknight.bench.rival_networks import (
    CLASSES,
    POOLINGS,
    digits,
    inference_network,
    network_words,
    training_network,
)
from darknight.bench.rival_parties import Run, arrays_of, crypten, tenseal
from darknight.bench.rival_process import INSTALL, MissingError, Turn
from darknight.coding import Scheme
from darknight.errors import UsageError
from darknight.fleet import local_fleet
from darknight.nn import protect_, unprotect_
from darknight.runtime import Runtime, keep_memory

PROTECTION = {
    "plain": "nothing, from nobody",
    "ours": (
        "inputs and gradients from any 1 of the workers, which may lie and are found out (Freivalds, 40 bits); "
        "trusts the enclave; workers see the weights"
    ),
    "crypten": (
        "inputs and weights from 2 parties that keep to the protocol and do not collude; a lie goes unnoticed; with "
        "its default, the trusted first party, party 0 makes the triples and could read everything"
    ),
    "tenseal": (
        "inputs from 1 server that keeps to the protocol, without any trusted hardware; the result is not checked; "
        "inference of shallow networks alone"
    ),
}
_ALONE = 10  # turns of plain and ours before those that count: each of five strategies is tried twice
_TOLERANCE = 0.05  # of the largest plain value: fixed point of 16 bits, and CKKS at a scale of 26, come well within


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one step or one image: seconds that passed, and those of all processors of all processes together."""

    seconds: float
    processor_seconds: float


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The best of several turns. rival: None where it is not installed; why is in `absent`."""

    network: str
    rival_name: str
    plain: Cost
    ours: Cost
    rival: Cost | None
    absent: str | None

    @property
    def faster(self) -> float | None:
        """How many times the rival's seconds are ours."""
        return None if self.rival is None else self.rival.seconds / self.ours.seconds

    @property
    def thriftier(self) -> float | None:
        """The same in seconds of processors, which a busy machine disturbs less."""
        return None if self.rival is None else self.rival.processor_seconds / self.ours.processor_seconds

    def words(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "network": self.network,
            "plain": asdict(self.plain),
            "ours": asdict(self.ours),
            self.rival_name: None if self.rival is None else asdict(self.rival),
            "faster": self.faster,
            "thriftier": self.thriftier,
            "absent": self.absent,
        }


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """training: by pooling, seconds of a step of `batch` images. inference: seconds of an image, `batch` at once."""

    batch: int
    times: int
    threads: int
    training: Mapping[str, Contest]
    inference: Contest

    @property
    def crypten(self) -> float | None:
        """How many times faster than CrypTen we train, on the network where that is least."""
        ratios = [contest.faster for contest in self.training.values()]
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    @property
    def tenseal(self) -> float | None:
        """How many times faster than TenSEAL we infer."""
        return self.inference.faster

    def words(self) -> dict[str, Any]:
        """For JSON: `crypten` and `tenseal` are the ratios, the rest is what they are made of."""
        return {
            "crypten": self.crypten,
            "tenseal": self.tenseal,
            "batch": self.batch,
            "times": self.times,
            "threads": self.threads,
            "training": {pooling: contest.words() for pooling, contest in self.training.items()},
            "inference": self.inference.words(),
            "protection": dict(PROTECTION),
        }


Progress = Callable[[str], None]


def measure_rivals(
    python: Path | None,
    *,
    batch: int = 64,
    times: int = 5,
    poolings: tuple[str, ...] = tuple(POOLINGS),
    progress: Progress = lambda words: None,
) -> Rivals:
    """Everybody in turns, one to warm up and then `times`.

    python: the interpreter of an environment that has the rivals (INSTALL says how to make one). None, or an
    environment without one of them: the others are measured, and the contest says what is absent.
    """
    if times < 1 or not poolings:
        raise UsageError(f"{times} turns on {len(poolings)} networks; needs at least 1 of each.")
    keep_memory()
    return Rivals(
        batch=batch,
        times=times,
        threads=torch.get_num_threads(),
        training={pooling: _training(python, pooling, batch, times, progress) for pooling in poolings},
        inference=_inference(python, batch, times, progress),
    )


def _scheme() -> Scheme:
    """Made when it is used: its codes are checked then, and the algebra for that is 8 MB in every command's memory."""
    return Scheme(inputs=4, colluders=1)


def _training(python: Path | None, pooling: str, batch: int, times: int, progress: Progress) -> Contest:
    images, labels = digits(batch)
    targets = nn.functional.one_hot(labels, CLASSES).float()
    torch.manual_seed(0)
    plain = training_network(pooling).train()
    with ExitStack() as stack:
        rival, absent = _started(
            lambda: stack.enter_context(crypten(python, pooling, arrays_of(plain, images=images, labels=labels)))
        )
        ours, workers = stack.enter_context(_protected(copy.deepcopy(plain), _scheme()))
        runs = {
            "plain": _timed(lambda: _step(plain, images, targets)),
            "ours": _timed(lambda: _step(ours, images, targets), workers),
        }
        initial = copy.deepcopy(plain.state_dict())
        _alone(runs)
        for model in (plain, ours):
            model.load_state_dict(initial)
        costs = _in_turns(runs, "crypten", rival, times, progress, what=f"training, {pooling} pooling")
    return Contest(network=network_words(plain), rival_name="crypten", absent=absent, **costs)


def _inference(python: Path | None, batch: int, times: int, progress: Progress) -> Contest:
    images, _ = digits(batch)
    torch.manual_seed(0)
    plain = inference_network().eval()
    with ExitStack() as stack:
        rival, absent = _started(lambda: stack.enter_context(tenseal(python, arrays_of(plain, images=images))))
        ours, workers = stack.enter_context(_protected(copy.deepcopy(plain), _scheme().for_inference()))
        runs = {
            "plain": _timed(lambda: _scores(plain, images), each=batch),
            "ours": _timed(lambda: _scores(ours, images), workers, each=batch),
        }
        _alone(runs)
        costs = _in_turns(runs, "tenseal", rival, times, progress, what="inference")
    return Contest(network=network_words(plain), rival_name="tenseal", absent=absent, **costs)


def _alone(runs: Mapping[str, Run]) -> None:
    for run in runs.values():
        for _ in range(_ALONE):
            run()


def _in_turns(
    runs: dict[str, Run], name: str, rival: Run | None, times: int, progress: Progress, *, what: str
) -> dict[str, Any]:
    """The best Cost of each, by its place in a Contest. Raises if somebody does not compute what plain computes."""
    everybody = runs if rival is None else {**runs, name: rival}
    best = dict.fromkeys(everybody, Cost(seconds=float("inf"), processor_seconds=float("inf")))
    for turn in range(times + 1):
        expected: tuple[float, ...] = ()
        for who, run in everybody.items():
            progress(f"{what}: {who}, {f'turn {turn} of {times}' if turn else 'warming up'}")
            took = run()
            expected = expected or took.result
            _require_same(took.result, expected, f"{what}: {who}")
            if turn:
                best[who] = Cost(
                    seconds=min(best[who].seconds, took.seconds),
                    processor_seconds=min(best[who].processor_seconds, took.processor_seconds),
                )
    return {"plain": best["plain"], "ours": best["ours"], "rival": best.get(name)}


def _require_same(found: tuple[float, ...], expected: tuple[float, ...], who: str) -> None:
    if len(found) != len(expected) or not np.allclose(
        found, expected, rtol=0.0, atol=_TOLERANCE * max(map(abs, expected))
    ):
        raise UsageError(f"{who} does not come to the results of plain PyTorch, so its time says nothing.")


# --- plain and ours ---------------------------------------------------------------------------------------------------


def _step(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """One training step; the loss before it."""
    model.zero_grad()
    loss = nn.functional.mse_loss(model(images), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    return loss.detach()


@torch.no_grad()
def _scores(model: nn.Module, images: Tensor) -> Tensor:
    """Of the first image; all are computed."""
    scores: Tensor = model(images)[0]
    return scores


def _timed(work: Callable[[], Tensor], workers: tuple[int, ...] = (), *, each: int = 1) -> Run:
    """workers: process ids whose processors count too. each: what is done at once, to give the cost of one."""

    def run() -> Turn:
        begun, computed = time.perf_counter(), processor_seconds(workers)
        result = work()
        seconds, processor = time.perf_counter() - begun, processor_seconds(workers) - computed
        return Turn(seconds=seconds / each, processor_seconds=processor / each, result=tuple(result.flatten().tolist()))

    return run


@contextmanager
def _protected(model: nn.Module, scheme: Scheme) -> Iterator[tuple[nn.Module, tuple[int, ...]]]:
    fleet = local_fleet(scheme)
    with fleet, Runtime(scheme, fleet, seed=0) as runtime:
        protect_(model, runtime)
        yield model, tuple(fleet.processes.values())
        unprotect_(model)


def _started(start: Callable[[], Run]) -> tuple[Run | None, str | None]:
    """The rival, or why there is none."""
    try:
        return start(), None
    except MissingError as missing:
        return None, f"{missing}. To compare, give the Python of an environment made as follows:\n{INSTALL}"
