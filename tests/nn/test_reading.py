"""What is read of a forward, and what is not; and that whoever believes more gets wrong values."""

import importlib.util
import linecache
import sys

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.kernels import compiled_layers
from darknight.nn import following, protect, reading
from darknight.nn.reading import read
from darknight.nn.steps import Call, Own, Reading, Sum
from nn.behind import gradients
from nn.blocks import Basic, Digits, Inverted
from nn.test_following import CUT, CUT_SUM, PLAIN, SUM, SumSpy, unread
from nn.three_ways import SCHEME

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled"),
]


def calls(function, *answers):
    """The names that a forward calls, on the path of these answers, and the places of sums."""
    path = read(function).paths[answers]
    found = []
    for step in path.steps:
        if isinstance(step, Call) and isinstance(path.made(step.function), Own):
            found.append(path.made(step.function).name)
        elif isinstance(step, Sum):
            found.append("+=" if step.in_place else "+")
    return found


def test_every_step_of_a_block_is_read_in_pythons_order():
    before = ["conv1", "bn1", "relu", "conv2", "bn2"]
    assert calls(Basic.forward, True) == [*before, "+=", "relu"]
    assert calls(Basic.forward, False) == [*before, "downsample", "+=", "relu"]
    assert calls(Inverted.forward, True) == ["conv", "+"]
    assert calls(Inverted.forward, False) == ["conv"]
    assert calls(Digits.forward) == ["conv1", "conv2", "fc1", "fc2"]
    assert read(Basic.forward).names == {"conv1", "bn1", "relu", "conv2", "bn2", "downsample"}
    assert (read(Basic.forward).flags, read(Inverted.forward).flags) == (set(), {"use_res_connect"})


def test_who_gets_a_result_is_known_if_it_is_one():
    whole = read(Basic.forward)
    found = {
        (path.made(path.steps[place].function).name, path.decided(99)): chain
        for (path, place), chain in whole.chains.items()
    }
    last = found["bn2", (False,)]
    path = whole.paths[False,]
    assert isinstance(path.steps[last.sum], Sum)
    assert [type(path.steps[place]) for place in last.moved] == [Own, Call]
    assert len(last.checks) == 1
    assert found["bn2", (True,)].moved == ()
    assert [taker.step.name for taker in found["bn1", (False,)].takers] == ["relu", "conv2", "bn2"]
    assert [found[name, (False,)].added for name in ("conv1", "bn1", "conv2")] == [False, False, True]


