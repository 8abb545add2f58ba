"""Only parameters are public: whatever else a model multiplies with never leaves the enclave."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

import darknight as dk
from nn.three_ways import compare, fleet_runtime, random, sent_weights

pytestmark = pytest.mark.usefixtures("one_thread")


class Hyper(nn.Module):
    """Makes the weights of its second layer from its input."""

    def __init__(self):
        super().__init__()
        self.maker = nn.Linear(5, 20)

    def forward(self, x):
        made = self.maker(x.mean(0, keepdim=True).expand(2, -1))[0].view(4, 5)
        return F.linear(x, made)


def test_a_computed_weight_is_not_sent():
    x = random(4, 5)
    with fleet_runtime() as runtime:
        model = Hyper()
        report = dk.protect_(model, runtime)
        model(x).square().sum().backward()
        assert sent_weights(runtime) == {"maker"}
    (row,) = [row for row in report.enclave if row.calls]
    assert (row.kind, row.why) == ("linear", "its weight is not a parameter of the model")
    assert row.flops == 2 * 4 * 5 * 4


def test_a_hypernetwork_computes_what_the_plain_one_does():
    def script(model):
        y = model(random(4, 5))
        y.square().sum().backward()
        return [y]

    compare(Hyper, script, tolerance=0.05)


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, 5))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.seen.copy_(x)
        return F.linear(x, self.seen) * self.scale


def test_a_buffer_is_not_sent():
    with fleet_runtime() as runtime:
        model = Buffered()
        dk.protect_(model, runtime)
        model(random(4, 5)).sum().backward()
        assert not sent_weights(runtime)


class Own(nn.Module):
    """F.linear with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return F.linear(x, self.weight)


class Overridden(nn.Linear):
    def forward(self, input):
        return super().forward(input)


MODELS = {
    "a layer": (lambda: nn.Linear(5, 5), "weight"),
    "a layer inside": (lambda: nn.Sequential(nn.Linear(5, 5)), "0.weight"),
    "a functional call": (Own, "weight"),
    "a functional call inside": (lambda: nn.Sequential(Own()), "0.weight"),
    "an overridden layer": (lambda: nn.Sequential(Overridden(5, 5)), "0.weight"),
    "a parametrised layer": (
        lambda: parametrizations.weight_norm(nn.Linear(5, 5)),
        "parametrizations.weight.original1",
    ),
    "a convolution": (lambda: nn.Conv1d(5, 5, 1), "weight"),
}


@pytest.mark.parametrize("name", MODELS)
def test_replacement_weights_made_from_data_are_not_sent(name):
    build, key = MODELS[name]
    model = build()
    shape = dict(model.named_parameters())[key].shape
    x = random(5, 5, 1) if len(shape) == 3 else random(5, 5)
    replaced = {key: x.reshape(shape) * 2}
    expected = functional_call(model, replaced, (x,))
    with fleet_runtime() as runtime:
        report = dk.protect_(model, runtime)
        found = functional_call(model, replaced, (x,))
        assert not sent_weights(runtime)
        assert not any(row.calls for row in report.masked)
        assert any(row.flops for row in report.enclave)
        model(x)  # its own weights are public as before
        assert sent_weights(runtime)
    assert torch.allclose(found, expected)


def test_functional_call_with_the_models_own_parameters_is_masked():
    model = nn.Sequential(nn.Linear(5, 5))
    with fleet_runtime() as runtime:
        report = dk.protect_(model, runtime)
        functional_call(model, dict(model.named_parameters()), (random(4, 5),))
    assert [row.calls for row in report.masked] == [1]


def test_a_weight_that_somebody_put_in_place_of_a_parameter_is_not_sent():
    model = nn.Linear(5, 5)
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
        del model.weight
        model.weight = random(5, 5)
        model(random(4, 5))
        assert not sent_weights(runtime)


class FromData(nn.Module):
    """A parametrisation that mixes data into a weight."""

    def __init__(self):
        super().__init__()
        self.data = torch.zeros(5, 5)

    def forward(self, weight):
        return weight + self.data


def test_a_parametrisation_that_is_not_torchs_own_stays_in_the_enclave():
    model = nn.Linear(5, 5)
    parametrize.register_parametrization(model, "weight", FromData())
    x = random(4, 5)
    with fleet_runtime() as runtime:
        report = dk.protect_(model, runtime)
        model(x)
        assert not sent_weights(runtime)
    assert any("its weight is computed" in row.why and row.calls for row in report.enclave)


