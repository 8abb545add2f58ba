"""How long a step and a whole run take, and what they cost: estimates, from counted work and stated speeds.

The runtime does one pass after another, and waits for workers in each. So the time of a step is the sum, over passes,
of what the enclave, the line to one worker, and one worker need; lines and workers are busy at the same time as the
others of their kind. Answers that are missing are asked for again (plan.misses). Nothing here was
measured on the user's machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from darknight.plan.candidate import Candidate
from darknight.plan.flops import worker_flops
from darknight.plan.layers import Network, Product
from darknight.plan.misses import RELIABLE, Misses, repeats
from darknight.plan.request import Prices, Request, Speeds
from darknight.plan.traffic import traffic_of

_FLOAT32 = 4
_OPTIMIZER = 20  # bytes a parameter: weight, gradient and momentum are read, weight and momentum written


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Where the time goes: masking and everything else in the enclave, waiting for lines, waiting for workers.

    repeats: all that comes on top because answers are missing.
    """

    enclave: float = 0.0
    links: float = 0.0
    workers: float = 0.0
    repeats: float = 0.0

    @property
    def total(self) -> float:
        return self.enclave + self.links + self.workers + self.repeats

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            enclave=self.enclave + other.enclave,
            links=self.links + other.links,
            workers=self.workers + other.workers,
            repeats=self.repeats + other.repeats,
        )

    def times(self, count: int) -> Seconds:
        return Seconds(
            enclave=self.enclave * count,
            links=self.links * count,
            workers=self.workers * count,
            repeats=self.repeats * count,
        )


def run_seconds(network: Network, candidate: Candidate, request: Request) -> Seconds:
    """The whole run: every batch of every epoch."""
    total, misses = Seconds(), misses_of(candidate, request)
    for size, count in request.batches(request.epochs).items():
        total += step_seconds(network, candidate, size, request.speeds, misses).times(count)
    return total


def misses_of(candidate: Candidate, request: Request) -> Misses:
    """Workers that the candidate leaves stand by."""
    return Misses(unreliable=request.unreliable, standbys=request.usable_workers - candidate.workers)


def alone_seconds(network: Network, request: Request) -> float:
    """The same run in the enclave alone, in float32: no shares, no workers, nothing to check."""
    total = 0.0
    for size, count in request.batches(request.epochs).items():
        flops = sum(product.flops(size, network.training) for product in (*network.products, *network.kept))
        total += count * (flops / (request.speeds.enclave_gflops * 1e9) + _resident(network, size, request.speeds))
    return total


def step_seconds(
    network: Network, candidate: Candidate, batch_size: int, speeds: Speeds, misses: Misses = RELIABLE
) -> Seconds:
    """One step with the weights sent anew (training), or one batch with weights that workers have (inference)."""
    total = Seconds(enclave=_resident(network, batch_size, speeds) + _kept(network, batch_size, speeds))
    for product, count in network.distinct.items():
        total += _layer_seconds(product, candidate, batch_size, speeds, misses).times(count)
    return total


def money(seconds: Seconds, workers: int, prices: Prices) -> float:
    """All machines are paid for the whole time."""
    return seconds.total / 3600 * (prices.enclave + workers * prices.worker)


def _resident(network: Network, batch_size: int, speeds: Speeds) -> float:
    """What torch does in the enclave: everything but products."""
    moved = sum(operation.bytes for operation in network.operations) * batch_size / network.batch_size
    return (moved + network.parameters * _OPTIMIZER * network.training) / (speeds.memory_gbytes * 1e9)


def _kept(network: Network, batch_size: int, speeds: Speeds) -> float:
    """Products that the enclave computes: as fast as it multiplies, or as their numbers come from memory."""
    total = 0.0
    for product in network.kept:
        passes = 2 + product.grad_input if network.training else 1
        moved = passes * _FLOAT32 * (batch_size * (product.inputs + product.outputs) + product.weights)
        flops = product.flops(batch_size, network.training)
        total += max(flops / (speeds.enclave_gflops * 1e9), moved / (speeds.memory_gbytes * 1e9))
    return total


def _layer_seconds(product: Product, candidate: Candidate, batch_size: int, speeds: Speeds, misses: Misses) -> Seconds:
    traffic = traffic_of(product, candidate, batch_size, new_weights=candidate.training)
    flops = worker_flops(product, candidate, batch_size)
    weights = traffic.weights + traffic.weight_gradients
    shares = traffic.sent + traffic.received - weights
    passes = 2 if candidate.training else 1
    # Everybody gets as much as the others, or nothing: one line has the share of one worker that takes part.
    each = candidate.groups(batch_size) * candidate.width
    one = each * (product.inputs + product.outputs)
    if candidate.training:
        one += 2 * product.weights * candidate.width + each * product.outputs
        one += each * product.inputs if product.grad_input else 0
    return Seconds(
        enclave=passes * speeds.pass_ms / 1e3
        + shares / (speeds.masking_gbytes * 1e9)
        + weights / (speeds.memory_gbytes * 1e9),
        links=8 * one / (speeds.link_gbits * 1e9),
        workers=(flops.forward + flops.grad_input + flops.grad_weight) / (speeds.worker_gflops * 1e9),
        repeats=repeats(product, candidate, batch_size, speeds, misses),
    )
