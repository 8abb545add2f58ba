"""Which layers stay in the enclave for being cheap there: by structure, by cost, as somebody asked, as a state says."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import darknight as dk
from darknight.errors import ProtectError, UsageError
from darknight.nn.report import ENCLAVE, MASKED
from darknight.ops.place import DEPTHWISE
from fleet.threads import thread_fleet
from nn.three_ways import SCHEME, compare, everything, fleet_runtime, random, sent_weights
from ops.test_place import NOTHING

pytestmark = pytest.mark.usefixtures("one_thread")

# Sending costs a second a pass, computing nothing; and the other way round.
HERE, THERE = replace(NOTHING, call=1.0), replace(NOTHING, product=1.0, grouped=1.0)
# A multiplication costs 1, a pass of a layer that is sent 10^4: of `network`, only the last convolution is worth it.
BETWEEN = replace(NOTHING, product=1.0, grouped=1.0, call=3e4)
SHAPE = (4, 6, 5, 4)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(6, 6, 3, padding=1, groups=6),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 10, 3),
        nn.Flatten(),
        nn.Linear(60, 3),
    )


def places(report):
    return {row.name: row.where for row in report.rows}


def protected_places(model=None, scheme=SCHEME, **settings):
    with dk.Runtime(scheme, None) as runtime:
        return dk.protect_(network() if model is None else model, runtime, **settings)


def step(model, number):
    x = random(*SHAPE, seed=number)
    model.zero_grad()
    F.cross_entropy(model(x), torch.tensor([0, 2, 1, 1])).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# --- by structure -----------------------------------------------------------------------------------------------------
def test_a_depthwise_convolution_stays_and_the_report_says_why():
    report = compare(network, lambda model: [model(random(*SHAPE))])
    assert places(report) == {"0": ENCLAVE, "1": ENCLAVE, "3": MASKED, "5": MASKED}
    row = next(row for row in report.rows if row.name == "0")
    assert (row.why, row.calls, row.flops) == (DEPTHWISE, 1, 2 * 9 * 4 * 6 * 5 * 4)
    assert DEPTHWISE in str(report)
    assert sum(row.name == "0" for row in report.rows) == 1


def test_nothing_of_it_is_sent():
    with fleet_runtime() as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model, 0)
        assert sent_weights(runtime) == {"3", "5"}
        dk.unprotect_(model)
    with fleet_runtime() as runtime:  # the test can fail
        dk.protect_(model, runtime, where=everything)
        step(model, 0)
        assert sent_weights(runtime) == {"0", "3", "5"}


def test_it_is_the_float32_layer_itself():
    model, x = network(), random(*SHAPE)
    with torch.no_grad():
        plain = model[0](x)
        protected_places(model)
        torch.testing.assert_close(model[0](x), plain, rtol=1e-6, atol=1e-6)  # by a kernel of our own: within rounding
        dk.unprotect_(model)
        with dk.Runtime(SCHEME, None) as runtime:  # masked, it is not
            dk.protect_(model, runtime, where=everything)
            assert float((model[0](x) - plain).abs().max()) > 1e-5


class Functional(nn.Module):
    """A depthwise convolution that no module of torch stands for."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(random(6, 1, 3, 3))

    def forward(self, x):
        return F.conv2d(x, self.matrix, groups=6)


@pytest.mark.parametrize("whole", [True, False], ids=["the model itself", "inside"])
def test_so_does_one_that_is_called_as_a_function(whole):
    build = Functional if whole else lambda: nn.Sequential(Functional())

    def script(model):
        y = model(random(*SHAPE))
        y.square().sum().backward()
        return [y]

    report = compare(build, script)
    assert not any(row.calls for row in report.masked)
    assert [row.calls for row in report.enclave if row.why == DEPTHWISE] == [1]
    report = compare(build, script, where=everything)
    assert [row.calls for row in report.masked] == [1]


@pytest.mark.parametrize("where", [None, everything], ids=["left to itself", "asked"])
def test_a_model_that_is_one_depthwise_layer(where):
    report = compare(lambda: nn.Conv1d(4, 8, 3, groups=4), lambda model: [model(random(3, 4, 9))], where=where)
    assert [row.where for row in report.rows] == [ENCLAVE if where is None else MASKED]
    assert [row.calls for row in report.rows] == [1]


