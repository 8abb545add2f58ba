"""Bad input and interruptions: a clear error of ours, model and optimizer untouched, and work can go on."""

import signal

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.errors import DarKnightError, EncodingError, FleetError, OpError, SchemeError
from darknight.fleet import Fleet
from darknight.runtime.crew import Crew
from fleet.threads import thread_fleet
from nn.three_ways import SCHEME, assert_same, batches, compare, fleet_runtime, random, snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


def prepared(runtime, model=None):
    """A protected model that made one step, so that gradients and momentum exist."""
    model = model or network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dk.protect_(model, runtime)
    step(model, optimizer, batches(1)[0])
    return model, optimizer


def step(model, optimizer, batch):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


# --- schemes and fleets ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"inputs": 0, "colluders": 1}, "inputs"),
        ({"inputs": -1, "colluders": 1}, "inputs"),
        ({"inputs": 2, "colluders": 0}, "colluders"),
        ({"inputs": 2.0, "colluders": 1}, "inputs"),
        ({"inputs": 2, "colluders": 1, "spares": -1}, "spares"),
    ],
)
def test_an_impossible_scheme_is_refused_by_name(settings, complaint):
    with pytest.raises(SchemeError, match=complaint):
        dk.Scheme(**settings)


@pytest.mark.parametrize("arithmetic", [{"noise_std": 1e12, "dtype": torch.float32}, {"noise_std": 1e30}])
def test_noise_that_the_dtype_cannot_carry_is_refused(arithmetic):
    with pytest.raises(SchemeError, match="noise"):
        dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(**arithmetic))


def test_a_fleet_smaller_than_the_scheme_is_refused():
    larger = dk.Scheme(inputs=4, colluders=2)
    with thread_fleet(SCHEME) as fleet:
        with pytest.raises(FleetError, match=f"{SCHEME.workers} workers; this scheme needs {larger.workers}"):
            dk.Runtime(larger, fleet)
        with dk.Runtime(SCHEME, fleet) as runtime:  # the fleet is none the worse for it
            prepared(runtime)


def test_a_larger_fleet_is_accepted():
    with thread_fleet(dk.Scheme(inputs=4, colluders=2)) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        prepared(runtime)


@pytest.mark.parametrize(("scheme", "fleet"), [(SCHEME, 4), ("scheme", None), (None, None)])
def test_something_else_than_a_scheme_and_a_fleet_is_refused(scheme, fleet):
    with pytest.raises(DarKnightError, match="belongs"):
        dk.Runtime(scheme, fleet)


# --- values and shapes ----------------------------------------------------------------------------------------------
BAD_INPUTS = {
    "NaN": (lambda: random(4, 5).index_fill(1, torch.tensor(2), float("nan")), EncodingError, "layer 0: .*NaN"),
    "infinity": (
        lambda: random(4, 5).index_fill(1, torch.tensor(2), float("inf")),
        EncodingError,
        "layer 0: .*infinite",
    ),
    "another dtype": (lambda: random(4, 5, dtype=torch.float64), OpError, "layer 0: .*float64.*float32"),
    "integers": (lambda: torch.ones(4, 5, dtype=torch.int64), OpError, "layer 0: .*int64"),
    "another width": (lambda: random(4, 6), OpError, "layer 0: "),
    "no axis": (lambda: torch.tensor(1.0), OpError, "layer 0: "),
    "another device": (lambda: torch.empty(4, 5, device="meta"), OpError, "layer 0: .*meta"),
}


@pytest.mark.parametrize("arithmetic", [dk.Field(), dk.Real(noise_std=2e3)], ids=["field", "real"])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input_is_refused_and_changes_nothing(name, arithmetic):
    make, error, message = BAD_INPUTS[name]
    with fleet_runtime(dk.Scheme(inputs=2, colluders=1, arithmetic=arithmetic)) as runtime:
        model, optimizer = prepared(runtime)
        before = snapshot(model, optimizer)
        with pytest.raises(error, match=message):
            model(make())
        assert_same(before, snapshot(model, optimizer))
        step(model, optimizer, batches(1)[0])


