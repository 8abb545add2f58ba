"""A protected layer and what stands behind it, in one pass: the same results, and never seen half done."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import darknight as dk
from darknight.coding import Finish
from darknight.errors import ProtectError
from darknight.kernels import compiled_layers
from darknight.nn.behind import Behind
from fleet.threads import thread_fleet
from nn.behind import RELU, RELU6, Spy, assert_same, gradients, perceptron, sequence, small_vgg
from nn.three_ways import SCHEME, everything

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled"),
]


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
    "not in place": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (4, 3, 5, 6), [RELU]),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.ReLU()), (4, 3, 5, 6), [RELU]),
    "a hook behind": (lambda: hooked(1, "forward_hook"), (4, 3, 5, 6), [RELU]),
}


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


@pytest.mark.parametrize(("model_of", "shape", "limits"), SEQUENCES.values(), ids=SEQUENCES)
def test_what_workers_computed_is_finished_in_the_pass_that_unmasks_it(model_of, shape, limits, monkeypatch):
    x = torch.randn(shape)
    alone = gradients(model_of, x, monkeypatch=monkeypatch)

    def applied(finish, y):
        assert (finish.bias, finish.limits) == (None, None), "in a pass of its own"
        return y

    with thread_fleet(SCHEME) as fleet:
        apart = gradients(model_of, x, fleet=fleet, kernels=False, monkeypatch=monkeypatch)
    monkeypatch.setattr(Finish, "applied", applied)
    with thread_fleet(SCHEME) as fleet:
        at_once = gradients(model_of, x, fleet=fleet, monkeypatch=monkeypatch)
    assert_same(at_once, alone)
    assert_same(at_once, apart)


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
