"""A protected layer and what stands behind it, in one pass: the same results, and never seen half done."""

import threading
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import darknight as dk
from darknight.errors import ProtectError
from darknight.kernels import compiled_layers
from darknight.models import VGG, MobileNetV2, ResNet
from darknight.nn import function, pooling, staying
from darknight.nn.behind import Behind, Sequence
from darknight.nn.staying import Staying
from nn.three_ways import SCHEME, everything

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled"),
]


class Spy:
    """What products were finished with, which of them were told of their gradients, and which activations were left."""

    def __init__(self, monkeypatch) -> None:
        self.finished: list[object] = []
        self.told: list[bool] = []
        self.cut = 0
        real, told, cut = function.Finish, Behind.told, staying._Cut

        def finish(**arguments):
            self.finished.append(arguments["limits"])
            return real(**arguments)

        def asked(behind, grad):
            found = told(behind, grad)
            self.told.append(found is not None)
            return found

        class Cut:
            @staticmethod
            def apply(*arguments):
                self.cut += 1
                return cut.apply(*arguments)

        monkeypatch.setattr(function, "Finish", finish)
        monkeypatch.setattr(Behind, "told", asked)
        monkeypatch.setattr(staying, "_Cut", Cut)


class NormSpy:
    """What normalisations were finished with, and how many activations were left to be cut behind them."""

    def __init__(self, monkeypatch) -> None:
        self.finished: list[object] = []
        self.stopped: list[object] = []
        self.clipped = 0
        normalise, derive, clipped = compiled_layers.normalise, compiled_layers.derive, staying._Clipped

        def noted(*arguments):
            self.finished.append(arguments[7] if len(arguments) > 7 else None)
            return normalise(*arguments)

        class Clipped:
            @staticmethod
            def apply(*arguments):
                self.clipped += 1
                return clipped.apply(*arguments)

        def derived(*arguments):
            self.stopped.append(arguments[4])
            return derive(*arguments)

        monkeypatch.setattr(compiled_layers, "normalise", noted)
        monkeypatch.setattr(compiled_layers, "derive", derived)
        monkeypatch.setattr(staying, "_Clipped", Clipped)


RELU, RELU6 = (0.0, inf), (0.0, 6.0)


def gradients(model_of, x, *, kernels=True, scheme=SCHEME, monkeypatch, use=None):
    """The result and the gradients of one step of a protected model; without kernels it is torch's, in many passes."""
    torch.manual_seed(8)
    model = model_of()
    x = x.clone().requires_grad_()
    with monkeypatch.context() as patch, dk.Runtime(scheme, None) as runtime:
        if not kernels:
            patch.setattr(compiled_layers, "chosen", lambda: None)
        dk.protect_(model, runtime, where=everything)
        results = [(use or type(model).__call__)(model, x) for _ in range(2)]
        for result in results:
            result.square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"result": results[-1].detach(), "input": x.grad, **grads}


def assert_same(ours, torchs) -> None:
    """Bit for bit; the sums that are gradients of biases, and what further steps make of them, within rounding."""
    assert list(ours) == list(torchs)
    for name, value in ours.items():
        if name.endswith("bias"):
            torch.testing.assert_close(value, torchs[name], rtol=1e-5, atol=1e-5 * float(torchs[name].abs().max()))
        else:
            assert torch.equal(value, torchs[name]), name


def small_vgg() -> nn.Module:
    return VGG((3, 12, 16), 5, stages=((4, 6), (8,)), wide_head=False)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 9), nn.ReLU(inplace=True), nn.Linear(9, 6), nn.ReLU6(inplace=True), nn.Linear(6, 3)
    )


SEQUENCES = {
    "vgg": (small_vgg, (4, 3, 12, 16), [RELU, RELU, RELU, None]),
    "perceptron": (perceptron, (6, 7), [RELU, RELU6, None]),
    "perceptron of sequences": (perceptron, (3, 5, 7), [RELU, RELU6, None]),
    "no bias": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Hardtanh(-1.0, 2.0, inplace=True)),
        (4, 3, 5, 6),
        [(-1.0, 2.0)],
    ),
    "one axis": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(inplace=True)), (4, 3, 9), [RELU]),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.ReLU(inplace=True)), (4, 3, 5, 6), [RELU]),
    "a hook behind": (lambda: hooked(1, "forward_hook"), (4, 3, 5, 6), [RELU]),
}


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))