class Block(nn.Module):
    """What the forwards below are written for."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(6, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        self.last, self.fused = nn.BatchNorm2d(6), True


SEEN = []


class Stored(Block):
    def forward(self, x):
        self.kept = self.bn(self.conv(x))
        return self.relu(self.kept)


class Twice(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return y.clone(), self.relu(y)


class Returned(Block):
    """Both names are of one tensor, which the ReLU overwrites."""

    def forward(self, x):
        y = self.bn(self.conv(x))
        z = self.relu(y)
        return y + z


class Text(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        f"{SEEN.append(y.detach().clone())}"
        return self.relu(y)


class Printed(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        print(float(y.detach().min()))
        return self.relu(y)


class Global(Block):
    def forward(self, x):
        global LATEST
        LATEST = self.bn(self.conv(x))
        return self.relu(LATEST.clone()) + LATEST


class Walrus(Block):
    def forward(self, x):
        return self.relu((y := self.bn(self.conv(x))).clone()) - y


class Appended(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        SEEN.append(y.detach().clone())
        return self.relu(y)


class Subscript(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        z = y[0].sum().detach()
        return self.relu(y) + z


class Looped(Block):
    def forward(self, x):
        for _ in range(2):
            y = self.bn(self.conv(x))
        return self.relu(y)


class Tried(Block):
    def forward(self, x):
        try:
            y = self.bn(self.conv(x))
        finally:
            SEEN.append(1)
        return self.relu(y)


class Nested(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        return (lambda: self.relu(y))()


class Framed(Block):
    def forward(self, x):
        y = self.bn(self.conv(x))
        SEEN.append(locals()["y"].detach().clone())
        return self.relu(y)


class Default(Block):
    def forward(self, x, y=None):
        return self.relu(self.bn(self.conv(x)))


class Starred(Block):
    def forward(self, *given):
        return self.relu(self.bn(self.conv(*given)))


class SelfAssigned(Block):
    def forward(self, x):
        self = self.inner(x)
        return self.relu(self)


class Unbound(Block):
    def forward(self, x):
        if self.fused:
            y = self.bn(x)
        return self.relu(y)


class Nothing(Block):
    def forward(self, x):
        self.relu(self.bn(self.conv(x)))


def decorated(forward):
    def outer(self, x):
        y = forward(self, x)
        return y + 1

    return outer


class Decorated(Block):
    @decorated
    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


class Quiet(Block):
    @staticmethod
    def forward(x):
        return x


class Mangled(Block):
    def forward(self, x):
        return self.relu(self.__hidden(x))


NOT_READ = [Stored, Twice, Text, Printed, Global, Walrus, Appended, Subscript, Looped, Tried, Nested, Framed, Default]
NOT_READ += [Starred, SelfAssigned, Unbound, Nothing, Decorated, Mangled]


@pytest.mark.parametrize("kind", NOT_READ, ids=lambda kind: kind.__name__)
def test_what_is_not_understood_is_not_read(kind):
    assert read(kind.forward) is None


def test_other_things_than_functions_are_not_read():
    for thing in (None, len, nn.Module, torch.jit.script, Block().conv.forward, lambda self, x: self.relu(x)):
        assert read(thing) is None


SEEN_VALUES = [Stored, Twice, Returned, Text, Global, Walrus, Appended, Subscript, Framed]


@pytest.mark.parametrize("kind", SEEN_VALUES, ids=lambda kind: kind.__name__)
def test_whoever_looks_sees_what_the_normalisation_gave(kind, monkeypatch):
    def outcome(reads):
        torch.manual_seed(6)
        model, x = kind(), torch.randn(4, 6, 5, 3)
        SEEN.clear()
        with monkeypatch.context() as patch, dk.Runtime(SCHEME, None) as runtime:
            if not reads:
                unread(patch)
            dk.protect_(model, runtime)
            with torch.no_grad():
                y = model(x)
        parts = y if isinstance(y, tuple) else (y,)
        return [*parts, *SEEN, model.bn.running_var]

    for ours, apart in zip(outcome(True), outcome(False), strict=True):
        assert torch.equal(ours, apart)


# --- a reader that believes more --------------------------------------------------------------------------------------
def test_a_reader_that_does_not_count_uses_gets_wrong_values(monkeypatch):
    torch.manual_seed(6)
    x = torch.randn(4, 6, 5, 3)

    def result():
        torch.manual_seed(7)
        model = Returned()
        model.relu.inplace = False
        with dk.Runtime(SCHEME, None) as runtime, torch.no_grad():
            dk.protect_(model, runtime)
            return model(x)

    right = result()
    first = lambda self, path, value: next((use for use in path.uses(value) if use < len(path.steps)), None)  # noqa: E731
    monkeypatch.setattr(Reading, "_only_use", first)
    monkeypatch.setattr(protect, "read", read.__wrapped__)  # without what was found before
    assert not torch.equal(result(), right)


def test_a_reader_that_believes_any_source_gets_wrong_values(tmp_path, monkeypatch):
    """The file was edited after it was loaded, as happens in a notebook's session."""
    module = loaded(tmp_path, "return self.relu(self.bn(self.conv(x)))")
    edited = (tmp_path / "theirs.py").read_text().replace("self.relu(self.bn(self.conv(x)))", "self.bn(self.conv(x))")
    (tmp_path / "theirs.py").write_text(edited)
    linecache.checkcache()
    x = torch.randn(4, 6, 5, 3)

    def result():
        torch.manual_seed(7)
        model = module.Theirs()
        with dk.Runtime(SCHEME, None) as runtime, torch.no_grad():
            dk.protect_(model, runtime)
            return model(x)

    assert read(module.Theirs.forward) is None
    right = result()
    assert right.min() == 0
    read.cache_clear()
    monkeypatch.setattr(reading, "_does_the_same", lambda *_: True)
    assert result().min() < 0
    read.cache_clear()


