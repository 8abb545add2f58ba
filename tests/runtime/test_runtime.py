"""The door of the runtime: what it refuses, and what it says."""

import warnings

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.fleet import Fleet
from darknight.wire import in_process

SCHEME = dk.Scheme(inputs=2, colluders=1)


def idle_fleet(operators):
    return Fleet([in_process()[0] for _ in operators], operators=operators)


def test_a_fleet_that_is_too_small_is_refused_with_the_numbers():
    with pytest.raises(
        dk.errors.FleetError, match=r"3 workers; this scheme needs 4 \(inputs=2, colluders=1, spares=0\)"
    ):
        dk.Runtime(SCHEME, idle_fleet(["a", "b", "c"]))


def test_one_operator_may_not_hold_more_shares_than_colluders():
    with pytest.raises(dk.errors.FleetError, match="operator 'a' runs 2 workers"):
        dk.Runtime(SCHEME, idle_fleet(["a", "b", "a", "c"]))
    dk.Runtime(dk.Scheme(inputs=2, colluders=2), idle_fleet(["a", "b", "a", "c", "b", "c"]))


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**63, "0"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(dk.errors.SchemeError, match="seed"):
        dk.Runtime(SCHEME, None, seed=seed)


@pytest.mark.parametrize(("scheme", "fleet", "error"), [("field", None, "SchemeError"), (SCHEME, 6, "FleetError")])
def test_arguments_of_the_wrong_kind_are_named(scheme, fleet, error):
    with pytest.raises(getattr(dk.errors, error), match="where a"):
        dk.Runtime(scheme, fleet)


def test_an_inference_scheme_needs_fewer_workers_and_refuses_to_train():
    scheme = SCHEME.for_inference()
    model = nn.Linear(3, 2)
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        assert fleet.workers == 3
        dk.protect_(model, runtime)
        with torch.no_grad():
            model(torch.randn(4, 3))
        with pytest.raises(dk.errors.SchemeError, match="inference alone"):
            model(torch.randn(4, 3))


def test_a_closed_runtime_says_what_to_do():
    model = nn.Linear(3, 2)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
    with pytest.raises(dk.errors.FleetError, match="unprotect_"):
        model(torch.randn(4, 3))


def test_a_closed_fleet_says_what_to_do():
    model = nn.Linear(3, 2)
    with dk.local_fleet(SCHEME) as fleet:
        runtime = dk.Runtime(SCHEME, fleet)
        dk.protect_(model, runtime)
    with pytest.raises(dk.errors.FleetError, match="closed"):
        model(torch.randn(4, 3))


def test_more_workers_than_needed_stand_idle():
    scheme = dk.Scheme(inputs=4, colluders=1)
    with dk.local_fleet(scheme, record=True) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        model = nn.Linear(3, 2)
        dk.protect_(model, runtime)
        model(torch.randn(4, 3)).sum().backward()
        assert [bool(fleet.transcript(j)) for j in range(6)] == [True] * 4 + [False] * 2


def test_after_a_batch_of_one_the_warning_comes_once():
    with dk.Runtime(SCHEME, None) as runtime:
        model = nn.Linear(3, 2)
        dk.protect_(model, runtime)
        with pytest.warns(dk.errors.PrivacyWarning, match="batch of one"):
            model(torch.randn(1, 3))
        with warnings.catch_warnings(action="error"):
            model(torch.randn(1, 3))


def test_a_runtime_is_not_pickled():
    import pickle

    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(dk.Runtime(SCHEME, None))


@pytest.mark.parametrize(
    "damage", [{"input_bound": -1.0}, {"gradients": -1}, {"gradients": None}, {"input_bound": 0.0}]
)
def test_a_damaged_state_is_refused(damage):
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(nn.Sequential(nn.Linear(3, 2)), runtime)
        state = runtime.state_dict()
        with pytest.raises(dk.errors.SchemeError, match="damaged"):
            runtime.load_state_dict({"0": {**state["0"], **damage}})


def test_a_call_within_a_call_is_refused_and_the_outer_one_goes_on():
    """A signal handler that runs the model would take the answers that the interrupted call waits for."""
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with dk.local_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        expected, dispatch = model(x), fleet.dispatch

        def interrupted(*arguments):
            with pytest.raises(dk.errors.FleetError, match="inside a layer call"):
                model(x)
            return dispatch(*arguments)

        fleet.dispatch = interrupted
        assert torch.equal(model(x), expected)
