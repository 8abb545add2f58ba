"""What tests of layers that stay in the enclave have in common: a script that is run with our functions and torch's."""

import torch
import torch.nn.functional as F
from torch import nn

import darknight as dk
from nn.three_ways import SCHEME


def nothing(name: str, module: nn.Module) -> bool:
    """For protect_'s where: every layer stays."""
    return False


class Changed(nn.Module):
    """A model whose input is changed first."""

    def __init__(self, change, model) -> None:
        super().__init__()
        self.change, self.model = change, model

    def forward(self, x):
        return self.model(self.change(x))


def trained(model_of, shape, steps: int = 3, **protect):
    """What some steps of training with five classes leave, with scores in evaluation; and the report."""
    torch.manual_seed(5)
    model, x = model_of(), torch.randn(shape)
    target, optimizer = torch.arange(len(x)) % 5, torch.optim.SGD(model.parameters(), lr=0.1)
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime, **protect)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), target).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            scores = model(x)
        return {**model.state_dict(), "scores": scores}, report


def assert_trained_alike(ours, torchs) -> None:
    """Within rounding, and not by the same functions."""
    assert list(ours) == list(torchs)
    # Quantised activations may round to the other side: a step of the fixed point, and not more.
    for name, value in ours.items():
        torch.testing.assert_close(
            value, torchs[name], rtol=2e-2, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert any(not torch.equal(value, torchs[name]) for name, value in ours.items())  # they were ours


def gradients(model_of, shape, protected: bool, again: bool = False, look=lambda y: y, **protect):
    """What a model gives, the gradient of its input, and those of its parameters; again: of the gradient's square."""
    torch.manual_seed(4)
    model, x = model_of(), torch.randn(shape, requires_grad=True)
    with dk.Runtime(SCHEME, None) as runtime:
        if protected:
            dk.protect_(model, runtime, **protect)
        y = model(x * 1.0)
        loss = look(y).square().sum()
        if again:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = grad.square().sum()
        loss.backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


def assert_close(ours, plain) -> None:
    for mine, theirs in zip(ours, plain, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            size = float(theirs.abs().max()) if theirs.numel() else 0.0
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * size)