def test_torch_func_transforms_stay_in_the_enclave():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Own())
    x = random(4, 5)

    def loss(parameters):
        return functional_call(model, parameters, (x,)).square().sum()

    weights = {name: p.detach() for name, p in model.named_parameters()}
    expected = torch.func.grad(loss)(weights)
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
        found = torch.func.grad(loss)(weights)
        assert not sent_weights(runtime)
    assert all(torch.allclose(found[name], expected[name]) for name in expected)


def test_private_products_are_not_sent():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(5, 5)

        def forward(self, x):
            q = self.query(x)
            return torch.bmm(q, x.transpose(1, 2)) + q @ x.mT + torch.einsum("bid,bjd->bij", q, x)

    with fleet_runtime() as runtime:
        model = Scores()
        report = dk.protect_(model, runtime)
        model(random(3, 4, 5)).sum().backward()
        assert sent_weights(runtime) == {"query"}
    assert {row.kind for row in report.enclave if row.why == "both operands are private"} == {
        "bmm",
        "matmul",
        "einsum",
    }


def test_a_product_with_a_parameter_in_another_form_says_so():
    class Multiplies(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3))

        def forward(self, x):
            return x @ self.weight

    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        model = Multiplies()
        report = dk.protect_(model, runtime)
        model(random(4, 5))
    (row,) = [row for row in report.enclave if row.calls]
    assert "F.linear" in row.why


# --- what somebody could take for a parameter ---------------------------------------------------------------------
PRIVATE = random(4, 5)


class SharesMemory(nn.Module):
    """Scratch memory beside a parameter, in the same storage."""

    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(40)
        self.weight = nn.Parameter(self.memory[:20].view(4, 5))

    def forward(self, x):
        scratch = self.memory[20:].view(4, 5)
        scratch.copy_(PRIVATE)
        beyond = self.weight.as_strided((4, 5), (5, 1), 20)
        return F.linear(x, scratch) + F.linear(x, beyond)


class Landmarks(nn.Module):
    """nn.Parameter does not copy: this one is a part of the private data."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(PRIVATE[:2])

    def forward(self, x):
        return F.linear(x, PRIVATE)


def styled():
    """A layer whose weight is modulated by data, through a property of its class."""

    class Styled(nn.Linear):
        pass

    layer = Styled(5, 4)
    Styled.weight = property(lambda self: self._parameters["weight"] * self.style)
    layer.register_forward_pre_hook(lambda module, args: setattr(module, "style", PRIVATE))
    return layer


def shadowed():
    layer = nn.Linear(5, 4)
    vars(layer)["weight"] = PRIVATE
    return layer


def parametrised(step, weight=None):
    layer = nn.Linear(5, 4)
    if weight is not None:
        del layer.weight
        layer.register_buffer("weight", weight)
    return parametrize.register_parametrization(layer, "weight", step)


class Replaces(nn.Module):
    def forward(self, weight):
        return PRIVATE * 1.0


def hooked(module):
    module.register_forward_hook(lambda *_: PRIVATE * 1.0)
    return module


def normed_and_replaced(norm):
    layer = norm(nn.Linear(5, 4))
    layer.register_forward_pre_hook(lambda module, args: setattr(module, "weight", PRIVATE * 1.0))
    return layer


def hooked_norm():
    layer = parametrizations.weight_norm(nn.Linear(5, 4))
    hooked(layer.parametrizations.weight[0])
    return layer


LOOKALIKES = {
    "memory that a parameter shares": SharesMemory,
    "data that a parameter is a part of": Landmarks,
    "a property": styled,
    "an attribute in front of the parameter": shadowed,
    "a parametrised buffer": lambda: parametrised(nn.Identity(), PRIVATE.clone()),
    "a parametrisation in a container of torch's": lambda: parametrised(nn.Sequential(Replaces())),
    "a parametrisation with a hook": lambda: parametrised(hooked(nn.Identity())),
    "a norm with a hook": hooked_norm,
    "weight_norm and a hook": lambda: normed_and_replaced(torch.nn.utils.weight_norm),
    "spectral_norm and a hook": lambda: normed_and_replaced(torch.nn.utils.spectral_norm),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_looks_like_a_parameter_is_not_sent(name):
    with fleet_runtime() as runtime:
        model = nn.Sequential(LOOKALIKES[name]())
        dk.protect_(model, runtime)
        with torch.no_grad():
            model(random(4, 5))
        assert not sent_weights(runtime)


def test_a_cached_parametrisation_is_not_sent():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)))
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime)
        with parametrize.cached():
            functional_call(model, {"0.parametrizations.weight.original1": PRIVATE * 1.0}, (random(4, 5),))
            model(random(4, 5))
        assert not sent_weights(runtime)


def test_parameters_in_one_storage_are_told_apart():
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    with fleet_runtime() as runtime:
        report = dk.protect_(model, runtime, where=lambda name, module: name != "2")
        model(random(4, 5))
        assert sent_weights(runtime) == {"0"}
    assert [(row.name, row.kind, row.why) for row in report.enclave] == [("2", "Linear", "excluded by where")]
    assert [row.calls for row in report.enclave] == [1]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_weight_that_is_tied_to_a_layer_that_stays_home_stays_home(order):
    """Whoever is called first, alone or through the whole model: the table of an embedding, say."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(5, 5), Own(), nn.Linear(5, 5)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    with fleet_runtime() as runtime:
        model = Tied()
        report = dk.protect_(model, runtime, where=lambda name, module: name != "b")
        for name in order:
            model.get_submodule(name)(random(4, 5))
        model(random(4, 5))
        assert sent_weights(runtime) == {"c"}
    assert any("tied" in row.why for row in report.enclave)


