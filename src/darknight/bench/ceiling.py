"""How much faster could training be: seconds of the processor of the plain step over those of the enclave.

The enclave is the bottleneck when workers are fast, so this ratio is the most that any number of workers can give. Both
are one step of the same model on the same batch (forward, backward and SGD with momentum; or forward alone), on one
thread, in one process. The plain step is timed in torch's usual layout and in channels_last, and the faster counts.
The enclave's time is that of the whole process, all its threads included: encode, decode, checks, copies, encryption of
links, layers that stay, optimizer and Python; its workers are other processes. They take turns, and the best of several
counts. The same rounds give the overhead: what passes on the clock while all workers share this one machine.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from darknight.bench.links import fleet_over
from darknight.bench.processors import processor_seconds
from darknight.bench.room import require_room
from darknight.bench.steps import Step, examples, network, step_of
from darknight.coding import Scheme
from darknight.errors import UsageError
from darknight.fleet import Fleet
from darknight.nn import STRUCTURE, protect_at
from darknight.nn.places import forms_of
from darknight.ops.cost import sent_seconds
from darknight.runtime import Runtime, keep_memory, measured_rates, sharing_of
from darknight.runtime.phases import OUTSIDE, measured
from darknight.runtime.threads import one_thread

LEAST_TIMES = 5
SCHEMES = {"field": Scheme(inputs=4, colluders=1), "paper": Scheme.paper()}
KEPT = "layers that stay, and Python between layers"
THREADS = "threads of the links"
_PATIENCE = 3600.0  # seconds for a worker: one that is late would leave its work to the enclave
_LAYOUTS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """Seconds of the processor, the best of `times`. phases and layers: of the enclave's best step.

    layers: by layer and phase. place: where products were computed (ops.place). masked: the layers that workers do.
    expected: what these cost the enclave by the rates of this machine (ops.cost), which decide where layers go.
    wall: the protected step's seconds on the clock, over the plain one's. processors: those of the enclave and all
    workers together, over the plain step's.
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
    processors: float
    scheme: Scheme = SCHEMES["field"]
    links: str = "shm"
    place: str = STRUCTURE
    masked: tuple[str, ...] = ()
    expected: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.plain / self.enclave

    @property
    def masked_seconds(self) -> float:
        """Of the enclave, for the layers that workers do: what `expected` is to be held against."""
        return sum(sum(spent.values()) for spent in self.layers.values()) + self.phases.get(THREADS, 0.0)


@dataclass
class _Best:
    """The least of several measurements, and what belongs to it. workers: process ids that count in `processors`."""

    workers: tuple[int, ...] = ()
    seconds: float = float("inf")
    processors: float = float("inf")
    wall: float = float("inf")
    phases: dict[tuple[str, str], float] = field(default_factory=dict)

    def time(self, step: Step) -> None:
        wall, everybody, begun = time.perf_counter(), processor_seconds(self.workers), time.process_time()
        with measured() as found:
            step()
        seconds = time.process_time() - begun
        self.processors = min(self.processors, processor_seconds(self.workers) - everybody)
        self.wall = min(self.wall, time.perf_counter() - wall)
        if seconds < self.seconds:
            self.seconds = seconds
            mine = sum(found.seconds.values())
            self.phases = {**found.seconds, (OUTSIDE, THREADS): max(0.0, seconds - mine)}


def measure_ceiling(
    model: str,
    *,
    batch: int,
    size: int = 224,
    training: bool = True,
    times: int = LEAST_TIMES,
    scheme: Scheme = SCHEMES["field"],
    links: str = "shm",
    place: str = STRUCTURE,
    tell: Callable[[str], None] = lambda text: None,
) -> Ceiling:
    """Starts local workers and times both kinds of step in turns, `times` rounds after one that is not counted.

    place: where products are computed, as in nn.protect_at.
    """
    images, labels = examples(batch, size)
    if times < 1:
        raise UsageError(f"{times} rounds; needs at least 1.")
    used = scheme if training else scheme.for_inference()
    require_room(model, batch=batch, size=size, training=training, scheme=used, links=links)
    keep_memory()  # for both: fresh memory would slow either down, the enclave more
    plain, private = network(model, size), network(model, size)
    plains = {layout: _Best() for layout in _LAYOUTS}
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        fleet = fleet_over(links, used, patience=_PATIENCE)
        stack.enter_context(fleet)
        runtime = stack.enter_context(Runtime(used, fleet))
        report = protect_at(place, private, runtime, tuple(images.shape))
        masked = _names(row.name for row in report.masked)
        expected = _expected(plain, masked, images, used, fleet)
        enclave = _Best(tuple(fleet.processes.values()))
        protected = step_of(private, images, labels, training=training)
        unprotected = {
            layout: step_of(plain, images.to(memory_format=form), labels, training=training)
            for layout, form in _LAYOUTS.items()
        }
        for count in range(times + 1):
            tell(f"round {count} of {times}" if count else "warming up")
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
        place=place,
        wall=enclave.wall / min(best.wall for best in plains.values()),
        processors=enclave.processors / plains[fastest].seconds,
        scheme=used,
        links=links,
        masked=masked,
        expected=expected,
        phases=phases,
        layers=layers,
    )


def _settled(best: _Best, step: Step, *, counts: bool) -> None:
    """A step, timed if it `counts`."""
    if counts:
        best.time(step)
    else:
        step()


def _expected(model: nn.Module, masked: Iterable[str], images: Tensor, scheme: Scheme, fleet: Fleet) -> float:
    calls = forms_of(model, {name: model.get_submodule(name) for name in masked}, images, training=scheme.training)
    sharing, rates = sharing_of(scheme, fleet.elsewhere), measured_rates()
    return sum(sent_seconds(form, sharing, rates) for forms in calls.values() for form in forms)


def _names(rows: Iterable[str]) -> tuple[str, ...]:
    """Each once, in their order: a layer may have several rows."""
    return tuple(dict.fromkeys(rows))


def _split(seconds: Mapping[tuple[str, str], float]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """By phase, the longest first, and by layer and phase."""
    phases: dict[str, float] = defaultdict(float)
    layers: dict[str, dict[str, float]] = {}
    for (layer, name), spent in seconds.items():
        phases[name or KEPT] += spent
        if layer:
            layers.setdefault(layer, {})[name] = spent
    return dict(sorted(phases.items(), key=lambda each: -each[1])), layers