def test_workers_and_the_enclave_alone_train_the_same_weights():
    found = []
    with thread_fleet(SCHEME) as fleet:
        for runtime in (dk.Runtime(SCHEME, fleet), dk.Runtime(SCHEME, None)):
            model = network()
            with runtime:
                dk.protect_(model, runtime)
                for number in range(3):
                    step(model, number)
            found.append(weights(model))
    assert torch.equal(*found)


# --- as somebody asked ------------------------------------------------------------------------------------------------
def test_where_decides_layer_by_layer_and_none_leaves_it_to_what_is_cheaper():
    answers = {"0": True, "3": False, "5": None}
    report = protected_places(where=lambda name, module: answers.get(name))
    assert places(report) == {"0": MASKED, "1": ENCLAVE, "3": ENCLAVE, "5": MASKED}
    assert {row.name: row.why for row in report.enclave}["3"] == "excluded by where"


@pytest.mark.parametrize("rates", [HERE, THERE])
def test_a_layer_that_must_stay_stays_whatever_it_costs(rates):
    """Never against the privacy settings: costs can keep a layer, and cannot send one."""
    settings = {"example": torch.empty(SHAPE), "rates": rates}
    report = protected_places(where=lambda name, module: False, **settings)
    assert not report.masked
    asked = protected_places(where=everything, **settings)
    assert {row.name for row in asked.masked} == {"0", "3", "5"}


# --- by cost ----------------------------------------------------------------------------------------------------------
def test_with_an_example_each_layer_goes_where_it_is_cheaper():
    example = torch.empty(SHAPE)
    assert set(places(protected_places(example=example, rates=HERE)).values()) == {ENCLAVE}
    assert {row.name for row in protected_places(example=example, rates=THERE).masked} == {"0", "3", "5"}
    report = protected_places(example=example, rates=BETWEEN)
    assert {row.name for row in report.masked} == {"3"}
    why = {row.name: row.why for row in report.enclave}["5"]
    assert why.startswith("cheaper to compute (")
    assert "than to mask and check (6e+04 s)" in why


def test_what_is_sealed_for_other_machines_counts(monkeypatch):
    """Here sending is free and computing nearly so; a byte to another machine costs a second."""
    rates = replace(NOTHING, product=1e-9, grouped=1e-9, link=1.0)
    found = []
    for elsewhere in (0.0, 0.5):
        with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
            monkeypatch.setattr(type(fleet), "elsewhere", elsewhere)
            found.append(places(dk.protect_(network(), runtime, example=random(*SHAPE), rates=rates)))
    assert [set(each.values()) for each in found] == [{MASKED, ENCLAVE}, {ENCLAVE}]
    assert {name for name in found[0] if found[0][name] == MASKED} == {"0", "3", "5"}


def test_the_size_of_the_batch_decides_and_inference_costs_one_pass():
    def masked(count, **settings):
        report = protected_places(example=torch.empty(count, *SHAPE[1:]), rates=BETWEEN, **settings)
        return {row.name for row in report.masked}

    assert [masked(count) for count in (1, 4, 400)] == [set(), {"3"}, {"0", "3", "5"}]
    # One pass of 25,920 multiplications and additions instead of three, and one of 3e4 instead of two.
    assert masked(4, scheme=SCHEME.for_inference()) == set()


def test_an_example_leaves_the_model_as_it_is():
    model = network().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    protected_places(nn.Sequential(model, nn.Dropout(0.5)), example=random(*SHAPE), rates=BETWEEN)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model[3]._forward_pre_hooks


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(6, 6), nn.Conv1d(4, 4, 3, groups=4)

    def forward(self, pair):
        first, second = pair
        return self.layer(self.layer(input=first)) + second


def test_all_calls_of_a_layer_count_and_one_that_is_not_called_is_judged_by_its_structure():
    example = ((torch.empty(5, 6), torch.empty(5, 6)),)
    report = protected_places(Twice(), example=example, rates=replace(NOTHING, call=1.0, product=1e-3))
    why = {row.name: row.why for row in report.enclave}
    # 2 * 5 * 36 flops; the input of the first call has no gradient: five passes.
    assert why == {"layer": "cheaper to compute (1.8 s a step) than to mask and check (4 s)", "unused": DEPTHWISE}


class ByValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else x