def test_values_too_large_for_any_scale_are_refused():
    with fleet_runtime() as runtime:
        model = network().double()
        dk.protect_(model, runtime)
        with pytest.raises(EncodingError, match=r"layer 0: values beyond 2\^120"):
            model(torch.full((4, 5), 1e200, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
def test_tiny_and_huge_values_are_neither_lost_nor_refused(size):
    def script(model):
        x = (random(4, 5) * size).requires_grad_()
        y = model(x)
        (y / size).sum().backward()
        (gradient,) = torch.autograd.grad(model(x).sum() * size, x)
        return [y / size, gradient / size]

    compare(lambda: nn.Linear(5, 7, bias=False), script)


def test_a_nested_input_is_refused():
    with dk.Runtime(SCHEME, None) as runtime:
        model = network()
        dk.protect_(model, runtime)
        with pytest.raises(OpError, match=r"layer 0: .*nested"):
            model(torch.nested.nested_tensor([random(2, 5), random(3, 5)], layout=torch.jagged))


def test_a_convolution_refuses_another_number_of_channels():
    with fleet_runtime() as runtime:
        model = nn.Conv2d(2, 4, 3)
        dk.protect_(model, runtime)
        for shape in [(4, 3, 6, 6), (4, 2, 2, 2), (4, 2, 6), (1, 4, 2, 6, 6)]:
            with pytest.raises(OpError):
                model(random(*shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(value):
    with fleet_runtime() as runtime:
        model, _ = prepared(runtime)
        with torch.no_grad():
            model[2].weight[0, 0] = value
        with pytest.raises(EncodingError, match="layer 2: "):
            model(random(4, 5))


def test_a_gradient_that_is_not_finite_is_refused_and_no_parameter_moves():
    with fleet_runtime() as runtime:
        model, optimizer = prepared(runtime)
        before = snapshot(model, optimizer)
        y = model(random(4, 5))
        with pytest.raises(EncodingError, match="layer 4: "):
            (y * float("nan")).sum().backward()
        after = snapshot(model, optimizer)
        # torch adds a layer's gradient as soon as it has it: here only the last bias had one.
        del before["0.4.bias.grad"], after["0.4.bias.grad"]
        assert_same(before, after)


def test_messages_contain_no_data_values():
    with dk.Runtime(SCHEME, None) as runtime:
        model, _ = prepared(runtime)
        x = torch.full((4, 5), 4242.5)
        x[1, 1] = float("inf")
        with pytest.raises(EncodingError) as caught:
            model(x)
        with pytest.raises(dk.errors.OpError) as mismatched:
            model(torch.full((4, 9), 4242.5))
    for error in (caught.value, mismatched.value):
        assert "4242" not in str(error)
        assert "tensor" not in str(error)


# --- interruptions --------------------------------------------------------------------------------------------------
class Interrupted:
    """Raises in the given round of tasks, counted from one: before they are sent, or while answers are under way."""

    def __init__(self, monkeypatch, at, sent=True):
        self.rounds = 0
        ask, gather = Crew.ask, Fleet.gather

        def counted(crew, *arguments, **settings):
            self.rounds += 1
            if self.rounds == at and not sent:
                raise KeyboardInterrupt
            return ask(crew, *arguments, **settings)

        def interrupted(fleet, *arguments, **named):
            if self.rounds == at:
                raise KeyboardInterrupt
            return gather(fleet, *arguments, **named)

        monkeypatch.setattr(Crew, "ask", counted)
        monkeypatch.setattr(Fleet, "gather", interrupted)


def undisturbed(steps):
    with dk.Runtime(SCHEME, None) as runtime:
        model, optimizer = prepared(runtime)
        for batch in batches(steps):
            step(model, optimizer, batch)
    return snapshot(model, optimizer)


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_ctrl_c_in_a_forward_pass_changes_nothing_and_the_step_can_be_repeated(monkeypatch, layer, sent):
    with fleet_runtime() as runtime:
        model, optimizer = prepared(runtime)
        before = snapshot(model, optimizer)
        with monkeypatch.context() as patch:
            Interrupted(patch, at=layer, sent=sent)
            with pytest.raises(KeyboardInterrupt):
                model(batches(1)[0][0])
        assert_same(before, snapshot(model, optimizer))
        for batch in batches(3):
            step(model, optimizer, batch)
        found = snapshot(model, optimizer)
    assert_same(found, undisturbed(3))


@pytest.mark.parametrize("layer", [4, 5, 6])
def test_ctrl_c_in_a_backward_pass_moves_no_parameter_and_the_step_can_be_repeated(monkeypatch, layer):
    """A layer that finished its pass drew its rounding. Bit for bit the same again needs the runtime's state back."""
    with fleet_runtime() as runtime:
        model, optimizer = prepared(runtime)
        weights, state = {k: v.clone() for k, v in model.state_dict().items()}, snapshot(optimizer)
        rounding = runtime.state_dict()
        with monkeypatch.context() as patch:
            Interrupted(patch, at=layer)
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizer, batches(1)[0])
        assert_same(weights, dict(model.state_dict()))
        assert_same(state, snapshot(optimizer))
        runtime.load_state_dict(rounding)
        for batch in batches(3):
            step(model, optimizer, batch)
        found = snapshot(model, optimizer)
    assert_same(found, undisturbed(3))


def test_a_step_repeated_without_the_runtimes_state_is_rounded_anew(monkeypatch):
    with fleet_runtime() as runtime:
        model, optimizer = prepared(runtime)
        with monkeypatch.context() as patch:
            Interrupted(patch, at=5)
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizer, batches(1)[0])
        step(model, optimizer, batches(1)[0])
        found, expected = snapshot(model), undisturbed(1)
    for name, value in found.items():
        assert (value - expected[name]).norm() <= 0.02 * expected[name].norm()


def test_a_real_signal_while_workers_compute(monkeypatch):
    with fleet_runtime() as runtime:
        model, optimizer = prepared(runtime)
        before = snapshot(model, optimizer)
        original = Fleet._checked

        def signalled(*arguments):
            monkeypatch.setattr(Fleet, "_checked", original)
            signal.raise_signal(signal.SIGINT)
            return original(*arguments)

        monkeypatch.setattr(Fleet, "_checked", signalled)
        with pytest.raises(KeyboardInterrupt):
            model(batches(1)[0][0])
        assert_same(before, snapshot(model, optimizer))
        for batch in batches(2):
            step(model, optimizer, batch)
        found = snapshot(model, optimizer)
    assert_same(found, undisturbed(2))


def test_ctrl_c_while_weights_are_sent(monkeypatch):
    with fleet_runtime() as runtime:
        model, optimizer = prepared(runtime)
        original, calls = Fleet.post, []

        def post(fleet, worker, message):
            calls.append(worker)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return original(fleet, worker, message)

        with monkeypatch.context() as patch:
            patch.setattr(Fleet, "post", post)
            with pytest.raises(KeyboardInterrupt):
                model(batches(1)[0][0])
        for batch in batches(2):
            step(model, optimizer, batch)
        found = snapshot(model, optimizer)
    assert_same(found, undisturbed(2))


def test_nothing_watches_after_an_error():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 4)

        def forward(self, x):
            self.inner(x)
            raise RuntimeError("mine")

    model = Fails()
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime)
        with pytest.raises(RuntimeError, match="mine"):
            model(random(4, 5))
        torch.nn.functional.linear(random(4, 5), model.inner.weight)  # a script's own business
    assert [row.calls for row in report.masked] == [1]
