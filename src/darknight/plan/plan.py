"""The result: a scheme, and what it means for every layer, for a step and for the whole run."""

from __future__ import annotations

from dataclasses import dataclass, field

from darknight.coding import Code, Scheme
from darknight.plan.candidate import Candidate
from darknight.plan.choice import Choice, choose
from darknight.plan.costs import Seconds, alone_seconds, misses_of, step_seconds
from darknight.plan.flops import enclave_flops, worker_flops
from darknight.plan.layers import ENCLAVE, MASKED, PRODUCT, Network, Operation, Product, Resident, count_network
from darknight.plan.leakage import Nats, nats_of, nats_per_sending
from darknight.plan.memory import Memory, memory_of
from darknight.plan.remedies import impossible
from darknight.plan.request import Request
from darknight.plan.spares import Spares, explained
from darknight.plan.traffic import Traffic, traffic_of


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer in one step with a full batch.

    shares: how many workers get one of its input. worker_flops: of all workers. nats: about one example, in one call.
    Of a layer in the enclave only the first four are of interest, and if it is a product, its form and enclave_flops;
    the work of others is in `Plan.operations`.
    """

    name: str
    kind: str
    where: str
    why: str
    form: Product | None = None
    shares: int = 0
    traffic: Traffic
    worker_flops: int = 0
    enclave_flops: int = 0
    nats: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of one step with a full batch, or of the whole run.

    maskings: of inputs and gradients. nats: about one example. flops of the enclave: masking, checks, operations, and
    products that stay.
    """

    steps: int
    maskings: int
    traffic: Traffic
    worker_flops: int
    enclave_flops: int
    nats: float
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do, and what it takes.

    noise: nats about one number, in an input and in a gradient. standbys: usable workers that are left. next_best:
    what else would be safe. considered: how many schemes were compared. money: for the run, in the prices' currency.
    alone_seconds: the run in the enclave alone, to compare.
    """

    request: Request
    scheme: Scheme
    spares: Spares
    layers: tuple[LayerPlan, ...]
    operations: tuple[Operation, ...]
    noise: Nats
    step: Totals
    run: Totals
    memory: Memory
    money: float | None
    standbys: int
    next_best: tuple[Choice, ...]
    considered: int
    alone_seconds: float


def make_plan(request: Request) -> Plan:
    """The best scheme for the request. Raises PlanError, which says what would be possible, if there is none.

    >>> plan = make_plan(Request(
    ...     model="mlp", shape=(1, 8, 8), classes=10, batch_size=32, examples=1437, operators=("a", "b", "c", "d")
    ... ))
    >>> plan.scheme.inputs, plan.scheme.workers, plan.run.nats
    (2, 4, 0.0)
    """
    network = count_network(
        request.model,
        shape=request.shape,
        classes=request.classes,
        batch_size=request.batch_size,
        training=request.training,
        place=request.place,
        rates=request.rates,
        elsewhere=0.0 if request.local else 1.0,
    )
    choices = choose(request, network)
    if not choices.safe:
        raise impossible(request, network, choices.refusals)
    best, *others = choices.safe
    return _planned(request, network, best, tuple(others), choices.considered)


def _planned(request: Request, network: Network, best: Choice, others: tuple[Choice, ...], considered: int) -> Plan:
    candidate, batch_size = best.candidate, request.batch_size
    anywhere, network = network, network.under(candidate.sharing)
    code = candidate.code()
    noise = Nats() if candidate.exact else nats_of(code, best.scheme.arithmetic.noise_std)  # type: ignore[union-attr]
    layers = tuple(_layer(layer, candidate, code, noise, batch_size) for layer in network.layers)
    per_sending = nats_per_sending(network, noise)
    steps = sum(request.batches(request.epochs).values())
    run = [
        _step(network, candidate, code, size).times(count) for size, count in request.batches(request.epochs).items()
    ]
    if not request.training:  # weights that do not change are sent once
        run.append(_Work(traffic=Traffic(weights=sum(layer.traffic.weights for layer in layers))))
    step = _step(network, candidate, code, batch_size, new_weights=True)
    masked = len(network.products) * (2 if request.training else 1)
    seconds = step_seconds(network, candidate, batch_size, request.speeds, misses_of(candidate, request))
    return Plan(
        request=request,
        scheme=best.scheme,
        spares=explained(request, anywhere, best),
        layers=layers,
        operations=network.operations,
        noise=noise,
        step=Totals(steps=1, maskings=masked, nats=per_sending, seconds=seconds, **vars(step)),
        run=Totals(
            steps=steps,
            maskings=steps * masked,
            nats=request.epochs * per_sending,
            seconds=best.seconds,
            **vars(_sum(run)),
        ),
        memory=memory_of(network, candidate, batch_size),
        money=best.money,
        standbys=request.usable_workers - candidate.workers,
        next_best=others,
        considered=considered,
        alone_seconds=alone_seconds(network, request),
    )


def _layer(layer: Product | Resident, candidate: Candidate, code: Code, noise: Nats, batch_size: int) -> LayerPlan:
    if isinstance(layer, Resident):
        return LayerPlan(name=layer.name, kind=layer.kind, where=ENCLAVE, why=layer.why, traffic=Traffic())
    if layer.stays:
        return LayerPlan(
            name=layer.name,
            kind=layer.kind,
            where=ENCLAVE,
            why=layer.stays,
            form=layer,
            traffic=Traffic(),
            enclave_flops=layer.flops(batch_size, candidate.training),
        )
    return LayerPlan(
        name=layer.name,
        kind=layer.kind,
        where=MASKED,
        why=PRODUCT,
        form=layer,
        shares=candidate.workers,
        traffic=traffic_of(layer, candidate, batch_size),
        worker_flops=worker_flops(layer, candidate, batch_size).of_all(candidate),
        enclave_flops=enclave_flops(layer, candidate, code, batch_size),
        nats=noise.of(layer),
    )


# --- adding up ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class _Work:
    traffic: Traffic = field(default_factory=Traffic)
    worker_flops: int = 0
    enclave_flops: int = 0

    def times(self, count: int) -> _Work:
        return _Work(
            traffic=self.traffic.times(count),
            worker_flops=self.worker_flops * count,
            enclave_flops=self.enclave_flops * count,
        )


def _step(
    network: Network, candidate: Candidate, code: Code, batch_size: int, *, new_weights: bool | None = None
) -> _Work:
    """One step. Weights are new in every step of a training."""
    new = candidate.training if new_weights is None else new_weights
    operations = sum(operation.flops for operation in network.operations) * batch_size // network.batch_size
    parts = [
        _Work(
            traffic=traffic_of(product, candidate, batch_size, new_weights=new),
            worker_flops=worker_flops(product, candidate, batch_size).of_all(candidate),
            enclave_flops=enclave_flops(product, candidate, code, batch_size),
        ).times(count)
        for product, count in network.distinct.items()
    ]
    kept = sum(product.flops(batch_size, network.training) for product in network.kept)
    return _sum([*parts, _Work(enclave_flops=operations + kept)])


def _sum(parts: list[_Work]) -> _Work:
    traffic = Traffic()
    for part in parts:
        traffic += part.traffic
    return _Work(
        traffic=traffic,
        worker_flops=sum(part.worker_flops for part in parts),
        enclave_flops=sum(part.enclave_flops for part in parts),
    )
