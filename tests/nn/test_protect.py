"""protect_ and unprotect_: what they keep, what they refuse, what they undo."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.errors import EncodingError, ProtectError
from nn.three_ways import SCHEME, assert_same, fleet_runtime, random, snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def runtime():
    with dk.Runtime(SCHEME, None) as runtime:
        yield runtime


def network():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5), nn.LSTM(5, 3)
    )


def identity(model):
    """Everything about a model that a script can hold on to."""
    return {
        "classes": [type(module) for module in model.modules()],
        "modules": [id(module) for module in model.modules()],
        "parameters": [(name, id(p), p.requires_grad, p.device, p.dtype) for name, p in model.named_parameters()],
        "buffers": [(name, id(buffer)) for name, buffer in model.named_buffers()],
        "state": list(model.state_dict()),
        "training": [module.training for module in model.modules()],
        "hooks": [list(module._forward_hooks) for module in model.modules()],
        "extra": repr(model),
    }


# --- what stays -----------------------------------------------------------------------------------------------------
def test_the_model_stays_what_it_was(runtime):
    model = network()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    model[4].register_forward_hook(lambda *_: None)
    before, values = identity(model), snapshot(model)
    dk.protect_(model, runtime)
    assert identity(model) == before
    assert_same(values, snapshot(model))
    assert isinstance(model[0], nn.Conv2d)


def test_flags_can_be_changed_afterwards(runtime):
    model = network()
    dk.protect_(model, runtime)
    model.eval().requires_grad_(False)
    assert not any(module.training for module in model.modules())
    assert not model(random(4, 2, 5, 5))[0].requires_grad


def test_hooks_fire_as_before(runtime):
    def heard(protect):
        torch.manual_seed(0)
        model, calls = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), []
        if protect == "before":
            dk.protect_(model, runtime)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda m, x, n=name: calls.append(("pre", n, x[0].shape)))
            module.register_forward_hook(lambda m, x, y, n=name: calls.append(("post", n, y.shape)))
            module.register_full_backward_pre_hook(lambda m, g, n=name: calls.append(("grad", n, g[0].shape)))
            module.register_full_backward_hook(lambda m, gx, gy, n=name: calls.append(("back", n, gy[0].shape)))
        if protect == "after":
            dk.protect_(model, runtime)
        model(random(4, 5).requires_grad_()).square().sum().backward()
        return calls

    plain = heard("never")
    assert len(plain) == 16
    assert heard("before") == plain
    assert heard("after") == plain


def test_hooks_may_change_what_passes(runtime):
    model = nn.Linear(5, 4)
    model.register_forward_pre_hook(lambda module, x: (x[0] * 2,))
    model.register_forward_hook(lambda module, x, y: y + 1)
    x = random(4, 5)
    expected = model(x)
    dk.protect_(model, runtime)
    assert (model(x) - expected).norm() <= 0.02 * expected.norm()


def test_tensor_hooks_fire(runtime):
    model, seen = nn.Linear(5, 4), []
    dk.protect_(model, runtime)
    model.weight.register_hook(lambda grad: seen.append(grad.shape))
    model(random(4, 5)).sum().backward()
    assert seen == [(4, 5)]


# --- what is refused ------------------------------------------------------------------------------------------------
def test_a_second_call_is_refused(runtime):
    model = network()
    dk.protect_(model, runtime)
    with pytest.raises(ProtectError, match=r"protected already.*unprotect_"):
        dk.protect_(model, runtime)
    with pytest.raises(ProtectError, match="protected already"):
        dk.protect_(nn.Sequential(nn.Linear(2, 2), model[0]), runtime)


def test_a_refused_call_leaves_the_model_as_it_was(runtime):
    protected = nn.Linear(5, 5)
    dk.protect_(protected, runtime)
    model = nn.Sequential(nn.Linear(5, 5), protected)
    with pytest.raises(ProtectError):
        dk.protect_(model, runtime)
    assert "forward" not in vars(model[0])
    dk.unprotect_(protected)
    dk.protect_(model, runtime)


def test_lazy_modules_are_refused_until_they_are_made(runtime):
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ProtectError, match=r"0 has no parameters yet\. Run one batch"):
        dk.protect_(model, runtime)
    model(random(4, 5))
    assert [row.name for row in dk.protect_(model, runtime).masked] == ["0"]


def test_parameters_on_another_device_are_refused(runtime):
    with pytest.raises(ProtectError, match=r"parameters on meta.*model\.cpu\(\)"):
        dk.protect_(nn.Sequential(nn.Linear(5, 4, device="meta")), runtime)


@pytest.mark.parametrize(
    ("model", "settings", "complaint"),
    [
        (torch.zeros(3), {}, "a Tensor where a torch.nn.Module belongs"),
        (nn.Linear(5, 4), {"where": ["0"]}, "where must be a function"),
        (nn.Linear(5, 4), {"bounds": {"nobody": 1.0}}, "'nobody', which is no layer that is masked"),
        (nn.Linear(5, 4), {"bounds": {"": 0.0}}, "positive"),
        (nn.Linear(5, 4), {"bounds": {"": float("nan")}}, "positive"),
        (nn.Linear(5, 4), {"bounds": {"": True}}, "positive"),
        (nn.Linear(5, 4), {"bounds": {"": "1"}}, "positive"),
    ],
)
def test_bad_arguments_are_refused(runtime, model, settings, complaint):
    with pytest.raises(ProtectError, match=complaint):
        dk.protect_(model, runtime, **settings)
    if isinstance(model, nn.Module):
        assert "forward" not in vars(model)


def test_something_else_than_a_runtime_is_refused():
    with pytest.raises(ProtectError, match=r"a Scheme where a dk\.Runtime belongs"):
        dk.protect_(nn.Linear(5, 4), SCHEME)


def test_bounds_of_a_layer_in_the_enclave_are_refused(runtime):
    with pytest.raises(ProtectError, match="'5'"):
        dk.protect_(network(), runtime, bounds={"5": 1.0})


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_a_protected_model_cannot_be_pickled_and_says_what_to_do(runtime, save):
    model = network()
    dk.protect_(model, runtime)
    with pytest.raises(TypeError, match=r"state_dict\(\).*unprotect_"):
        save(model, io.BytesIO())
    dk.unprotect_(model)
    save(model, io.BytesIO())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_protected_model_cannot_be_traced_and_says_what_to_do(runtime):
    model = nn.Sequential(nn.Linear(5, 4))
    dk.protect_(model, runtime)
    with pytest.raises(ProtectError, match=r"layer 0: .*traced.*unprotect_"):
        torch.jit.trace(model, random(4, 5))


# --- what is undone -------------------------------------------------------------------------------------------------
def test_unprotecting_restores_the_model(runtime):
    model, x = network(), random(4, 2, 5, 5)
    attributes = [set(vars(module)) for module in model.modules()]
    before, expected = identity(model), copy.deepcopy(model)(x)[0]
    report = dk.protect_(model, runtime)
    dk.unprotect_(model)
    assert identity(model) == before
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert torch.equal(model(x)[0], expected)
    assert not any(row.calls for row in report.rows)


def test_unprotecting_what_is_not_protected_is_refused():
    with pytest.raises(ProtectError, match="not protected"):
        dk.unprotect_(nn.Linear(5, 4))


def test_a_forward_that_somebody_put_on_an_instance_comes_back(runtime):
    model = nn.Linear(5, 4)
    own = model.forward = lambda x: nn.functional.linear(x, model.weight) * 2
    expected = model(random(4, 5))
    report = dk.protect_(model, runtime)
    assert (model(random(4, 5)) - expected).norm() <= 0.02 * expected.norm()
    assert sum(row.calls for row in report.masked) == 1
    dk.unprotect_(model)
    assert model.forward is own


def test_protecting_again_after_unprotecting_works():
    model = nn.Linear(5, 4)
    for _ in range(2):
        with fleet_runtime() as runtime:
            report = dk.protect_(model, runtime)
            model(random(4, 5)).sum().backward()
            dk.unprotect_(model)
            assert [row.calls for row in report.masked] == [1]


# --- where, bounds, report ------------------------------------------------------------------------------------------
def test_where_selects_layers_by_name_and_module(runtime):
    model, asked = network(), []

    def where(name, module):
        asked.append((name, type(module)))
        return isinstance(module, nn.Conv2d)

    report = dk.protect_(model, runtime, where=where)
    model(random(4, 2, 5, 5))
    assert ("4", nn.Linear) in asked
    assert [(row.name, row.calls) for row in report.masked] == [("0", 1)]
    assert {row.why for row in report.enclave if row.name == "4"} == {"excluded by where"}


def test_where_holds_for_functional_calls_too():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5))

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

    model = nn.Sequential(Own())
    with fleet_runtime() as runtime:
        report = dk.protect_(model, runtime, where=lambda name, module: name != "0")
        model(random(4, 5))
        assert not runtime.fleet.transcript(0)
    assert not report.masked
    assert "excluded by where" in {row.why for row in report.enclave if row.calls}


def test_bounds_reach_the_layer_they_name():
    scheme = dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(noise_std=2e3))
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with fleet_runtime(scheme, strict_bounds=True) as runtime:
        dk.protect_(model, runtime, bounds={"0": 1.0})
        model(torch.full((4, 5), 0.5))
        with pytest.raises(EncodingError, match=r"layer 0: the input exceeds its bound 1\b"):
            model(torch.full((4, 5), 2.0))
        assert runtime.state_dict()["layers"]["0"]["input_bound"] == 1.0


def test_the_report_lists_every_module_with_parameters_and_why(runtime):
    model = nn.Sequential(
        nn.Linear(5, 4), nn.LayerNorm(4), nn.Embedding(3, 4), nn.GRU(4, 4), nn.PReLU(), nn.Bilinear(2, 2, 2)
    )
    report = dk.protect_(model, runtime)
    assert [row.name for row in report.masked] == ["0"]
    assert [row.name for row in report.enclave] == ["1", "2", "3", "4", "5"]
    assert all(row.why for row in report.enclave)
    assert len(str(report).splitlines()) == 1 + 6


def test_the_report_counts_no_calls_of_what_has_no_products(runtime):
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
    report = dk.protect_(model, runtime)
    model(torch.randn(3, 5))
    linear, norm = str(report).splitlines()[1:3]
    assert linear.split()[3:5] == ["1", "0.0"]
    assert norm.split()[3:5] == ["-", "-"]
    assert "nothing of this model is masked" not in str(report)


def test_the_report_says_that_nothing_is_masked(runtime):
    report = dk.protect_(nn.Sequential(nn.LayerNorm(4), nn.ReLU()), runtime)
    assert str(report).endswith("nothing of this model is masked so far: workers get no part of it")


def test_an_unsupported_setting_stays_in_the_enclave_with_its_reason(runtime):
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1))
    model[0].padding_mode = "unheard of"
    report = dk.protect_(model, runtime)
    (row,) = report.enclave
    assert row.name == "0"
    assert row.why


def test_a_forward_that_came_later_is_not_thrown_away():
    model = nn.Sequential(nn.Linear(5, 3))
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        dk.protect_(model, runtime)
        ours = model[0].forward
        model[0].forward = lambda x: ours(x) * 2
        with pytest.raises(dk.errors.ProtectError, match="0 got another forward"):
            dk.unprotect_(model)
        model[0].forward = ours
        dk.unprotect_(model)
    with pytest.raises(dk.errors.ProtectError, match="a int where"):
        dk.unprotect_(3)


def test_where_is_asked_once_for_each_layer_and_owner_of_a_matrix():
    asked = []

    def where(name, module):
        asked.append(name)
        return module.weight.shape[0] > 3  # would fail for modules without a weight

    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        report = dk.protect_(model, runtime, where=where)
        model(torch.randn(4, 5))
    assert asked == ["0", "3.0"]
    assert [(row.name, row.where, row.calls) for row in report.rows if row.kind == "Linear"] == [
        ("0", "masked", 1),
        ("3.0", "enclave", 1),
    ]


def test_a_recurrent_layer_has_one_row():
    model = nn.LSTM(5, 3)
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        report = dk.protect_(model, runtime)
        model(torch.randn(4, 2, 5))
    ((name, kind, calls),) = [(row.name, row.kind, row.calls) for row in report.rows]
    assert (name, kind, calls) == ("", "LSTM", 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_said_to_be_uncounted():
    model = nn.Sequential(nn.Linear(5, 4), torch.jit.script(nn.Linear(4, 400)))
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        report = dk.protect_(model, runtime)
        model(torch.randn(4, 5))
    assert str(report).endswith("; 1 scripted modules are not counted")


def test_an_interrupt_while_protecting_leaves_the_model_as_it_was(monkeypatch):
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        disable, calls = torch.compiler.disable, []

        def interrupted(function):
            calls.append(function)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return disable(function)

        monkeypatch.setattr(torch.compiler, "disable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dk.protect_(model, runtime)
        assert not any("forward" in vars(module) or "_darknight" in vars(module) for module in model.modules())
        assert not runtime.state_dict()["layers"]


def test_a_bias_of_another_dtype_is_refused_as_torch_does():
    model = nn.Linear(5, 4)
    model.bias.data = model.bias.data.double()
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        dk.protect_(model, runtime)
        with pytest.raises(dk.errors.OpError, match=r"its bias is torch\.float64"):
            model(torch.randn(4, 5))


def test_signatures_stay_as_they_are():
    """Trainers look at the arguments of forward to know which columns a model takes."""

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x, mask=None, *, scale: float = 1.0):
            return self.layer(x) * scale

    model = Takes()
    before = [inspect.signature(module.forward) for module in model.modules()]
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        dk.protect_(model, runtime)
        assert [inspect.signature(module.forward) for module in model.modules()] == before
