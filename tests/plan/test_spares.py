"""How many spares a plan takes: as many as pay, which depends on how often answers are missing."""

import pytest

from darknight.errors import PlanError
from darknight.plan import Prices, Speeds, make_plan
from plan.requests import request

ROUNDS = Speeds(worker_gflops=1e6, link_gbits=1e4, masking_gbytes=1e4, memory_gbytes=1e4, pass_ms=20.0)


def planned(**changes):
    given = {"model": "small-cnn", "spares": None, "max_inputs": 2, "operators": tuple("abcdefghij"), "speeds": ROUNDS}
    return make_plan(request(**{**given, **changes}))


def test_the_less_reliable_the_more_spares():
    """Rounds cost time here, shares hardly any."""
    found = [planned(unreliable=unreliable).scheme.spares for unreliable in (0.0, 1e-9, 0.001, 0.05, 0.3)]
    assert found == sorted(found)
    assert found[:2] == [0, 0]
    assert 0 < found[-2] < found[-1]


def test_who_never_misses_an_answer_needs_none():
    plan = planned(unreliable=0.0)
    assert (plan.scheme.spares, plan.spares.reason) == (0, "no answer is expected to be missing")
    assert plan.spares.others == ()
    assert plan.run.seconds.repeats == 0


def test_the_slower_masking_is_the_fewer_spares():
    def slow(gbytes):
        return Speeds(worker_gflops=1e6, link_gbits=1e4, masking_gbytes=gbytes, memory_gbytes=1e4, pass_ms=20.0)

    found = [planned(unreliable=0.05, speeds=slow(gbytes)).scheme.spares for gbytes in (1e4, 0.1, 0.001)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] == 0


def test_the_dearer_workers_are_the_fewer_spares():
    cheap = planned(unreliable=0.05, prices=Prices(enclave=1.0, worker=0.001))
    dear = planned(unreliable=0.05, prices=Prices(enclave=1.0, worker=100.0))
    assert cheap.scheme.spares > dear.scheme.spares == 0


def test_spares_shorten_no_wait():
    """Where a missing answer is noticed late, one more to wait for costs more than the second round."""
    late = Speeds(worker_gflops=1e6, link_gbits=1e4, masking_gbytes=1e4, pass_ms=20.0, notice_ms=1000.0)
    assert planned(unreliable=0.05, speeds=late).scheme.spares == 0


def test_too_few_workers_for_one():
    plan = planned(unreliable=0.3, operators=tuple("abcabc"))
    assert plan.scheme.spares == 0
    assert plan.spares.reason == "no worker is left: a single input needs all 3 that can be used"


def test_it_is_the_best_of_all_that_could_be_asked_for():
    for prices in (None, Prices(enclave=1.0, worker=0.01)):
        free = planned(unreliable=0.1, prices=prices, max_inputs=None, batch_size=9)
        asked = {
            spares: planned(unreliable=0.1, prices=prices, max_inputs=None, batch_size=9, spares=spares)
            for spares in range(8)
        }
        value = {spares: plan.run.seconds.total if prices is None else plan.money for spares, plan in asked.items()}
        assert free.scheme == asked[min(value, key=value.get)].scheme
        assert {choice.scheme.spares: choice.seconds.total for choice in free.spares.others} == {
            spares: asked[spares].run.seconds.total for spares in (free.scheme.spares - 1, free.scheme.spares + 1)
        }


def test_what_is_asked_for_is_obeyed():
    for spares in (0, 2):
        plan = planned(unreliable=0.05, spares=spares)
        assert (plan.scheme.spares, plan.spares.reason, plan.spares.others) == (spares, "as asked for", ())


def test_workers_that_are_left_stand_by():
    plan = planned(unreliable=0.05)
    assert plan.scheme.workers + plan.standbys == 10
    assert plan.scheme.workers == plan.scheme.inputs + 2 + plan.scheme.spares
    assert all(layer.shares == plan.scheme.workers for layer in plan.layers if layer.form is not None)


# --- parity -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("integrity", ["parity", "both"])
def test_parity_takes_what_it_needs_and_no_more(integrity):
    """An inference has no answer too many without a spare; in training there are those who idle."""
    inference = planned(training=False, integrity=integrity, unreliable=0.3)
    training = planned(integrity=integrity, unreliable=0.3)
    for plan, spares in ((inference, 1), (training, 0)):
        assert (plan.scheme.integrity, plan.scheme.spares, plan.spares.count) == (integrity, spares, spares)
        assert plan.scheme.parity_rows > 0
        assert plan.spares.reason.endswith("so more would save nothing")


def test_parity_without_the_spare_that_it_needs_says_so():
    with pytest.raises(PlanError, match="compares redundant answers") as refusal:
        planned(training=False, integrity="parity", spares=0)
    (remedy,) = refusal.value.remedies
    assert remedy.words == "spares=1"
    assert make_plan(remedy.request).scheme.spares == 1
    with pytest.raises(PlanError, match="inference with colluders=1 and spares=1 needs 3 or more"):
        planned(training=False, integrity="parity", operators=tuple("ab"))
