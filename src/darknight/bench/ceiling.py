"""How much faster could training be: seconds of the processor of the plain step over those of the enclave.

The enclave is the bottleneck when workers are fast, so this ratio is the most that any number of workers can give. Both
are one step of the same model on the same batch (forward, backward and SGD with momentum; or forward alone), on one
thread, in one process. The plain step is timed in torch's usual layout and in channels_last, and the faster counts.
The enclave's time is that of the whole process, all its threads included: encode, decode, checks, copies, layers that
stay, optimizer and Python; its workers are other processes. They take turns, and the best of several counts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from darknight.bench.threads import one_thread
from darknight.coding import Scheme
from darknight.errors import UsageError
from darknight.fleet import local_fleet
from darknight.models import build_model
from darknight.nn import STRUCTURE, protect_at
from darknight.runtime import Runtime, keep_memory
from darknight.runtime.phases import OUTSIDE, measured, phase

LEAST_TIMES = 5
_CLASSES = 1000
_PATIENCE = 3600.0  # seconds for a worker: one that is late would leave its work to the enclave
_LAYOUTS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}
_KEPT = "layers that stay, and Python between layers"
_THREADS = "threads of the links"

Step = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Seconds of the processor, the best of `times`. phases and layers: of the enclave's best step.

    layers: by layer and phase. wall: the protected step's seconds on the clock, over the plain one's. place: where
    products were computed (ops.place), and `masked` how many layers workers did.
    """

    model: str
    batch: int
    size: int
    training: bool
    times: int
    plain: float
    layout: str
    enclave: float
    wall: float
    phases: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    place: str = STRUCTURE
    masked: int = 0

    @property
    def ratio(self) -> float:
        return self.plain / self.enclave


@dataclass
class _Best:
    """The least of several measurements, and what belongs to it."""

    seconds: float = float("inf")
    wall: float = float("inf")
    phases: dict[tuple[str, str], float] = field(default_factory=dict)

    def time(self, step: Step) -> None:
        wall, begun = time.perf_counter(), time.process_time()
        with measured() as found:
            step()
        seconds = time.process_time() - begun
        self.wall = min(self.wall, time.perf_counter() - wall)
        if seconds < self.seconds:
            self.seconds = seconds
            mine = sum(found.seconds.values())
            self.phases = {**found.seconds, (OUTSIDE, _THREADS): max(0.0, seconds - mine)}


def measure_ceiling(
    model: str,
    *,
    batch: int,
    size: int = 224,
    training: bool = True,
    times: int = LEAST_TIMES,
    inputs: int = 4,
    colluders: int = 1,
    place: str = STRUCTURE,
    tell: Callable[[str], None] = lambda text: None,
) -> Ceiling:
    """Starts local workers and times both kinds of step in turns, `times` rounds after one that is not counted.

    place: where products are computed, as in nn.protect_at.
    """
    if min(batch, size, times) < 1:
        raise UsageError(f"batch {batch}, size {size}, times {times}; each needs to be at least 1.")
    keep_memory()  # for both: fresh memory would slow either down, the enclave more
    scheme = Scheme(inputs=inputs, colluders=colluders)
    scheme = scheme if training else scheme.for_inference()
    shape = (3, size, size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, *shape, generator=generator)
    y = torch.randint(0, _CLASSES, (batch,), generator=generator)
    plain, private = (build_model(model, shape=shape, classes=_CLASSES, seed=0) for _ in range(2))
    plains, enclave = {layout: _Best() for layout in _LAYOUTS}, _Best()
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        fleet = stack.enter_context(local_fleet(scheme, patience=_PATIENCE))
        runtime = stack.enter_context(Runtime(scheme, fleet))
        report = protect_at(place, private, runtime, tuple(x.shape))
        protected, unprotected = (
            _step(private, x, y, training),
            {layout: _step(plain, x.to(memory_format=form), y, training) for layout, form in _LAYOUTS.items()},
        )
        for count in range(times + 1):
            tell(f"{model}: round {count} of {times}" if count else f"{model}: warming up")
            for layout, form in _LAYOUTS.items():
                plain.to(memory_format=form)  # type: ignore[call-overload]
                _settled(plains[layout], unprotected[layout], counts=count > 0)
            _settled(enclave, protected, counts=count > 0)
    fastest = min(plains, key=lambda layout: plains[layout].seconds)
    phases, layers = _split(enclave.phases)
    return Ceiling(
        model=model,
        batch=batch,
        size=size,
        training=training,
        times=times,
        plain=plains[fastest].seconds,
        layout=fastest,
        enclave=enclave.seconds,
        wall=enclave.wall / plains[fastest].wall,
        phases=phases,
        layers=layers,
        place=place,
        masked=len(report.masked),
    )


def _settled(best: _Best, step: Step, *, counts: bool) -> None:
    """A step, timed if it `counts`."""
    if counts:
        best.time(step)
    else:
        step()


def _step(model: nn.Module, x: Tensor, y: Tensor, training: bool) -> Step:
    model.train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True) if training else None

    def run() -> None:
        if optimizer is None:
            with torch.no_grad():
                model(x)
            return
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(model(x), y))
        with phase("optimizer", OUTSIDE):
            optimizer.step()

    return run


def _split(seconds: Mapping[tuple[str, str], float]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """By phase, the longest first, and by layer and phase."""
    phases: dict[str, float] = defaultdict(float)
    layers: dict[str, dict[str, float]] = {}
    for (layer, name), spent in seconds.items():
        phases[name or _KEPT] += spent
        if layer:
            layers.setdefault(layer, {})[name] = spent
    return dict(sorted(phases.items(), key=lambda each: -each[1])), layers