def hooked(place: int, kind: str) -> nn.Module:
    """A sequence in which somebody looks at what goes into a module or comes out."""
    model = sequence()
    getattr(model[place], f"register_{kind}")(lambda module, *given: given[0][0].sum() and None)
    return model


@pytest.mark.parametrize(("model_of", "shape", "limits"), SEQUENCES.values(), ids=SEQUENCES)
def test_a_layer_in_a_sequence_is_finished_with_its_activation(model_of, shape, limits, monkeypatch):
    spy = Spy(monkeypatch)
    x = torch.randn(shape)
    ours = gradients(model_of, x, monkeypatch=monkeypatch)
    assert spy.finished == limits * 2
    assert_same(ours, gradients(model_of, x, kernels=False, monkeypatch=monkeypatch))


class Written(nn.Module):
    """The same in the words of its author: nobody knows beforehand what comes next."""

    def __init__(self, use) -> None:
        super().__init__()
        self.conv, self.relu, self.use = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), use

    def forward(self, x):
        return self.use(self, x)


def twice(model, x):
    raw = model.conv(x)
    return (raw * 2).sum() + model.relu(raw).sum()


def kept(model, x):
    raw = model.conv(x)
    cut = model.relu(raw)
    return raw.sum() + cut.square().sum()


def apart(model, x):
    raw = model.conv(x)
    return torch.relu(raw) - raw


def shared(model, x):
    first = model.relu(model.conv(x))
    return model.relu(model.conv(first[:, :3])) * 3


