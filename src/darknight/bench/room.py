"""Whether a measurement can fit into the memory that is free now.

Where it cannot, the kernel would end some process of this machine to make room, and not always ours. What is counted is
a bound from below (plan.memory): what passes it can still be too much.
"""

from __future__ import annotations

from darknight.bench.steps import CLASSES
from darknight.coding import Scheme
from darknight.errors import UsageError
from darknight.memory import free_bytes
from darknight.plan.candidate import Candidate
from darknight.plan.layers import count_network
from darknight.plan.memory import memory_of

_FLOAT = 4
_TRAINED = 3  # of each parameter: weight, gradient and momentum


def require_room(model: str, *, batch: int, size: int, training: bool, scheme: Scheme, links: str) -> None:
    """Raises UsageError if a plain and a protected step of this size do not fit beside each other, with workers."""
    least, free = least_bytes(model, batch, size, training, scheme, links), free_bytes()
    if least > free:
        raise UsageError(
            f"{model}, batch {batch} at {size}x{size}, with {scheme.workers} workers on this machine: needs more than "
            f"{least / (1 << 30):.1f} GiB of memory, and {free / (1 << 30):.1f} are free. Use a smaller --batch or "
            "--size, another --model, or wait until other programs have ended."
        )


def least_bytes(model: str, batch: int, size: int, training: bool, scheme: Scheme, links: str) -> int:
    """Of the enclave, the plain model beside it, and all workers."""
    network = count_network(model, shape=(3, size, size), classes=CLASSES, batch_size=batch, training=training)
    candidate = Candidate(
        inputs=scheme.inputs,
        colluders=scheme.colluders,
        spares=max(0, scheme.workers - scheme.inputs - (2 if training else 1) * scheme.colluders),
        exact=True,  # 4 bytes a number, as in float32; float64 takes more
        training=training,
    )
    memory = memory_of(network, candidate, batch)
    weights = sum(product.weights for product in network.products) * candidate.width
    plain = network.parameters * _FLOAT * (_TRAINED if training else 1) + network.saved_bytes
    copies = 1 if links == "shm" else scheme.workers  # of the weights: one for all workers, or one for each
    return memory.enclave_at_least + plain + scheme.workers * (memory.worker_keeps - weights) + copies * weights