def test_an_example_that_cannot_be_run_is_refused_and_the_model_left_unprotected():
    model = ByValue()
    with pytest.raises(ProtectError, match="could not be run without values"):
        protected_places(model, example=torch.ones(2, 5), rates=HERE)
    assert protected_places(model).masked


def test_rates_without_an_example_are_refused():
    with pytest.raises(ProtectError, match="Give one"):
        protected_places(rates=HERE)


# --- as a state says --------------------------------------------------------------------------------------------------
def interrupted(first, second):
    """Two steps with the first settings, then two with the second ones in another runtime; weights and last report."""
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, **first)
        step(model, 0)
        step(model, 1)
        state = runtime.state_dict()
    dk.unprotect_(model)
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime, **second)
        runtime.load_state_dict(state)
        step(model, 2)
        step(model, 3)
    return weights(model), report


def undisturbed(**settings):
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, **settings)
        for number in range(4):
            step(model, number)
    return weights(model)


COSTS = {"example": torch.empty(SHAPE), "rates": BETWEEN}
SETTINGS = {
    "structure": {},
    "cost": COSTS,
    "all here": {**COSTS, "rates": HERE},
    "all there": {**COSTS, "rates": THERE},
}


@pytest.mark.parametrize("second", SETTINGS)
@pytest.mark.parametrize("first", SETTINGS)
def test_a_run_goes_on_with_the_places_of_its_state_whatever_this_machine_would_choose(first, second):
    found, report = interrupted(SETTINGS[first], SETTINGS[second])
    assert torch.equal(found, undisturbed(**SETTINGS[first]))
    with dk.Runtime(SCHEME, None) as runtime:
        wanted = dk.protect_(network(), runtime, **SETTINGS[first])
    assert places(report) == places(wanted)
    assert {row.calls for row in report.rows if row.name in ("0", "3", "5")} == {2}
    if first != second:  # the places matter: another choice gives other bits
        assert not torch.equal(undisturbed(**SETTINGS[first]), undisturbed(**SETTINGS[second]))


def test_a_state_of_before_there_were_places_is_of_layers_that_were_sent():
    def older(state):
        drop = {"home"}
        return {
            **state,
            "layers": {k: {n: v for n, v in e.items() if n not in drop} for k, e in state["layers"].items()},
        }

    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, where=everything)
        state = runtime.state_dict()
    assert older(state) == state
    dk.unprotect_(model)
    with dk.Runtime(SCHEME, None) as runtime:
        report = dk.protect_(model, runtime)
        assert places(report)["0"] == ENCLAVE
        runtime.load_state_dict(state)
        assert places(report)["0"] == MASKED
        for number in range(4):
            step(model, number)
    assert torch.equal(weights(model), undisturbed(where=everything))


def test_a_layer_that_was_asked_to_be_masked_is_not_kept_by_a_state():
    with pytest.raises(UsageError, match=r"layer 0 was computed in the enclave; here it was asked to be masked"):
        interrupted({}, {"where": everything})


def test_no_state_sends_a_layer_that_must_stay():
    """The state has it as one that was sent; `where` says no, and that is all."""
    model = network()
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime, where=everything)
        state = runtime.state_dict()
    dk.unprotect_(model)
    with fleet_runtime() as runtime:
        dk.protect_(model, runtime, where=lambda name, module: name != "0")
        runtime.load_state_dict(state)
        step(model, 0)
        assert sent_weights(runtime) == {"3", "5"}


def test_a_function_keeps_the_place_of_its_state_too():
    def run(state, **settings):
        torch.manual_seed(0)
        model = nn.Sequential(Functional())
        with dk.Runtime(SCHEME, None) as runtime:
            report = dk.protect_(model, runtime, **settings)
            if state is not None:
                runtime.load_state_dict(state)
            model(random(*SHAPE)).square().sum().backward()
            return {row.where for row in report.rows if row.calls}, runtime.state_dict()

    for settings, place in (({}, ENCLAVE), ({"where": everything}, MASKED)):
        found, state = run(None, **settings)
        assert found == {place}
        assert run(state)[0] == {place}


def test_a_damaged_place_is_refused():
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(network(), runtime)
        state = runtime.state_dict()
        assert state["layers"]["0"]["home"] is True
        state["layers"]["0"] = {**state["layers"]["0"], "home": "yes"}
        with pytest.raises(UsageError, match="layer 0 is damaged"):
            runtime.load_state_dict(state)
