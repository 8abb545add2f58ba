"""Every kind of layer, in every shape that torch.nn allows, against the plain model."""

import warnings
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import darknight as dk
from darknight.errors import PrivacyWarning
from nn.three_ways import compare, everything, random

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel"),
]

MASKED = {
    "linear": (lambda: nn.Linear(5, 7), (4, 5)),
    "linear without bias": (lambda: nn.Linear(5, 7, bias=False), (3, 5)),
    "linear on sequences": (lambda: nn.Linear(5, 7), (3, 4, 5)),
    "linear on 4-D": (lambda: nn.Linear(5, 7), (3, 2, 2, 5)),
    "linear unbatched": (lambda: nn.Linear(5, 7), (5,)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2), (3, 2, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), padding=(1, 0)), (3, 2, 6, 5)),
    "conv2d unbatched": (lambda: nn.Conv2d(2, 4, 3), (2, 6, 5)),
    "conv2d same": (lambda: nn.Conv2d(2, 4, 4, padding="same"), (3, 2, 6, 5)),
    "conv2d valid": (lambda: nn.Conv2d(2, 4, 3, padding="valid"), (3, 2, 6, 5)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (3, 4, 6, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (3, 4, 6, 5)),
    "conv2d dilation": (lambda: nn.Conv2d(2, 4, 3, dilation=2), (3, 2, 7, 8)),
    "conv2d circular": (lambda: nn.Conv2d(2, 4, 3, padding=2, padding_mode="circular"), (3, 2, 6, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="reflect"), (3, 2, 6, 5)),
    "conv2d replicate": (lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="replicate"), (3, 2, 6, 5)),
    "conv2d same, reflect": (lambda: nn.Conv2d(2, 4, 2, padding="same", padding_mode="reflect"), (3, 2, 6, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (3, 2, 4, 3, 5)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(2, 4, 3, stride=2), (3, 2, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (3, 4, 4, 5)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (2, 2, 3, 3, 4)),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(5, 7)), (4, 5)),
    "weight_norm conv": (lambda: parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), (3, 2, 6, 5)),
}


def forward_and_backward(shape):
    def script(model):
        x = random(*shape).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        return [y, x.grad]

    return script


@pytest.mark.parametrize("case", MASKED)
def test_a_masked_layer(case):
    build, shape = MASKED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        report = compare(build, forward_and_backward(shape), where=everything)
    assert sum(row.calls for row in report.masked) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "computed",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.4),
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ],
    ids=["older weight_norm", "older spectral_norm", "pruned", "spectral_norm", "orthogonal"],
)
def test_weights_that_hooks_or_buffers_take_part_in_stay_in_the_enclave(computed):
    """Whose hook came last cannot be known, nor who wrote into a buffer: either may have seen data."""
    report = compare(lambda: computed(nn.Linear(5, 7)), forward_and_backward((4, 5)))
    assert not any(row.calls for row in report.masked)
    assert any("its weight is computed" in row.why for row in report.enclave)


@pytest.mark.parametrize("shape", [(3, 2, 4, 5), (2, 4, 5)])
def test_a_transposed_convolution_told_its_output_size(shape):
    def script(model):
        y = model(random(*shape), output_size=[8, 10])
        y.square().sum().backward()
        return [y, model(random(*shape), output_size=(7, 9))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        compare(lambda: nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), script)


def test_arguments_by_name():
    compare(lambda: nn.Linear(5, 3), lambda model: [model(input=random(4, 5))])


# --- functional calls in modules of one's own -----------------------------------------------------------------------
class Calls(nn.Module):
    """Calls `function(x, weight)` with a parameter of its own."""

    def __init__(self, function, *shape, bias=False):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(*shape))
        self.offset = nn.Parameter(torch.randn(shape[0])) if bias else None
        self.function = function

    def forward(self, x):
        return self.function(x, self.matrix, self.offset)