@torch.jit.script
def scripted_sum(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


def unseen(model, x):
    raw = model.conv(x)
    total = scripted_sum(raw)  # no function mode sees a script
    return model.relu(raw).sum() + total


WRITTEN = {
    "in place": (lambda model, x: model.relu(model.conv(x)), 1),
    "functional": (lambda model, x: F.relu(model.conv(x), inplace=True), 1),
    "torch.relu_": (lambda model, x: torch.relu_(model.conv(x)), 1),
    "used twice": (twice, 0),
    "kept": (kept, 1),
    "not in place": (apart, 0),
    "one layer, two calls": (shared, 2),
    "a script looks": (unseen, 1),
    "recomputed": (lambda model, x: checkpoint(lambda x: model.relu(model.conv(x)), x, use_reentrant=False), 1),
}


@pytest.mark.parametrize(("use", "cut"), WRITTEN.values(), ids=WRITTEN)
def test_elsewhere_an_activation_in_place_tells_its_layer_of_the_gradient(use, cut, monkeypatch):
    spy = Spy(monkeypatch)
    x = torch.randn(4, 3, 7, 6)
    ours = gradients(lambda: Written(use), x, monkeypatch=monkeypatch)
    assert set(spy.finished) == {None}
    assert spy.cut == 2 * cut
    assert_same(ours, gradients(lambda: Written(use), x, kernels=False, monkeypatch=monkeypatch))


def test_the_layer_is_told_of_this_gradient_and_of_no_other(monkeypatch):
    spy = Spy(monkeypatch)
    x = torch.randn(4, 3, 7, 6)
    gradients(lambda: Written(WRITTEN["in place"][0]), x, monkeypatch=monkeypatch)
    assert spy.told == [True, True]
    spy.told.clear()
    gradients(lambda: Written(unseen), x, monkeypatch=monkeypatch)  # to which that of the script was added
    assert spy.told == [False, False]

    behind, found = Behind(), compiled_layers.Returned(torch.ones(2, 3), 1.0)
    grad = behind.tell(found)
    assert behind.told(torch.ones(2, 3)) is None
    behind.tell(found)
    assert behind.told(grad.mul_(2)) is None
    behind.tell(found)
    assert behind.told(grad) is found
    assert behind.told(grad) is None


class Reads(TorchFunctionMode):
    """Looks at whatever goes into a function."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        for each in args:
            if isinstance(each, torch.Tensor) and each.dim() == 4:
                each.sum()
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class InMode(nn.Module):
    def __init__(self, mode) -> None:
        super().__init__()
        self.inner, self.mode = sequence(), mode

    def forward(self, x):
        with self.mode():
            return self.inner(x)


class Calls(nn.Conv2d):
    """A convolution that looks at its result when it is called."""

    def __call__(self, x):
        y = super().__call__(x)
        self.seen = y.detach().clone()
        return y


class OwnReLU(nn.ReLU):
    def forward(self, x):
        return super().forward(x + 1)


def patched() -> nn.Module:
    model = sequence()
    model[1].forward = lambda x: x.square()
    return model


def children_alone(model, x):
    return model[1](model[0](x))


def a_slice(model, x):
    return model[:1](x)


SEEN = {
    "a hook on the layer": (lambda: hooked(0, "forward_hook"), None),
    "a hook before the activation": (lambda: hooked(1, "forward_pre_hook"), None),
    "a hook before the layer": (lambda: hooked(0, "forward_pre_hook"), None),
    "not in place": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), None),
    "another activation": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), OwnReLU(inplace=True)), None),
    "another forward": (patched, None),
    "a call of its own": (lambda: nn.Sequential(Calls(3, 4, 3), nn.ReLU(inplace=True)), None),
    "nothing behind": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), None),
    "something between": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU(inplace=True)),
        None,
    ),
    "the layer by itself": (sequence, children_alone),
    "a slice": (sequence, a_slice),
    "a mode that looks": (lambda: InMode(Reads), None),
    "a mode below": (lambda: InMode(Dispatched), None),
    "a disabled mode": (lambda: InMode(torch._C.DisableTorchFunction), None),
    "segments": (sequence, lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False)),
}


@pytest.mark.parametrize(("model_of", "use"), SEEN.values(), ids=SEEN)
def test_where_somebody_may_look_the_layer_gives_its_own_result(model_of, use, monkeypatch):
    spy = Spy(monkeypatch)
    x = torch.randn(4, 3, 5, 6)
    ours = gradients(model_of, x, monkeypatch=monkeypatch, use=use)
    assert set(spy.finished) == {None}
    assert_same(ours, gradients(model_of, x, kernels=False, monkeypatch=monkeypatch, use=use))


def test_a_hook_sees_what_the_layer_gave_from_the_call_on_in_which_it_is_there(monkeypatch):
    spy, seen = Spy(monkeypatch), []
    model, x = sequence(), torch.randn(4, 3, 5, 6)
    with dk.Runtime(SCHEME, None) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        raw = model[0](x)
        model(x)
        hook = model[0].register_forward_hook(lambda module, given, result: seen.append(result.clone()))
        model(x)
        hook.remove()
        everywhere = nn.modules.module.register_module_forward_hook(
            lambda module, given, result: seen.append(result.clone()) if module is model[0] else None
        )
        model(x)
        everywhere.remove()
        model(x)
    assert spy.finished == [None, RELU, None, None, RELU]
    assert len(seen) == 2
    assert all(torch.equal(each, raw) for each in seen)
    assert (raw < 0).any()


def test_a_recomputed_sequence_is_finished_both_times(monkeypatch):
    spy = Spy(monkeypatch)
    x = torch.randn(4, 3, 7, 6)
    whole = lambda model, x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    ours = gradients(sequence, x, monkeypatch=monkeypatch, use=whole)
    assert spy.finished == [RELU] * 4
    assert_same(ours, gradients(sequence, x, monkeypatch=monkeypatch))


def test_other_types_layouts_and_single_examples_give_what_they_did(monkeypatch):
    spy = Spy(monkeypatch)

    def results(x, kernels, convert=lambda model: model):
        return gradients(lambda: convert(sequence()), x, kernels=kernels, monkeypatch=monkeypatch)

    x = torch.randn(4, 3, 5, 6)
    wide = [results(x.double(), kernels, lambda model: model.double()) for kernels in (True, False)]
    single = [results(x[0], kernels) for kernels in (True, False)]
    assert set(spy.finished) == {None}
    last = [results(x.to(memory_format=torch.channels_last), kernels) for kernels in (True, False)]
    for ours, torchs in (wide, single, last):
        assert_same(ours, torchs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = [results(x, kernels) for kernels in (True, False)]
    assert narrow[0]["result"].dtype == torch.bfloat16
    assert_same(*narrow)


POOLINGS = {
    "halves": lambda: nn.MaxPool2d(2),
    "overlaps": lambda: nn.MaxPool2d(3, stride=2, padding=1),
    "not square": lambda: nn.MaxPool2d((1, 3), stride=(2, 1)),
}


def pooled_by(pool, hook=None) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), pool(), nn.Conv2d(4, 2, 1))
    if hook is not None:
        hook(model)
    return model


class PoolSpy:
    """How many poolings were functions of themselves, and what was pooled."""

    def __init__(self, monkeypatch) -> None:
        self.apart = 0
        self.shapes: list[tuple[int, ...]] = []
        pool, function = compiled_layers.pool, pooling._Pooled

        def noted(library, x, window, keep):
            self.shapes.append(tuple(x.shape))
            return pool(library, x, window, keep)

        class Pooled:
            @staticmethod
            def apply(*arguments):
                self.apart += 1
                return function.apply(*arguments)

        monkeypatch.setattr(compiled_layers, "pool", noted)
        monkeypatch.setattr(pooling, "_Pooled", Pooled)


@pytest.mark.parametrize("pool", POOLINGS.values(), ids=POOLINGS)
def test_a_pooling_behind_the_activation_is_part_of_the_layer(pool, monkeypatch):
    spy = PoolSpy(monkeypatch)
    x = torch.randn(4, 3, 9, 12)
    ours = gradients(lambda: pooled_by(pool), x, monkeypatch=monkeypatch)
    assert spy.apart == 0
    assert spy.shapes == [(4, 4, 7, 10)] * 2
    assert_same(ours, gradients(lambda: pooled_by(pool), x, kernels=False, monkeypatch=monkeypatch))
    with dk.Runtime(SCHEME, None) as runtime:
        model = pooled_by(pool)
        dk.protect_(model, runtime)
        with torch.no_grad():
            assert torch.equal(model(x), model[3](model[2](model[1](model[0](x)))))
        x.requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(ProtectError, match="differentiated twice"):
            grad.sum().backward()


APART = {
    "a hook on the activation": lambda model: model[1].register_forward_hook(
        lambda module, given, y: assert_whole(y, module)
    ),
    "a hook before the pooling": lambda model: model[2].register_forward_pre_hook(
        lambda module, given: assert_whole(given[0], module)
    ),
    "another pooling": lambda model: setattr(
        model[2], "forward", lambda y: F.max_pool2d(assert_whole(y, None) or y, 2)
    ),
}


def assert_whole(y, _) -> None:
    assert y.shape[2:] == (7, 10)
    assert y.min() == 0


@pytest.mark.parametrize("hook", APART.values(), ids=APART)
def test_a_pooling_whose_input_somebody_sees_is_a_function_of_itself(hook, monkeypatch):
    spy = PoolSpy(monkeypatch)
    x = torch.randn(4, 3, 9, 12)
    model_of = lambda: pooled_by(POOLINGS["halves"], hook)  # noqa: E731
    ours = gradients(model_of, x, monkeypatch=monkeypatch)
    assert spy.apart == 2
    assert_same(ours, gradients(model_of, x, kernels=False, monkeypatch=monkeypatch))


def test_a_pooling_that_has_no_kernel_is_torchs(monkeypatch):
    spy = PoolSpy(monkeypatch)
    x = torch.randn(4, 3, 9, 12)
    for pool in (lambda: nn.MaxPool2d(2, ceil_mode=True), lambda: nn.MaxPool2d(2, dilation=2), lambda: nn.AvgPool2d(2)):
        ours, torchs = (
            gradients(lambda: pooled_by(pool), x, kernels=kernels, monkeypatch=monkeypatch)  # noqa: B023
            for kernels in (True, False)
        )
        assert_same(ours, torchs)
    assert spy.shapes == []


def normalised_vgg() -> nn.Module:
    return VGG((3, 12, 16), 5, stages=((4, 6), (8,)), batch_norm=True, wide_head=False)


def small_resnet() -> nn.Module:
    return ResNet((3, 12, 16), 5, blocks=(1, 1), width=4, small_images=True)


def small_mobilenet() -> nn.Module:
    return MobileNetV2((3, 12, 16), 5, stages=((1, 4, 1, 1), (2, 4, 2, 1)), stem=4, last=8, dropout=0.0)


# How often: a product is told of its gradient, an activation is left to its normalisation, or both were done at once.
NORMALISED = {
    "vgg": (normalised_vgg, 3, 0, 3),
    "resnet": (small_resnet, 6, 3, 0),
    "mobilenet": (small_mobilenet, 10, 0, 7),
}


@pytest.mark.parametrize(("model_of", "told", "clipped", "finished"), NORMALISED.values(), ids=NORMALISED)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_a_normalisation_is_finished_with_its_activation(model_of, told, clipped, finished, training, monkeypatch):
    """Bit for bit what the same kernels give apart."""
    x = torch.randn(4, 3, 12, 16)
    found = {}
    for apart in (False, True):
        with monkeypatch.context() as patch:
            spy = Spy(patch)
            normed = NormSpy(patch)
            if apart:
                patch.setattr(Sequence, "behind", lambda *_: (None, None))
                patch.setattr(Staying, "multiplied", lambda *_: None)
            found[apart] = gradients(lambda: model_of().train(training), x, monkeypatch=patch)
        if training:
            assert spy.told.count(True) == (0 if apart else 2 * told)
            assert normed.clipped == 2 * (clipped + finished if apart else clipped)
            assert len([limits for limits in normed.finished if limits]) == (0 if apart else 2 * finished)
            assert len([limits for limits in normed.stopped if limits]) == 2 * (clipped + finished)
    assert_same(found[False], found[True])


@pytest.mark.parametrize("grad", [True, False], ids=["derived", "not derived"])
def test_in_evaluation_too(grad, monkeypatch):
    spy = Spy(monkeypatch)
    model, x = small_vgg().eval(), torch.randn(4, 3, 12, 16)
    with dk.Runtime(SCHEME, None) as runtime, torch.set_grad_enabled(grad):
        dk.protect_(model, runtime, where=everything)
        ours = model(x)
        monkeypatch.setattr(compiled_layers, "chosen", lambda: None)
        assert torch.equal(model(x), ours)
    assert spy.finished == [RELU, RELU, RELU, None, *[None] * 4]


def test_real_arithmetic_is_finished_the_same_way(monkeypatch):
    scheme = dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(noise_std=1.0))
    x = torch.randn(4, 3, 12, 16)
    pair = [
        gradients(small_vgg, x, kernels=kernels, scheme=scheme, monkeypatch=monkeypatch) for kernels in (True, False)
    ]
    for name, value in pair[0].items():
        torch.testing.assert_close(value, pair[1][name], rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_what_is_overwritten_after_the_activation_is_noticed_as_without_protection():
    model, x = sequence(), torch.randn(4, 3, 5, 6)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        y = model(x)
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_gradients_of_gradients_are_refused_as_without_activation():
    model, x = sequence(), torch.randn(4, 3, 5, 6, requires_grad=True)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(ProtectError, match="differentiated twice"):
            grad.sum().backward()


def test_a_bias_alone_is_trained_behind_its_activation(monkeypatch):
    def frozen():
        model = sequence()
        model[0].weight.requires_grad_(False)
        return model

    grads = []
    for kernels in (True, False):
        torch.manual_seed(3)
        model = frozen()
        with monkeypatch.context() as patch, dk.Runtime(SCHEME, None) as runtime:
            if not kernels:
                patch.setattr(compiled_layers, "chosen", lambda: None)
            dk.protect_(model, runtime)
            model(torch.ones(4, 3, 5, 6)).square().sum().backward()
        grads.append(model[0].bias.grad)
    torch.testing.assert_close(*grads)
    assert grads[0].abs().max() > 0


def test_threads_do_not_finish_each_others_layers(monkeypatch):
    spy = Spy(monkeypatch)
    models, x = [sequence() for _ in range(2)], torch.randn(4, 3, 5, 6)
    with dk.Runtime(SCHEME, None) as runtime:
        whole = nn.ModuleList(models)
        dk.protect_(whole, runtime)
        expected = [models[0](x).detach(), models[1][0](x).detach()]
        found: dict[int, list[torch.Tensor]] = {0: [], 1: []}

        def work(which):
            for _ in range(20):
                found[which].append((models[0](x) if which == 0 else models[1][0](x)).detach())

        threads = [threading.Thread(target=work, args=(which,)) for which in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for which, results in found.items():
        assert len(results) == 20
        assert all(torch.equal(each, expected[which]) for each in results)
    assert spy.finished.count(RELU) == spy.finished.count(None) == 21
