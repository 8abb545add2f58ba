"""Batch normalisation in evaluation, as part of the layer before it: the same bits, and never seen half done."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import darknight as dk
from darknight.coding import Finish
from darknight.kernels import compiled_depthwise, compiled_layers
from darknight.models import VGG, MobileNetV1, MobileNetV2, ResNet
from darknight.nn.behind import NOTHING, Sequence
from fleet.threads import thread_fleet
from nn.blocks import Basic, Inverted
from nn.three_ways import SCHEME

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled"),
]


class AffineSpy:
    """How many normalisations were passes of their own, and how many were part of a depthwise convolution."""

    def __init__(self, monkeypatch) -> None:
        self.apart = self.convolved = 0
        affine, convolve = compiled_layers.affine, compiled_depthwise.convolve

        def noted(*arguments):
            self.apart += 1
            return affine(*arguments)

        def convolved(library, x, weight, bias, window, scaling=None, limits=None):
            self.convolved += scaling is not None
            return convolve(library, x, weight, bias, window, scaling, limits)

        monkeypatch.setattr(compiled_layers, "affine", noted)
        monkeypatch.setattr(compiled_depthwise, "convolve", convolved)


def ready(model: nn.Module) -> nn.Module:
    """In evaluation, with statistics and weights of batches that it has seen."""
    generator = torch.Generator().manual_seed(9)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is not None:
            norm.running_mean.normal_(generator=generator)
            norm.running_var.uniform_(0.2, 2.0, generator=generator)
            for each in (norm.weight, norm.bias):
                if each is not None:
                    each.data.normal_(generator=generator)
    return model.eval()


def evaluated(model_of, x, monkeypatch, *, apart=False, fleet=None, use=None):
    """The result without gradients, and how it came about."""
    torch.manual_seed(8)
    model = model_of()
    with monkeypatch.context() as patch, dk.Runtime(SCHEME, fleet) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        spy = AffineSpy(patch)
        if apart:
            patch.setattr(Sequence, "behind", lambda *_: NOTHING)
        return (use or type(model).__call__)(model, x), spy


def assert_joined(model_of, x, monkeypatch, apart: int, convolved: int, before: int) -> None:
    """So many normalisations are left, so many part of a depthwise layer; `before` were left of the passes apart."""
    found, spy = evaluated(model_of, x, monkeypatch)
    expected, passes = evaluated(model_of, x, monkeypatch, apart=True)
    assert torch.equal(found, expected)
    assert (spy.apart, spy.convolved) == (apart, convolved)
    assert (passes.apart, passes.convolved) == (before, 0)
    with thread_fleet(SCHEME) as fleet:
        assert torch.equal(evaluated(model_of, x, monkeypatch, fleet=fleet)[0], expected)


NETWORKS = {
    "vgg": (lambda: VGG((3, 12, 16), 5, stages=((4, 6), (8,)), batch_norm=True, wide_head=False), 0, 0, 3),
    # Its loop over stages is not read: the stem is finished by a normalisation of itself, as a block's last one is.
    "resnet": (lambda: ResNet((3, 12, 16), 5, blocks=(1, 1), width=4, small_images=True), 3, 0, 6),
    # Where images are small, torch convolves.
    "mobilenet 1": (lambda: MobileNetV1((3, 40, 48), 5), 10, 3, 27),
    "mobilenet 2": (
        lambda: MobileNetV2((3, 40, 48), 5, stages=((1, 4, 1, 1), (2, 4, 2, 1)), stem=4, last=8),
        3,
        3,
        10,
    ),
}


@pytest.mark.parametrize(("model_of", "apart", "convolved", "before"), NETWORKS.values(), ids=NETWORKS)
def test_networks_in_evaluation_have_few_passes(model_of, apart, convolved, before, monkeypatch):
    size = (12, 16) if before < 10 else (40, 48)
    assert_joined(lambda: ready(model_of()), torch.randn(4, 3, *size), monkeypatch, apart, convolved, before)


class Written(nn.Module):
    """As people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)
        self.deep, self.second = nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return F.relu6(self.second(self.deep(x)))


LAYERS = {
    "with a bias": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), 0, 0, 1),
    "nothing behind it": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3, bias=False), nn.BatchNorm2d(4)), 0, 0, 1),
    "without weights": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, eps=0.1, affine=False)), 0, 0, 1),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU6()), 0, 0, 1),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6)), 0, 1, 1),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv2d(6, 4, 3)), nn.Sequential(nn.BatchNorm2d(4)), nn.ReLU()),
        1,
        0,
        1,
    ),
    "twice": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.ReLU()), 1, 0, 2),
    "a forward": (Written, 0, 1, 2),
    "a shortcut": (Basic, 1, 0, 2),
    "a shortcut that is convolved": (lambda: Basic(6, 8, 2), 1, 0, 3),
    "inverted": (Inverted, 1, 0, 2),
}