FUNCTIONS = {
    "linear": (F.linear, (6, 5), (4, 5)),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, 2, 1), (3, 2, 3), (4, 2, 7)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding="same"), (3, 2, 3, 3), (4, 2, 5, 6)),
    "conv2d lists": (lambda x, w, b: F.conv2d(x, w, b, stride=[2, 1], padding=[1, 0]), (3, 2, 3, 3), (4, 2, 5, 6)),
    "conv2d by name": (lambda x, w, b: F.conv2d(input=x, weight=w, bias=b, groups=2), (4, 1, 3, 3), (4, 2, 5, 6)),
    "conv3d": (F.conv3d, (3, 2, 2, 2, 2), (2, 2, 3, 4, 3)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functional_call_with_a_parameter_is_masked(name, bias):
    function, w_shape, x_shape = FUNCTIONS[name]
    report = compare(lambda: Calls(function, *w_shape, bias=bias), forward_and_backward(x_shape), where=everything)
    assert [(row.name, row.calls) for row in report.masked] == [("matrix", 1)]


def test_a_transposed_functional_call_is_masked():
    def function(x, w, b):
        return F.conv_transpose2d(x, w, b, stride=2, output_padding=1)

    report = compare(lambda: Calls(function, 2, 3, 3, 3), forward_and_backward((4, 2, 4, 5)))
    assert [(row.name, row.calls) for row in report.masked] == [("matrix", 1)]


@pytest.mark.parametrize("view", [lambda w: w[2:4], lambda w: w.t(), lambda w: w.view(5, 6).t()])
def test_a_view_of_a_parameter_is_masked(view):
    width = view(torch.empty(6, 5)).shape[1]
    report = compare(lambda: Calls(lambda x, w, b: F.linear(x, view(w)), 6, 5), forward_and_backward((4, width)))
    assert sum(row.calls for row in report.masked) == 1


def test_a_linear_call_with_a_vector_stays_in_the_enclave():
    report = compare(lambda: Calls(F.linear, 5), forward_and_backward((4, 5)))
    assert not any(row.calls for row in report.masked)
    assert [row.calls for row in report.enclave if row.kind == "linear"] == [1]


class Halved(nn.Linear):
    def forward(self, input):
        return super().forward(input) / 2


class Standardised(nn.Conv2d):
    """Weight standardisation, as it is usually written."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean(), bias)


def test_a_subclass_of_linear_that_overrides_forward_is_masked():
    report = compare(lambda: nn.Sequential(Halved(5, 7)), forward_and_backward((4, 5)))
    assert [(row.name, row.calls) for row in report.masked] == [("0", 1)]


def test_a_subclass_that_changes_its_weight_stays_in_the_enclave():
    report = compare(lambda: nn.Sequential(Standardised(2, 4, 3)), forward_and_backward((4, 2, 5, 5)))
    assert not any(row.calls for row in report.masked)
    assert any("not a parameter" in row.why and row.calls for row in report.enclave)


# --- attention and recurrence ---------------------------------------------------------------------------------------
def attention(**settings):
    return nn.MultiheadAttention(6, 2, **{"batch_first": True, **settings})


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("settings", [{}, {"batch_first": False}, {"bias": False}, {"add_bias_kv": True}])
def test_self_attention(settings, need_weights):
    def script(model):
        x = random(3, 4, 6).requires_grad_()
        y, weights = model(x, x, x, need_weights=need_weights)
        y.square().sum().backward()
        return [y, weights, x.grad]

    report = compare(lambda: attention(**settings), script)
    assert sum(row.calls for row in report.masked) >= 2  # in and out


def test_cross_attention_with_other_widths():
    def script(model):
        y, _ = model(random(3, 4, 6), random(3, 5, 3, seed=1), random(3, 5, 2, seed=2))
        y.square().sum().backward()
        return [y]

    report = compare(lambda: attention(kdim=3, vdim=2), script)
    assert sum(row.calls for row in report.masked) == 4


def test_cross_attention_with_packed_projections():
    def script(model):
        memory = random(3, 5, 6, seed=1)
        y, _ = model(random(3, 4, 6), memory, memory, key_padding_mask=torch.arange(5).expand(3, 5) > 3)
        y.square().sum().backward()
        return [y]

    report = compare(attention, script)
    assert sum(row.calls for row in report.masked) == 3


def encoder_layer(**settings):
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, **settings)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_transformer_encoder_layer_in_training(norm_first):
    report = compare(lambda: encoder_layer(norm_first=norm_first), forward_and_backward((3, 4, 6)), tolerance=0.05)
    assert sum(row.calls for row in report.masked) == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_fast_path_of_a_transformer_does_not_get_past_us(mode):
    def script(model):
        with mode():
            return [model.eval()(random(3, 4, 6))]

    report = compare(encoder_layer, script)
    assert sum(row.calls for row in report.masked) == 4


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_encoder_with_padding_in_eval():
    mask = torch.tensor([[False] * 4, [False, False, True, True]])

    def script(model):
        with torch.no_grad():
            y = model.eval()(random(2, 4, 6), src_key_padding_mask=mask)
        return [y[~mask]]

    report = compare(lambda: nn.TransformerEncoder(encoder_layer(), 2), script, tolerance=0.05)
    assert sum(row.calls for row in report.masked) == 8


def test_a_whole_transformer():
    def script(model):
        y = model(random(3, 4, 6), random(3, 2, 6, seed=2))
        y.square().sum().backward()
        return [y]

    report = compare(lambda: nn.Transformer(6, 2, 1, 1, 8, dropout=0.0, batch_first=True), script, tolerance=0.1)
    assert all(row.name for row in report.masked)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_stays_in_the_enclave_and_is_listed(kind):
    def build():
        return nn.ModuleDict({"rnn": kind(5, 4, num_layers=2, bidirectional=True), "head": nn.Linear(8, 3)})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = build()

        def forward(self, x):
            return self.parts["head"](self.parts["rnn"](x)[0])

    report = compare(Model, forward_and_backward((3, 2, 5)))
    (row,) = [row for row in report.enclave if row.name == "parts.rnn" and row.kind == kind.__name__]
    assert "fused" in row.why
    assert [row.name for row in report.masked] == ["parts.head"]


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_recurrent_cell_stays_in_the_enclave_and_is_listed(kind):
    def script(model):
        found = model(random(3, 5))
        (found[0] if isinstance(found, tuple) else found).sum().backward()
        return []

    report = compare(lambda: kind(5, 4), script)
    assert not report.masked
    assert "fused" in report.enclave[0].why


def test_a_scripted_child_stays_in_the_enclave_and_is_listed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Sequential(nn.Linear(5, 5), nn.ReLU()))
    model = nn.Sequential(scripted, nn.Linear(5, 3))
    x = random(4, 5)
    expected = model(x)
    with dk.Runtime(dk.Scheme(inputs=2, colluders=1), None) as runtime:
        report = dk.protect_(model, runtime)
        assert (model(x) - expected).norm() <= 0.02 * expected.norm()
        dk.unprotect_(model)
    assert [(row.name, row.why) for row in report.enclave] == [("0", "scripted: what it computes cannot be seen")]
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("shape", [(3, 1), (1, 4), (3, 4)])
def test_a_bias_of_another_shape_is_added_as_torch_does(shape):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 5))
            self.bias = nn.Parameter(torch.randn(shape))

        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    compare(Biased, forward_and_backward((3, 5)))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_outputs():
    def script(model):
        y = model(random(4, 5))
        y.sum().backward()
        return [y]

    compare(lambda: nn.Linear(5, 0), script)


def test_another_way_to_compute_a_convolution_on_its_instance_is_respected():
    """As people make images tile: _conv_forward of the instance, before or after protecting."""

    def tiled(self, input, weight, bias):
        return F.conv2d(F.pad(input, (1, 1, 1, 1), mode="circular"), weight, bias)

    def build():
        layer = nn.Conv2d(2, 3, 3)
        layer._conv_forward = MethodType(tiled, layer)
        return layer

    report = compare(build, forward_and_backward((4, 2, 6, 5)))
    assert [(row.kind, row.calls) for row in report.masked] == [("conv2d", 1)]  # the inner call, seen and masked

    def late(model):
        model._conv_forward = MethodType(tiled, model)
        return [model(random(4, 2, 6, 5))]

    compare(lambda: nn.Conv2d(2, 3, 3), late)