def test_modules_that_came_later_stay_home():
    with fleet_runtime() as runtime:
        model = nn.Sequential(nn.Linear(5, 5))
        dk.protect_(model, runtime)
        model.append(nn.Linear(5, 5))
        model(random(4, 5))
        assert sent_weights(runtime) == {"0"}


class Repointed(nn.Module):
    """A view of a parameter that was pointed at other memory, and goes on naming the parameter as its base."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 5))
        self.how = how

    def forward(self, x):
        view = self.weight.view(4, 5)
        self.how(self, view)
        return F.linear(x, view)


def left_behind(module, view):
    module.weight.data = module.weight.data.clone()
    view.copy_(PRIVATE)


REPOINTED = [
    lambda module, view: setattr(view, "data", PRIVATE * 1.0),
    lambda module, view: view.set_(PRIVATE.clone()),
    left_behind,
]


@pytest.mark.parametrize("how", REPOINTED)
def test_a_view_with_other_memory_is_not_sent(how):
    with fleet_runtime() as runtime, torch.no_grad():
        model = Repointed(how)
        dk.protect_(model, runtime)
        model(random(4, 5))
        assert not sent_weights(runtime)


def replaced_original(shadow):
    layer = parametrizations.weight_norm(nn.Linear(5, 4))
    steps = layer.parametrizations.weight
    if shadow:
        vars(steps)["original1"] = PRIVATE
    else:
        del steps.original1
        steps.original1 = PRIVATE
    return layer


@pytest.mark.parametrize("shadow", [True, False])
def test_an_original_that_is_no_parameter_any_more_is_not_sent(shadow):
    with fleet_runtime() as runtime, torch.no_grad():
        model = nn.Sequential(replaced_original(shadow))
        dk.protect_(model, runtime)
        model(random(4, 5))
        assert not sent_weights(runtime)


def test_a_buffer_of_torchs_own_parametrisation_is_not_sent():
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(5, 5)))
    with fleet_runtime() as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        functional_call(model, {"0.parametrizations.weight.0.base": random(5, 5)}, (random(4, 5),))
        assert not sent_weights(runtime)


def test_a_hook_on_all_modules_keeps_computed_weights_home():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)))
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with fleet_runtime() as runtime, torch.no_grad():
            dk.protect_(model, runtime)
            model(random(4, 5))
            assert not sent_weights(runtime)
    finally:
        hook.remove()


def test_a_tensor_that_only_says_it_is_a_parameter_is_not_sent():
    claims = PRIVATE * 1.0
    claims._is_param = True
    model = nn.Sequential(nn.Linear(5, 4))
    with fleet_runtime() as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        functional_call(model, {"0.weight": claims}, (random(4, 5),))
        assert not sent_weights(runtime)
