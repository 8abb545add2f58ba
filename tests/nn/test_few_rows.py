"""Fully connected layers that stay in the enclave: the same training with our kernel and with torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import darknight as dk
from darknight.kernels import compiled_few_rows
from darknight.nn import few_rows
from nn.at_home import Changed, assert_close, assert_trained_alike, gradients, nothing, trained
from nn.three_ways import SCHEME

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_few_rows.chosen() is None, reason="nothing was compiled"),
]


class Head(nn.Module):
    """Fully connected layers as people write them: a module, a function, with a bias and without; one is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = nn.Linear(20, 48)
        self.first = nn.Linear(48, 33)
        self.second = nn.Linear(33, 17, bias=False)
        self.weight = nn.Parameter(torch.randn(5, 17) / 4)

    def forward(self, x):
        x = F.relu(self.second(F.relu(self.first(F.relu(self.sent(x))), inplace=True)))
        return F.linear(x, self.weight)


class Spy:
    """How often the kernel was taken: forward, and backward with which gradients."""

    def __init__(self, monkeypatch, smallest: int = 1) -> None:
        self.forward, self.backward = [], []
        multiply, multiply_back = compiled_few_rows.multiply, compiled_few_rows.multiply_back

        def noted(library, x, weight, bias):
            self.forward.append(tuple(x.shape))
            return multiply(library, x, weight, bias)

        def noted_back(library, x, weight, grad, wanted):
            self.backward.append(tuple(wanted))
            return multiply_back(library, x, weight, grad, wanted)

        monkeypatch.setattr(compiled_few_rows, "multiply", noted)
        monkeypatch.setattr(compiled_few_rows, "multiply_back", noted_back)
        monkeypatch.setattr(few_rows, "_SMALLEST", smallest)


def only_sent(name: str, module: nn.Module) -> bool:
    return name == "sent"


def trained_with(kernels: bool, monkeypatch):
    with monkeypatch.context() as patch:
        if not kernels:
            patch.setattr(compiled_few_rows, "chosen", lambda: None)
        return trained(Head, (6, 20), where=only_sent)


def test_training_with_our_kernel_is_training_with_torchs_within_rounding(monkeypatch):
    spy = Spy(monkeypatch)
    (ours, report), (torchs, reference) = (trained_with(kernels, monkeypatch) for kernels in (True, False))
    assert len(spy.forward) == 3 * 4  # three layers, three steps and scores, with kernels; and none without
    assert len(spy.backward) == 3 * 3
    assert_trained_alike(ours, torchs)
    assert str(report) == str(reference)  # counted alike, whoever computes


def test_a_layer_that_stays_because_it_is_cheaper_is_ours(monkeypatch):
    spy = Spy(monkeypatch, few_rows._SMALLEST)
    model, x = nn.Linear(1024, 512), torch.randn(8, 1024)
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime, example=x)
        model(x).sum().backward()
    assert [row.why for row in report.enclave if "cheaper" in row.why]
    assert (spy.forward, spy.backward) == ([(8, 1024)], [(False, True, True)])


def assert_torchs(model_of, shape=(3, 40), **options) -> None:
    assert_close(*(gradients(model_of, shape, protected, where=nothing, **options) for protected in (True, False)))


def frozen(name: str):
    model = nn.Linear(40, 21)
    getattr(model, name).requires_grad_(False)
    return model


MODELS = {
    "with a bias": (lambda: nn.Linear(40, 21), (True, True, True)),
    "without": (lambda: nn.Linear(40, 21, bias=False), (True, True, False)),
    "a weight that is fixed": (lambda: frozen("weight"), (True, False, True)),
    "a bias that is fixed": (lambda: frozen("bias"), (True, True, False)),
    "all of it fixed": (lambda: nn.Linear(40, 21).requires_grad_(False), (True, False, False)),
}


