"""One script, run three ways: on the plain model, in the enclave alone, and with a fleet of workers."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import darknight as dk
from darknight.nn import Report
from fleet.threads import thread_fleet

SCHEME = dk.Scheme(inputs=2, colluders=1)
TOLERANCE = 0.02


def everything(name: str, module: nn.Module) -> bool:
    """For protect_'s where: nothing stays in the enclave for being cheap there."""
    return True


Script = Callable[[Any], Iterable[Any]]


@contextmanager
def fleet_runtime(scheme=SCHEME, **settings) -> Iterator[dk.Runtime]:
    """A runtime with workers, whose transcripts are kept."""
    with thread_fleet(scheme, record=True) as fleet, dk.Runtime(scheme, fleet, **settings) as runtime:
        yield runtime


def compare(build: Callable[[], Any], script: Script, *, scheme=SCHEME, tolerance=TOLERANCE, **protect) -> Report:
    """Checks what `script(build())` yields, and then the model's parameters, gradients and buffers.

    With workers: bit for bit what the enclave finds alone. Both: close to the plain model, in the same form.
    """
    torch.manual_seed(0)
    model = build()
    plain = _results(model, script)

    torch.manual_seed(0)
    model = build()
    with dk.Runtime(scheme, None) as runtime:
        dk.protect_(model, runtime, **protect)
        alone = _results(model, script)

    torch.manual_seed(0)
    model = build()
    with fleet_runtime(scheme) as runtime:
        report = dk.protect_(model, runtime, **protect)
        fleet = _results(model, script)

    assert plain.keys() == alone.keys() == fleet.keys()
    for name, expected in plain.items():
        assert same(alone[name], fleet[name]), f"{name}: workers gave other bits than the enclave alone"
        assert_close(name, fleet[name], expected, tolerance)
    return report


def train(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], **settings: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})
    for x, target in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()


def batches(count=3, size=4, shape=(5,), classes=3, dtype=torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, *shape, generator=generator, dtype=dtype),
            torch.randint(0, classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def random(*shape: int, dtype=torch.float32, seed=7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sent_weights(runtime: dk.Runtime) -> set[str]:
    """The layers whose weights any worker received."""
    assert runtime.fleet is not None
    return {
        record.layer
        for worker in range(runtime.fleet.workers)
        for record in runtime.fleet.transcript(worker)
        if record.kind == "weights"
    }


def snapshot(*holders: Any) -> dict[str, Tensor | None]:
    """Copies of what models and optimizers hold, gradients included."""
    found: dict[str, Tensor | None] = {}
    for number, holder in enumerate(holders):
        if isinstance(holder, nn.Module):
            found |= {f"{number}.{k}": v.detach().clone() for k, v in holder.state_dict().items()}
            for k, p in holder.named_parameters():
                found[f"{number}.{k}.grad"] = None if p.grad is None else p.grad.clone()
        else:
            for key, entry in holder.state_dict()["state"].items():
                found |= {f"{number}.{key}.{k}": torch.as_tensor(v).clone() for k, v in entry.items()}
    return found


def assert_same(first: dict[str, Tensor | None], second: dict[str, Tensor | None]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert same(value, second[name]), name


def same(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return first == second
    return first.dtype == second.dtype and torch.equal(first, second)


def assert_close(name: str, found: Any, expected: Any, tolerance: float) -> None:
    if not isinstance(expected, Tensor):
        assert found == expected, name
        return
    assert isinstance(found, Tensor), name
    assert found.dtype == expected.dtype, name
    assert found.shape == expected.shape, name
    assert found.requires_grad == expected.requires_grad, name
    assert found.stride() == expected.stride(), f"{name}: another memory layout"
    error = (found - expected).double().norm()
    assert error <= tolerance * expected.double().norm() + 1e-6, (
        f"{name}: off by {error / expected.double().norm():.1%}"
    )


def _results(model: nn.Module, script: Script) -> dict[str, Any]:
    found: dict[str, Any] = {f"result {i}": value for i, value in enumerate(script(model))}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        found[f"{name}.grad"] = parameter.grad
    for name, buffer in model.named_buffers():
        found[name] = buffer.clone()
    return found