@pytest.mark.parametrize(("model_of", "apart", "convolved", "before"), LAYERS.values(), ids=LAYERS)
def test_a_normalisation_is_part_of_the_layer_before_it(model_of, apart, convolved, before, monkeypatch):
    assert_joined(lambda: ready(model_of()), torch.randn(5, 6, 19, 17), monkeypatch, apart, convolved, before)


def test_of_features_without_positions(monkeypatch):
    model_of = lambda: ready(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.ReLU()))  # noqa: E731
    assert_joined(model_of, torch.randn(6, 7), monkeypatch, 0, 0, 1)
    one_axis = lambda: ready(nn.Sequential(nn.Conv1d(7, 5, 3), nn.BatchNorm1d(5)))  # noqa: E731
    assert_joined(one_axis, torch.randn(6, 7, 9), monkeypatch, 0, 0, 1)
    # Of a sequence, the normalisation takes its places for the channels.
    places = lambda: ready(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)))  # noqa: E731
    assert_joined(places, torch.randn(6, 5, 7), monkeypatch, 1, 0, 1)


@pytest.mark.parametrize("groups", [1, 4], ids=["masked", "depthwise"])
def test_statistics_and_weights_that_change_are_seen(groups, monkeypatch):
    x = torch.randn(3, 4, 9, 9)

    def use(model, x):
        found = [model(x)]
        model[1].running_mean.add_(1.0)
        found.append(model(x))
        model[1].weight.data = model[1].weight.data * 2
        found.append(model(x))
        state = {name: each + 0.5 for name, each in model.state_dict().items() if each.is_floating_point()}
        model.load_state_dict(state, strict=False)
        return torch.cat([*found, model(x)])

    model_of = lambda: ready(nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.BatchNorm2d(4)))  # noqa: E731
    found, spy = evaluated(model_of, x, monkeypatch, use=use)
    assert spy.apart == 0
    assert torch.equal(found, evaluated(model_of, x, monkeypatch, apart=True, use=use)[0])
    assert len({float(each.sum()) for each in found.split(3)}) == 4


# --- where somebody could see it --------------------------------------------------------------------------------------
class Look(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.batch_norm:
            SEEN.append(args[0].clone())
        return func(*args, **(kwargs or {}))


class LookBelow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


SEEN: list[torch.Tensor] = []


def look(module, given, result=None) -> None:
    SEEN.append((given[0] if result is None else result).clone())


def looking(model) -> None:
    norm = model[1]
    check = norm._check_input_dim

    def patched(y) -> None:
        SEEN.append(y.clone())
        check(y)

    norm._check_input_dim = patched


class Own(nn.BatchNorm2d):
    def forward(self, y):
        SEEN.append(y.clone())
        return super().forward(y)


def with_hooks(change):
    def use(model, x):
        change(model)
        return model(x)

    return use


def under(mode):
    def use(model, x):
        with mode:
            return model(x)

    return use


OBSERVED = {
    "a hook on the layer": with_hooks(lambda model: model[0].register_forward_hook(look)),
    "a hook before the normalisation": with_hooks(lambda model: model[1].register_forward_pre_hook(look)),
    "its check of axes": with_hooks(looking),
    "another normalisation": with_hooks(lambda model: setattr(model[1], "__class__", Own)),
}


@pytest.mark.parametrize("groups", [1, 4], ids=["masked", "depthwise"])
@pytest.mark.parametrize("use", OBSERVED.values(), ids=OBSERVED)
def test_whoever_looks_sees_what_the_layer_gave(use, groups, monkeypatch):
    SEEN.clear()
    x = torch.randn(3, 4, 9, 9)
    model_of = lambda: ready(nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.BatchNorm2d(4), nn.ReLU()))  # noqa: E731
    found, _ = evaluated(model_of, x, monkeypatch, use=use)
    raw = evaluated(model_of, x, monkeypatch, use=lambda model, x: model[0](x))[0]
    assert len(SEEN) == 1
    assert torch.equal(SEEN[0], raw)
    assert torch.equal(found, evaluated(model_of, x, monkeypatch, apart=True)[0])


class Entered(nn.Module):
    def __init__(self, inner) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with Look():
            return self.inner(x)


@pytest.mark.parametrize("groups", [1, 4], ids=["masked", "depthwise"])
def test_a_mode_sees_what_the_layer_gave(groups, monkeypatch):
    SEEN.clear()
    x = torch.randn(3, 4, 9, 9)
    model_of = lambda: ready(nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.BatchNorm2d(4), nn.ReLU()))  # noqa: E731
    found, _ = evaluated(lambda: Entered(model_of()), x, monkeypatch)
    assert torch.equal(SEEN[0], evaluated(model_of, x, monkeypatch, use=lambda model, x: model[0](x))[0])
    assert torch.equal(found, evaluated(model_of, x, monkeypatch, apart=True)[0])