def loaded(folder, line):
    text = (
        "from torch import nn\n\n\nclass Theirs(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.conv, self.bn, self.relu = nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)\n\n"
        f"    def forward(self, x):\n        {line}\n"
    )
    (folder / "theirs.py").write_text(text)
    spec = importlib.util.spec_from_file_location("theirs", folder / "theirs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_code_without_a_source_is_not_read(tmp_path):
    assert read(loaded(tmp_path, "return self.relu(self.bn(self.conv(x)))").Theirs.forward) is not None
    names = {"nn": nn}
    exec("class Theirs(nn.Module):\n    def forward(self, x):\n        return self.relu(self.bn(x))\n", names)
    assert read(names["Theirs"].forward) is None


def test_a_zero_with_a_sign_is_another_constant(tmp_path):
    module = loaded(tmp_path, "return self.relu(self.bn(x)) + 0.0")
    assert read(module.Theirs.forward) is not None
    read.cache_clear()
    text = (tmp_path / "theirs.py").read_text()
    (tmp_path / "theirs.py").write_text(text.replace("+ 0.0", "+ 0"))
    linecache.checkcache()
    assert read(module.Theirs.forward) is None


# --- what changes after it was read -----------------------------------------------------------------------------------
class Ordinary(Block):
    def forward(self, x):
        y = self.relu(self.bn(self.conv(x)))
        y = self.last(y)
        y += x
        return self.relu(y)


class Other(Ordinary):
    def forward(self, x):
        return self.conv(x) * 3


class Property(Ordinary):
    @property
    def relu(self):
        return torch.sigmoid

    @relu.setter
    def relu(self, value):
        pass


class Asked(Ordinary):
    def __getattr__(self, name):
        return torch.sigmoid if name == "relu" else super().__getattr__(name)


class Everything(Ordinary):
    def __getattribute__(self, name):
        return torch.sigmoid if name == "relu" else super().__getattribute__(name)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


class Calls(nn.BatchNorm2d):
    def __call__(self, x):
        return super().__call__(x) - 1


def overridden(model):
    model.__class__ = Other


def patched(model):
    vars(model)["forward"] = lambda x: model.conv(x) * 3


def replaced_function(model):
    model.__class__ = type("Late", (Ordinary,), {"forward": Other.forward})


def other_code(model):
    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))

    model.__class__ = type("Copied", (Ordinary,), {"forward": copy_of(Ordinary.forward)})
    type(model).forward.__code__ = forward.__code__


def copy_of(function):
    return type(function)(function.__code__, function.__globals__, function.__name__)


def swapped(model):
    model.relu = nn.Sigmoid()


def shadowed(model):
    vars(model)["relu"] = torch.sigmoid


def own_norm(model):
    model.last = OwnNorm(6)
    model.bn = Calls(6)


def norm_forward(model):
    model.last.forward = lambda x: x * 2
    model.relu.forward = lambda x: x.square()


def on_class(model):
    model.__class__ = type("Late", (Ordinary,), {"relu": staticmethod(torch.sigmoid)})


def hook(kind, name, change):
    def add(model):
        getattr(getattr(model, name), f"register_{kind}")(change)

    return add


def gradient_hook(model):
    model.relu.inplace = False  # torch refuses the two together
    model.bn.register_full_backward_hook(lambda module, given, grads: (given[0] * 2,))


double = lambda module, given, y: y * 2  # noqa: E731
CHANGES = {
    "nothing": (lambda model: None, [CUT, CUT_SUM]),
    "a subclass with another forward": (overridden, []),
    "a forward on the instance": (patched, []),
    "a forward on its class": (replaced_function, []),
    "other code in its function": (other_code, [PLAIN]),
    "another module": (swapped, [PLAIN, SUM]),
    "something in its place": (shadowed, [PLAIN, PLAIN]),
    "normalisations of somebody's own": (own_norm, [PLAIN, PLAIN]),
    "other forwards below": (norm_forward, [PLAIN]),
    "an attribute of the class": (on_class, [PLAIN, PLAIN]),
    "a property": (lambda model: setattr(model, "__class__", Property), [PLAIN, PLAIN]),
    "__getattr__": (lambda model: setattr(model, "__class__", Asked), [PLAIN, PLAIN]),
    "__getattribute__": (lambda model: setattr(model, "__class__", Everything), [PLAIN, PLAIN]),
    "a hook on the normalisation": (hook("forward_hook", "bn", double), [PLAIN, CUT_SUM]),
    "a hook on the last one": (hook("forward_hook", "last", double), [CUT, PLAIN]),
    "a hook before the ReLU": (
        hook("forward_pre_hook", "relu", lambda module, given: (given[0] + 1,)),
        [PLAIN, SUM],
    ),
    "a hook behind the ReLU": (hook("forward_hook", "relu", double), [CUT, CUT_SUM]),
    "a hook on gradients": (gradient_hook, [PLAIN, CUT_SUM]),
    "in evaluation, in part": (lambda model: model.last.eval(), [CUT]),
    "frozen": (lambda model: model.last.requires_grad_(False), [CUT, CUT_SUM]),
}


