"""One training step and one inference batch of a network at full size, and each of its layers by itself."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

import darknight as dk
from darknight.models import build_model
from models.meta import IMAGENET, bilinear

CLASSES = 1000


@dataclass(frozen=True, eq=False)
class Batch:
    """Images as normalisation leaves them: smooth, of every brightness."""

    images: Tensor
    labels: Tensor


def batch_of(size: int) -> Batch:
    generator = torch.Generator().manual_seed(7)
    coarse = torch.randn(size, 3, 14, 14, generator=generator)
    images = nn.functional.interpolate(coarse, IMAGENET[1:], mode="bilinear")
    images += 0.3 * torch.randn(size, *IMAGENET, generator=generator)
    return Batch(images, torch.randint(CLASSES, (size,), generator=generator))


def network(name: str) -> nn.Module:
    return build_model(name, shape=IMAGENET, classes=CLASSES, seed=0)


@dataclass(frozen=True, eq=False)
class Step:
    """What a step gave: its gradients, the weights and buffers after it."""

    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def training_step(model: nn.Module, batch: Batch, dtype: torch.dtype = torch.float32) -> Step:
    """The same dropout every time."""
    model.train().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(5)
    cross_entropy(model(batch.images.to(dtype)), batch.labels).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    return Step(gradients, {name: entry.clone() for name, entry in model.state_dict().items()})


def scores(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model.eval()(batch.images)


@dataclass(frozen=True, eq=False)
class Call:
    """What a layer of the plain model was given, forward and backward."""

    x: Tensor
    delta: Tensor


def plain_calls(model: nn.Module, batch: Batch) -> dict[str, Call]:
    """x and delta of every layer that workers would compute, in one step of the plain model."""
    given, deltas = {}, {}

    def keep(name):
        def hook(module, inputs, output):
            given[name] = inputs[0].detach()
            output.register_hook(lambda delta: deltas.__setitem__(name, delta.detach().clone()))

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in bilinear(model)]
    training_step(model, batch)
    for handle in handles:
        handle.remove()
    return {name: Call(x, deltas[name]) for name, x in given.items()}


def layer_results(layer: nn.Module, call: Call) -> dict[str, Tensor]:
    """The layer by itself: output, gradient of the input, gradient of the weight."""
    x = call.x.clone().requires_grad_()
    y = layer(x)
    of_input, of_weight = torch.autograd.grad(y, (x, layer.weight), call.delta)
    return {"output": y.detach(), "grad_input": of_input, "grad_weight": of_weight}


def cosine(found: Tensor, expected: Tensor) -> float:
    return float(cosine_similarity(found.double().flatten(), expected.double().flatten(), dim=0))


def whole(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors.values()])


# --- memory -----------------------------------------------------------------------------------------------------------
def forget_peak() -> None:
    """From now on the peak of this process is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mebibytes(process: int | str = "self") -> int:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    raise LookupError(f"no peak memory of process {process}")


def peaks(fleet: dk.local_fleet) -> list[int]:
    return [peak_mebibytes(pid) for pid in fleet.processes.values()]