@pytest.mark.parametrize("shape", [(3, 40), (40,), (2, 3, 5, 40)], ids=str)
@pytest.mark.parametrize(("model_of", "wanted"), MODELS.values(), ids=MODELS)
def test_gradients_are_torchs_and_those_that_nobody_wants_are_not_computed(model_of, wanted, shape, monkeypatch):
    spy = Spy(monkeypatch)
    assert_torchs(model_of, shape)
    assert (len(spy.forward), spy.backward) == (1, [wanted])


@pytest.mark.parametrize(("model_of", "wanted"), MODELS.values(), ids=MODELS)
def test_gradients_of_gradients_are_torchs(model_of, wanted, monkeypatch):
    spy = Spy(monkeypatch)
    assert_torchs(model_of, again=True)
    assert len(spy.forward) == 1


def test_an_input_without_a_gradient_gets_none(monkeypatch):
    spy = Spy(monkeypatch)
    model = nn.Linear(40, 21)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, where=nothing)
        model(torch.randn(3, 40)).sum().backward()
    assert spy.backward == [(False, True, True)]


def test_a_gradient_in_another_layout_is_taken(monkeypatch):
    spy = Spy(monkeypatch)
    model_of = MODELS["with a bias"][0]

    def look(y):
        return y.t().contiguous()

    assert_torchs(model_of, look=look)
    assert len(spy.backward) == 1


def transposed():
    model = nn.Linear(40, 21)
    model.weight = nn.Parameter(torch.randn(40, 21).t())
    return model


OTHERS = {
    "many rows": lambda: Changed(lambda x: x.repeat(11, 1), nn.Linear(40, 21)),
    "no rows": lambda: Changed(lambda x: x[:0], nn.Linear(40, 21)),
    "doubles": lambda: Changed(lambda x: x.double(), nn.Linear(40, 21).double()),
    "an input in another layout": lambda: Changed(lambda x: x.t().contiguous().t(), nn.Linear(40, 21)),
    "a weight in another layout": transposed,
}


@pytest.mark.parametrize("model_of", OTHERS.values(), ids=OTHERS)
def test_what_the_kernel_is_not_made_for_is_computed_all_the_same(model_of, monkeypatch):
    spy = Spy(monkeypatch)
    assert_torchs(model_of)
    assert spy.forward == []


def test_a_small_weight_is_torchs(monkeypatch):
    spy = Spy(monkeypatch, few_rows._SMALLEST)
    gradients(MODELS["with a bias"][0], (3, 40), True, where=nothing)
    assert spy.forward == []


def test_under_autocast_it_is_torchs(monkeypatch):
    spy = Spy(monkeypatch)
    model = nn.Linear(40, 21)
    with dk.Runtime(SCHEME, None) as runtime, torch.autocast("cpu", dtype=torch.bfloat16):
        dk.protect_(model, runtime, where=nothing)
        assert model(torch.randn(2, 40)).dtype == torch.bfloat16
    assert spy.forward == []


def test_a_weight_that_was_changed_before_its_gradient_is_noticed_as_by_torch(monkeypatch):
    Spy(monkeypatch)
    model, x = nn.Linear(40, 21), torch.randn(2, 40, requires_grad=True)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, where=nothing)
        y = model(x)
        with torch.no_grad():
            model.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_torch_refuses_is_refused_in_its_words(monkeypatch):
    Spy(monkeypatch)
    model = nn.Linear(40, 21)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, where=nothing)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(torch.randn(2, 39))


def test_what_is_more_than_its_values_is_torchs(monkeypatch):
    """Forward-mode derivatives, and functions that torch.func transforms."""
    spy = Spy(monkeypatch)
    layer = nn.Linear(40, 30).requires_grad_(False)
    x, along = torch.randn(3, 40), torch.randn(3, 40)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(layer, runtime, where=nothing)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, along))).tangent
        mapped = torch.func.vmap(layer)(x)
        assert spy.forward == []
        layer(x)
        assert spy.forward == [(3, 40)]
        dk.unprotect_(layer)
    assert torch.allclose(tangent, along @ layer.weight.T, atol=1e-5)
    assert torch.allclose(mapped, layer(x), atol=1e-5)