@pytest.mark.parametrize("groups", [1, 4], ids=["masked", "depthwise"])
def test_a_hook_behind_the_normalisation_sees_what_that_gave(groups, monkeypatch):
    SEEN.clear()
    x = torch.randn(3, 4, 9, 9)
    model_of = lambda: ready(nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.BatchNorm2d(4), nn.ReLU()))  # noqa: E731
    use = with_hooks(lambda model: model[1].register_forward_hook(look))
    found, spy = evaluated(model_of, x, monkeypatch, use=use)
    assert spy.apart == 0
    assert SEEN[0].min() < 0
    assert torch.equal(SEEN[0].relu(), found)


APART = {
    "in training": lambda model: model.train(),
    "statistics of the batch": lambda model: model[1].__init__(4, track_running_stats=False),
    "doubles": lambda model: model.double(),
    "statistics in doubles": lambda model: setattr(model[1], "running_mean", model[1].running_mean.double()),
}


@pytest.mark.parametrize("groups", [1, 4], ids=["masked", "depthwise"])
@pytest.mark.parametrize("change", APART.values(), ids=APART)
def test_what_is_not_the_same_for_every_batch_or_in_another_dtype_is_as_before(change, groups, monkeypatch):
    def model_of():
        model = ready(nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.BatchNorm2d(4), nn.ReLU()))
        change(model)
        return model

    x = torch.randn(3, 4, 9, 9).to(next(model_of().parameters()).dtype)
    found = []
    for apart in (False, True):
        try:
            found.append(evaluated(model_of, x, monkeypatch, apart=apart)[0])
        except RuntimeError as error:  # torch's own, in its words
            found.append(str(error))
    assert found[0] == found[1] if isinstance(found[0], str) else torch.equal(*found)


@pytest.mark.parametrize("groups", [1, 4], ids=["masked", "depthwise"])
@pytest.mark.parametrize("needs", ["input", "0.weight", "1.weight", "1.bias"])
def test_where_a_gradient_comes_back_nothing_is_joined(groups, needs, monkeypatch):
    x = torch.randn(3, 4, 9, 9)
    grads = []
    for apart in (False, True):
        model = ready(nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.BatchNorm2d(4), nn.ReLU()))
        torch.manual_seed(3)
        model[0].reset_parameters()
        leaves = {"input": x.clone(), **dict(model.named_parameters())}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name == needs)
        with monkeypatch.context() as patch, dk.Runtime(SCHEME, None) as runtime:
            dk.protect_(model, runtime)
            spy = AffineSpy(patch)
            if apart:
                patch.setattr(Sequence, "behind", lambda *_: NOTHING)
            model(leaves["input"]).square().sum().backward()
        assert spy.convolved == 0
        grads.append(leaves[needs].grad)
    assert torch.equal(*grads)
    assert grads[0].any()


def test_other_layouts_and_autocast_are_as_before(monkeypatch):
    model_of = lambda: ready(nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))  # noqa: E731
    x = torch.randn(3, 6, 9, 9)
    last = x.contiguous(memory_format=torch.channels_last)
    for given, use in ((last, None), (x, under(torch.autocast("cpu", dtype=torch.bfloat16))), (x, under(LookBelow()))):
        found = [evaluated(model_of, given, monkeypatch, apart=apart, use=use)[0] for apart in (False, True)]
        assert found[0].dtype == found[1].dtype
        assert found[0].stride() == found[1].stride()
        assert torch.equal(*found)


@pytest.mark.parametrize("groups", [1, 4], ids=["masked", "depthwise"])
def test_what_torch_refuses_is_refused_in_its_words(groups, monkeypatch):
    x = torch.randn(3, 4, 9, 9)
    for norm, words in ((nn.BatchNorm2d(5), "running_mean should contain"), (nn.BatchNorm1d(4), "expected 2D or 3D")):
        model_of = lambda: ready(nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), norm))  # noqa: B023, E731
        with pytest.raises((RuntimeError, ValueError), match=words):
            evaluated(model_of, x, monkeypatch)


def test_without_kernels_it_is_torchs(monkeypatch):
    model_of = lambda: ready(nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))  # noqa: E731
    x = torch.randn(3, 6, 9, 9)
    ours, _ = evaluated(model_of, x, monkeypatch)
    monkeypatch.setattr(compiled_layers, "chosen", lambda: None)
    torch.testing.assert_close(evaluated(model_of, x, monkeypatch)[0], ours, rtol=1e-4, atol=1e-5)


def test_what_finishes_a_product_is_the_same_without_a_kernel(monkeypatch):
    torch.manual_seed(2)
    by = compiled_layers.Affine(torch.randn(4), torch.randn(4))
    finish = Finish(channel=1, bias=torch.randn(4), scaling=by, limits=(0.0, 6.0))
    y = torch.randn(3, 4, 5, 2)
    ours = finish.applied(y.clone())
    monkeypatch.setattr(compiled_layers, "chosen", lambda: None)
    assert torch.equal(finish.applied(y.clone()), ours)
    raw = y + finish.bias.view(-1, 1, 1)
    assert torch.equal(ours, (raw * by.scale.view(-1, 1, 1) + by.shift.view(-1, 1, 1)).clamp(0.0, 6.0))
