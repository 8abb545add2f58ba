"""The door of the runtime: what it refuses, and what it says."""

import warnings

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.fleet import Fleet, Member
from darknight.types import Pass
from darknight.wire import in_process
from fleet.threads import thread_fleet

SCHEME = dk.Scheme(inputs=2, colluders=1)


def idle_fleet(operators, **options):
    members = [Member(f"w{j}", operator, lambda: in_process()[0]) for j, operator in enumerate(operators)]
    return Fleet(members, **options)


def test_a_fleet_that_is_too_small_is_refused_with_the_numbers():
    with pytest.raises(dk.errors.FleetError, match=r"3 workers; this scheme needs 4 \(inputs=2, colluders=1, spares=0"):
        dk.Runtime(SCHEME, idle_fleet(["a", "b", "c"]))


def test_one_operator_may_not_hold_more_shares_than_colluders():
    with pytest.raises(dk.errors.FleetError, match="operator 'a' runs w0, w2; operator 'b'"):
        dk.Runtime(SCHEME, idle_fleet(["a", "b", "a", "c"]))
    dk.Runtime(dk.Scheme(inputs=2, colluders=2), idle_fleet(["a", "b", "a", "c", "b", "c"]))


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**63, "0"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(dk.errors.UsageError, match="seed"):
        dk.Runtime(SCHEME, None, seed=seed)


@pytest.mark.parametrize(("scheme", "fleet", "error"), [("field", None, "SchemeError"), (SCHEME, 6, "FleetError")])
def test_arguments_of_the_wrong_kind_are_named(scheme, fleet, error):
    with pytest.raises(getattr(dk.errors, error), match="where a"):
        dk.Runtime(scheme, fleet)


def test_an_inference_scheme_needs_fewer_workers_and_refuses_to_train():
    scheme = SCHEME.for_inference()
    model = nn.Linear(3, 2)
    with thread_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        assert fleet.workers == 3
        dk.protect_(model, runtime)
        with torch.no_grad():
            model(torch.randn(4, 3))
        with pytest.raises(dk.errors.SchemeError, match="inference alone"):
            model(torch.randn(4, 3))


def test_alone_an_inference_scheme_refuses_to_train_as_well():
    with dk.Runtime(SCHEME.for_inference(), None) as runtime:
        model = nn.Linear(3, 2)
        dk.protect_(model, runtime)
        with pytest.raises(dk.errors.SchemeError, match="inference alone"):
            model(torch.randn(4, 3))


def test_what_is_closed_is_refused_at_the_door():
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        pass
    with pytest.raises(dk.errors.FleetError, match="closed"):
        dk.Runtime(SCHEME, fleet)
    with pytest.raises(dk.errors.ProtectError, match="closed"):
        dk.protect_(nn.Linear(3, 2), runtime)
    assert "closed" in repr(fleet)
    assert "closed" in repr(runtime)


def test_a_closed_runtime_says_what_to_do():
    model = nn.Linear(3, 2)
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(model, runtime)
    with pytest.raises(dk.errors.FleetError, match="unprotect_"):
        model(torch.randn(4, 3))


def test_a_closed_fleet_says_what_to_do():
    model = nn.Linear(3, 2)
    with thread_fleet(SCHEME) as fleet:
        runtime = dk.Runtime(SCHEME, fleet)
        dk.protect_(model, runtime)
    with pytest.raises(dk.errors.FleetError, match="closed"):
        model(torch.randn(4, 3))


def test_more_workers_than_needed_stand_idle():
    scheme = dk.Scheme(inputs=4, colluders=1)
    with thread_fleet(scheme, record=True) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        model = nn.Linear(3, 2)
        dk.protect_(model, runtime)
        model(torch.randn(4, 3)).sum().backward()
        assert [bool(fleet.transcript(j)) for j in range(6)] == [True] * 4 + [False] * 2


def test_after_a_batch_of_one_the_warning_comes_once():
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
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
    "damage", [{"input_bound": -1.0}, {"gradients": -1}, {"gradients": None}, {"input_bound": "1"}]
)
def test_a_damaged_state_is_refused(damage):
    with dk.Runtime(SCHEME, None) as runtime:
        dk.protect_(nn.Sequential(nn.Linear(3, 2)), runtime)
        state = runtime.state_dict()
        with pytest.raises(dk.errors.UsageError, match="damaged"):
            runtime.load_state_dict({**state, "layers": {"0": {**state["layers"]["0"], **damage}}})


def test_a_call_within_a_call_is_refused_and_the_outer_one_goes_on():
    """A signal handler that runs the model would take the answers that the interrupted call waits for."""
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        expected, gather = model(x), fleet.gather

        def interrupted(*arguments, **named):
            with pytest.raises(dk.errors.FleetError, match="inside a layer call"):
                model(x)
            return gather(*arguments, **named)

        fleet.gather = interrupted
        assert torch.equal(model(x), expected)


def test_the_ledger_counts_the_bytes_that_workers_saw():
    with thread_fleet(SCHEME, record=True) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
        dk.protect_(model, runtime)
        for _ in range(2):
            model(torch.randn(5, 3)).square().sum().backward()
            with torch.no_grad():
                model[0].weight.mul_(2)
        seen = [record for worker in range(fleet.workers) for record in fleet.transcript(worker)]
        replies = sum(record.tensor.nbytes for record in seen if record.kind.endswith("reply"))
        assert runtime.ledger.received_bytes == replies > 0
        seeded = [record.tensor.nbytes for record in seen if record.detail.get("seed") is not None]
        assert len(seeded) == 2 * 2 * 2  # a share of each pass of each layer came as a seed, and was no tensor
        assert runtime.ledger.sent_bytes == sum(record.tensor.nbytes for record in seen) - replies - sum(seeded)


def test_workers_that_do_not_answer_are_named_and_their_time_is_waiting_time():
    """Nobody sits at the other end; in the end the enclave has done everything itself."""
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with dk.Runtime(SCHEME, None) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        expected = model(x)
        dk.unprotect_(model)
    with idle_fleet("abcd", patience=0.2) as fleet, dk.Runtime(SCHEME, fleet) as runtime, torch.no_grad():
        dk.protect_(model, runtime)
        assert torch.equal(model(x), expected)
        ledger = runtime.ledger
        assert set(ledger.missed) == {"w0", "w1", "w2", "w3"}
        assert "worker 0 (w0) failed: it did not answer in time" in ledger.reasons["w0"]
        assert ledger.done_in_enclave[Pass.FORWARD] == 3
        assert ledger.waiting_seconds >= 0.2
        assert ledger.layer_seconds - ledger.waiting_seconds < 0.5
        assert ledger.sent_bytes > 0
