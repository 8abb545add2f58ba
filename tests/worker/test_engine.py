"""The engine interface with the processor behind it: right results, and refusals in words."""

from __future__ import annotations

import pytest
import torch

from darknight.errors import OpError, UsageError
from darknight.ops import BilinearOp, Conv, Linear
from darknight.types import OpSpec, Weights
from darknight.worker.engine import LocalEngine, device_named

PRIME = 268435399


def weights_of(op: BilinearOp, tensor: torch.Tensor, prime: int | None) -> Weights:
    return Weights(layer="net.0", version=1, op=op.spec(), prime=prime, tensor=tensor)


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, PRIME, shape, generator=source, dtype=torch.int32)


def test_field_passes_are_those_of_whole_numbers() -> None:
    # Python's integers do the same sums without any modulus until the end.
    engine, op = LocalEngine(), Linear()
    w, x, delta = integers((3, 5), 1), integers((4, 5), 2), integers((4, 3), 3)
    weights = weights_of(op, engine.place(w), PRIME)
    rows_w, rows_x, rows_d = w.tolist(), x.tolist(), delta.tolist()
    y = [[sum(a * b for a, b in zip(row, out, strict=True)) % PRIME for out in rows_w] for row in rows_x]
    gx = [[sum(d[o] * rows_w[o][i] for o in range(3)) % PRIME for i in range(5)] for d in rows_d]
    gw = [[sum(rows_d[n][o] * rows_x[n][i] for n in range(4)) % PRIME for i in range(5)] for o in range(3)]
    assert engine.forward(weights, op, x).tolist() == y
    assert engine.grad_input(weights, op, delta, (4, 5)).tolist() == gx
    assert engine.grad_weight(weights, op, x, delta).tolist() == gw


def test_real_passes_are_those_of_autograd() -> None:
    engine, op = LocalEngine(), Conv.make((3, 3), stride=2, padding=1)
    source = torch.Generator().manual_seed(4)
    x = torch.randn(2, 3, 7, 6, generator=source, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, generator=source, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, stride=2, padding=1)
    delta = torch.randn(y.shape, generator=source, dtype=torch.float64)
    gx, gw = torch.autograd.grad(y, (x, w), delta)
    weights = weights_of(op, w.detach(), None)
    torch.testing.assert_close(engine.forward(weights, op, x.detach()), y.detach())
    torch.testing.assert_close(engine.grad_input(weights, op, delta, tuple(x.shape)), gx)
    torch.testing.assert_close(engine.grad_weight(weights, op, x.detach(), delta), gw)


@pytest.mark.parametrize("prime", [PRIME, None])
def test_operands_that_do_not_fit_are_refused(prime: int | None) -> None:
    engine, op = LocalEngine(), Linear()
    dtype = torch.float32 if prime is None else torch.int32
    weights = weights_of(op, torch.ones(3, 5, dtype=dtype), prime)
    with pytest.raises(OpError, match="linear: input"):
        engine.forward(weights, op, torch.ones(4, 6, dtype=dtype))
    with pytest.raises(OpError, match="does not belong"):
        engine.grad_input(weights, op, torch.ones(4, 2, dtype=dtype), (4, 5))


def test_forgetting_what_was_never_there_does_no_harm() -> None:
    engine = LocalEngine()
    engine.forget(Weights(layer="x", version=9, op=OpSpec("linear"), prime=None, tensor=torch.ones(1, 1)))
    engine.close()
    engine.close()


def test_threads_are_set_and_none_is_refused() -> None:
    before = torch.get_num_threads()
    try:
        LocalEngine(threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(UsageError, match="at least 1"):
        LocalEngine(threads=0)


def test_a_device_that_is_not_there_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cpu") == torch.device("cpu")
    assert device_named("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UsageError, match=r"cuda:2 is not in this machine: it has 2 .* cuda:0 to cuda:1"):
        device_named("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"it has 0 CUDA devices\. Use cpu"):
        device_named("cuda")
    for name in ("gpu", "cuda:-1", "cuda:x", "mps", "cuda:١", ""):
        with pytest.raises(UsageError, match="use cpu or cuda:N"):
            device_named(name)
