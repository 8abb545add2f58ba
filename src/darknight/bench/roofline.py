"""The bytes that the enclave moves at least in one protected step, by phase, from the shapes of the network alone.

With x and y a layer's input and output of the whole batch, w its weights, `width` 4 bytes each, and shares as
`plan.traffic` counts them (P - M of a masking go out, and M seeds; K + M + E answers come back, K + 2M of a weight
gradient):

    phase       a pass of its own reads -> writes                          joined with its neighbours
    weights     w, its integers (the same?); w -> integers, and those      w -> integers
                before -> half as many bytes
    scale       x (its largest and its moments)                            nothing: whoever writes x knows them
    encode      x, noise -> shares, noise                                  x -> shares
    checksum    x, in the backward pass                                    nothing
    links       weights -> weights                                         nothing: made where they lie
    decode      answers -> floats                                          the same
    check       both factors                                               nothing: summed while they pass
    optimizer   weight, gradient, momentum -> weight, momentum             the same
    what stays  as torch reads and writes it, operation by operation       the same

A backward pass is the same with delta, whose integers are written.
A product that stays in the enclave reads its factors and writes its result; its arithmetic is not in here.
All of it is a bound from below: what is computed between reading and writing, and Python, come on top.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from darknight.bench.bandwidth import Bandwidth
from darknight.bench.ceiling import KEPT, THREADS, Ceiling
from darknight.bench.steps import CLASSES, OPTIMIZER
from darknight.coding import Scheme
from darknight.plan.candidate import Candidate
from darknight.plan.layers import Network, Product, count_network
from darknight.plan.traffic import Traffic, traffic_of

LINKS = "links"
_OF_LINKS = ("send", "send weights", "receive", THREADS)  # phases of the runtime that are one here
_WIDTH = 4  # bytes of a float32, and of an integer of the field


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes."""

    read: int = 0
    written: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(read=self.read + other.read, written=self.written + other.written)


@dataclass(frozen=True, kw_only=True)
class Floor:
    """By phase: each a pass of its own, and joined with its neighbours. sealed: bytes that sealed links encrypt."""

    apart: Mapping[str, Moved]
    joined: Mapping[str, Moved]
    sealed: int


@dataclass(frozen=True, kw_only=True)
class PhaseLimit:
    """least: seconds at the speed of memory; measured: seconds of the processor that it took."""

    moved: Moved
    least: float
    measured: float

    @property
    def over(self) -> float | None:
        """How many times the least; None where nothing needs to be moved."""
        return self.measured / self.least if self.least else None


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """What was measured, beside what memory allows. ceiling: at the limit of memory; joined: if passes were joined."""

    phases: Mapping[str, PhaseLimit]
    least: float
    measured: float
    ceiling: float
    joined: float


def roofline_of(found: Ceiling, bandwidth: Bandwidth) -> Roofline:
    """Of a scheme in the field with Freivalds; `found` says which layers are masked."""
    network = count_network(
        found.model, shape=(3, found.size, found.size), classes=CLASSES, batch_size=found.batch, training=found.training
    )
    floor = floor_of(network, found.scheme, found.masked)
    sealing = floor.sealed / bandwidth.seal if found.links == "sealed" else 0.0
    measured = _grouped(found.phases)
    phases = {}
    for name in dict.fromkeys((*measured, *floor.apart)):
        moved = floor.apart.get(name, Moved())
        least = bandwidth.seconds(moved.read, moved.written) + (sealing if name == LINKS else 0.0)
        phases[name] = PhaseLimit(moved=moved, least=least, measured=measured.get(name, 0.0))
    least = sum(limit.least for limit in phases.values())
    joined = sealing + sum(bandwidth.seconds(moved.read, moved.written) for moved in floor.joined.values())
    return Roofline(
        phases=phases,
        least=least,
        measured=found.enclave,
        ceiling=found.plain / least,
        joined=found.plain / joined,
    )