@pytest.mark.parametrize(("change", "finished"), CHANGES.values(), ids=CHANGES)
def test_what_changes_after_it_was_read_is_seen_in_the_next_call(change, finished, monkeypatch):
    x = torch.randn(4, 6, 5, 3)
    spy = SumSpy(monkeypatch)

    def outcome(reads):
        torch.manual_seed(7)
        model, given = Ordinary(), x.clone().requires_grad_()
        with monkeypatch.context() as patch, dk.Runtime(SCHEME, None) as runtime:
            if not reads:
                unread(patch)
            dk.protect_(model, runtime)
            model(x)
            change(model)
            spy.finished.clear()
            y = model(given)
            (y * torch.linspace(0, 1, y.numel()).view(y.shape)).sum().backward()
        return [y.detach(), given.grad, model.conv.weight.grad, model.last.running_mean]

    ours = outcome(True)
    assert spy.finished == finished
    for mine, apart in zip(ours, outcome(False), strict=True):
        assert torch.equal(mine, apart)


def test_a_debugger_stops_where_it_was_told_to():
    model, x, lines = Ordinary(), torch.randn(4, 6, 5, 3), []

    def trace(frame, event, argument):
        if frame.f_code is Ordinary.forward.__code__:
            lines.append(event)
        return trace

    with dk.Runtime(SCHEME, None) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        expected = model(x)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            assert torch.equal(model(x), expected)
        finally:
            sys.settrace(before)
    assert "line" in lines


class Flips(nn.Module):
    """Changes what its parent will ask."""

    def __init__(self, parent) -> None:
        super().__init__()
        self.parent = [parent]

    def forward(self, x):
        (parent,) = self.parent
        parent.fused = not parent.fused
        return x


class Turning(Block):
    def __init__(self) -> None:
        super().__init__()
        self.flips = Flips(self)

    def forward(self, x):
        y = self.bn(self.conv(x))
        y = self.flips(y)
        if self.fused:
            return self.relu(y)
        z = self.last(y)
        return z + y


def test_what_is_asked_is_asked_when_its_turn_comes(monkeypatch):
    x = torch.randn(4, 6, 5, 3)
    pair = []
    for reads in (True, False):
        with monkeypatch.context() as patch:
            if not reads:
                unread(patch)
            pair.append(gradients(Turning, x, monkeypatch=patch))
    assert all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0] if pair[0][name] is not None)


class Later(Block):
    """The other side of the sum is computed behind the normalisation."""

    def __init__(self, side) -> None:
        super().__init__()
        self.side = side

    def forward(self, x):
        y = self.bn(x)
        other = self.side(x)
        y += other
        return self.relu(y)


def shared_statistics(parent):
    parent.side = nn.Sequential(nn.BatchNorm2d(6))
    parent.side[0].running_mean = parent.bn.running_mean
    return parent


def observed(parent):
    parent.side.register_forward_hook(lambda module, given, y: SEEN.append(parent.bn.running_mean.clone()))
    return parent


SIDES = {
    "a convolution": (lambda: Later(nn.Conv2d(6, 6, 1)), True),
    "a convolution and a normalisation": (lambda: Later(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6))), True),
    "overwrites its input": (lambda: Later(nn.ReLU(inplace=True)), False),
    "of somebody's own": (lambda: Later(Flips(Block())), False),
    "shares statistics": (lambda: shared_statistics(Later(nn.Identity())), False),
    "a hook": (lambda: observed(Later(nn.Conv2d(6, 6, 1))), False),
    "of another shape": (lambda: Later(nn.AvgPool2d((5, 3))), False),
}


def sum_of(model_of, monkeypatch, reads=True):
    """What a model gives in training mode, and everything that can be seen of it; and whether a sum was left out."""
    torch.manual_seed(8)
    model, x = model_of(), torch.randn(4, 6, 5, 3)
    SEEN.clear()
    with monkeypatch.context() as patch, dk.Runtime(SCHEME, None) as runtime, torch.no_grad():
        spy = SumSpy(patch)
        if not reads:
            unread(patch)
        dk.protect_(model, runtime)
        y = model(x)
    return [y, x, *model.state_dict().values(), *SEEN], any(added for added, _ in spy.finished)


@pytest.mark.parametrize(("model_of", "moved"), SIDES.values(), ids=SIDES)
def test_what_a_sum_needs_is_computed_before_only_if_that_makes_no_difference(model_of, moved, monkeypatch):
    ours, left_out = sum_of(model_of, monkeypatch)
    assert left_out == moved
    apart, _ = sum_of(model_of, monkeypatch, reads=False)
    assert all(torch.equal(*pair) for pair in zip(ours, apart, strict=True))


def test_a_side_that_is_moved_without_asking_gives_wrong_values(monkeypatch):
    model_of = SIDES["overwrites its input"][0]
    right, _ = sum_of(model_of, monkeypatch, reads=False)
    monkeypatch.setattr(following, "_indifferent", lambda *_: True)
    wrong, _ = sum_of(model_of, monkeypatch)
    assert not torch.equal(wrong[0], right[0])
