"""Memory on each side, in bytes.

A worker: enough. It counts what it keeps and what a task takes against its --memory-limit before it does anything
(worker.budget, ops.estimate), and with this limit it refuses nothing of the plan.
The enclave: a lower bound. Weights, gradients and momentum, the weights as they are sent, what autograd keeps, and the
shares of the largest pass; not the examples, torch itself, and copies that live for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from darknight.ops.estimate import Reach, task_bytes
from darknight.plan.candidate import Candidate
from darknight.plan.layers import Network, Product
from darknight.plan.traffic import traffic_of
from darknight.types import BackwardTask, ForwardTask, Pass, Weights

_OVERHEAD = 4096  # of each tensor that a worker keeps, as it counts
_FLOAT32, _FLOAT64 = 4, 8
_OVER = (8 << 20) + 64 * _OVERHEAD  # of what is over, and it need not have been told yet (runtime.crew)
_SEED = 1 << 18  # at most, beside a share that is made from its seed (wire.seeds)
_EARLIER = 2  # bytes of a quantised weight of the step before; floats keep their width


@dataclass(frozen=True, kw_only=True)
class Memory:
    """worker: what each needs. worker_keeps: of that, weights and shares that it keeps until the step is over."""

    worker: int
    worker_keeps: int
    enclave_at_least: int


def memory_of(network: Network, candidate: Candidate, batch_size: int) -> Memory:
    keeps = working = answers = 0
    for product in network.products:
        tasks = _tasks(product, candidate, batch_size)
        kept = [product.weights * candidate.width]
        if candidate.training:
            kept.append(tasks[0].tensor.nbytes)
        keeps += sum(kept) + _OVERHEAD * len(kept)
        weights = _weights(product, candidate)
        reach = Reach.of(product.op, product.weight_shape, candidate.largest_weight)
        for task in tasks:
            working = max(working, task.tensor.nbytes + task_bytes(task, weights, product.op, reach))
            answers = max(answers, _answer(task, product, candidate) + _OVERHEAD)
    # The answer before may still be on its way.
    return Memory(
        worker=keeps + working + answers + _OVER + (_SEED if candidate.seeded else 0),
        worker_keeps=keeps,
        enclave_at_least=_enclave(network, candidate, batch_size),
    )


def _enclave(network: Network, candidate: Candidate, batch_size: int) -> int:
    weights = sum(product.weights for product in network.products)
    saved = network.saved_bytes * batch_size // network.batch_size
    total = network.parameters * _FLOAT32 + weights * candidate.width + saved
    if candidate.training:
        total += 2 * network.parameters * _FLOAT32  # gradients and momentum
        total += weights * (_EARLIER if candidate.exact else candidate.width)
        if not candidate.exact:  # inputs as they were encoded are kept too
            total += sum(product.inputs for product in network.products) * batch_size * _FLOAT64
    passes = (_largest_pass(product, candidate, batch_size) for product in network.products)
    return total + max(passes, default=0)


def _largest_pass(product: Product, candidate: Candidate, batch_size: int) -> int:
    """Shares and answers of a forward or of a backward pass."""
    traffic = traffic_of(product, candidate, batch_size)
    backward = traffic.gradient_shares + traffic.input_gradients + traffic.weight_gradients
    return max(traffic.input_shares + traffic.outputs, backward)


# --- what a worker is sent, without its values ------------------------------------------------------------------------
def _tasks(product: Product, candidate: Candidate, batch_size: int) -> list[ForwardTask | BackwardTask]:
    groups = candidate.groups(batch_size)
    x_shape, y_shape = (groups, *product.input_shape), (groups, *product.output_shape)
    training = candidate.training
    forward = ForwardTask(
        layer=product.name, call=0, version=0, tensor=_empty(x_shape, candidate), compute=True, keep=training
    )
    if not training:
        return [forward]
    passes = (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT) if product.grad_input else (Pass.GRAD_WEIGHT,)
    backward = BackwardTask(
        layer=product.name,
        call=0,
        version=0,
        tensor=_empty(y_shape, candidate),
        passes=passes,
        x_shape=x_shape,
    )
    return [forward, backward]


def _weights(product: Product, candidate: Candidate) -> Weights:
    return Weights(
        layer=product.name,
        version=0,
        op=product.op.spec(),
        prime=candidate.prime,
        tensor=_empty(product.weight_shape, candidate),
    )


def _answer(task: ForwardTask | BackwardTask, product: Product, candidate: Candidate) -> int:
    groups = task.tensor.shape[0]
    if isinstance(task, ForwardTask):
        return groups * product.outputs * candidate.width
    values = product.weights + (groups * product.inputs if product.grad_input else 0)
    return values * candidate.width


def _empty(shape: tuple[int, ...], candidate: Candidate) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32 if candidate.exact else torch.float64, device="meta")