def floor_of(network: Network, scheme: Scheme, masked: Collection[str]) -> Floor:
    """masked: names of the layers that workers compute; other products stay."""
    candidate = Candidate(
        inputs=scheme.inputs,
        colluders=scheme.colluders,
        spares=scheme.spares,
        exact=True,
        training=network.training,
        integrity=scheme.integrity,
    )
    apart: dict[str, Moved] = {}
    joined: dict[str, Moved] = {}
    sealed = 0
    streams = list(_kept(network))
    for product in network.products:
        if product.name not in masked:
            streams += _at_home(product, network)
            continue
        traffic = traffic_of(product, candidate, network.batch_size, new_weights=network.training)
        sealed += traffic.sent + traffic.received
        streams += _forward(product, network, candidate, traffic)
        if network.training:
            streams += _backward(product, network, candidate, traffic)
    for stream in streams:
        apart[stream.phase] = apart.get(stream.phase, Moved()) + stream.moved
        if stream.needed:
            joined[stream.phase] = joined.get(stream.phase, Moved()) + stream.moved
    return Floor(apart=apart, joined=joined, sealed=sealed)


@dataclass(frozen=True)
class _Stream:
    """needed: also if the pass were joined with its neighbours."""

    phase: str
    moved: Moved
    needed: bool = False


def _needed(phase: str, *, read: int = 0, written: int = 0) -> _Stream:
    return _Stream(phase, Moved(read=read, written=written), True)


def _spared(phase: str, *, read: int = 0, written: int = 0) -> _Stream:
    return _Stream(phase, Moved(read=read, written=written))


def _forward(product: Product, network: Network, candidate: Candidate, traffic: Traffic) -> Iterator[_Stream]:
    x, y, w = _sizes(product, network)
    noise = traffic.input_shares // (candidate.workers - candidate.seeded) * candidate.colluders
    if not network.training:  # workers have them, from the first batch on
        yield _spared("weights", read=2 * w)
    else:  # the first tile shows that they changed
        yield _needed("weights", read=w, written=w)
        yield _spared("weights", read=w, written=w // 2)
        yield _spared(LINKS, read=w, written=w)  # one copy for all workers of a machine
    yield _spared("scale", read=x)
    yield _needed("encode", read=x, written=traffic.input_shares)
    yield _spared("encode", read=noise, written=noise)
    yield _needed("decode", read=traffic.outputs, written=y)
    yield _spared("check", read=x + w)


def _backward(product: Product, network: Network, candidate: Candidate, traffic: Traffic) -> Iterator[_Stream]:
    x, y, w = _sizes(product, network)
    asked = candidate.workers if product.grad_input else candidate.base_workers
    noise = traffic.gradient_shares // (asked - candidate.seeded) * candidate.colluders
    yield _spared("scale", read=y)
    yield _needed("encode", read=y, written=traffic.gradient_shares)
    yield _spared("encode", read=noise, written=noise + y)
    yield _spared("checksum", read=x)
    yield _needed("decode", read=traffic.weight_gradients, written=w)
    yield _spared("check", read=x + y)
    if product.grad_input:
        yield _needed("decode", read=traffic.input_gradients, written=x)
        yield _spared("check", read=y + w)


def _at_home(product: Product, network: Network) -> Iterator[_Stream]:
    x, y, w = _sizes(product, network)
    yield _needed(KEPT, read=x + w, written=y)
    if network.training:
        yield _needed(KEPT, read=x + y, written=w)
        if product.grad_input:
            yield _needed(KEPT, read=y + w, written=x)


def _kept(network: Network) -> Iterator[_Stream]:
    for operation in network.operations:
        written = min(operation.bytes, operation.flops * _WIDTH)  # flops: the numbers that it writes
        yield _needed(KEPT, read=operation.bytes - written, written=written)
    if network.training:
        each = network.parameters * _WIDTH
        yield _needed(OPTIMIZER, read=3 * each, written=2 * each)


def _sizes(product: Product, network: Network) -> tuple[int, int, int]:
    """Bytes of x, y and w."""
    batch = network.batch_size
    return product.inputs * batch * _WIDTH, product.outputs * batch * _WIDTH, product.weights * _WIDTH


def _grouped(phases: Mapping[str, float]) -> dict[str, float]:
    """Those of the links together: which thread copies an answer is not what this is about."""
    found: dict[str, float] = {}
    for name, seconds in phases.items():
        group = LINKS if name in _OF_LINKS else name
        found[group] = found.get(group, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))
