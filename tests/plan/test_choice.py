"""The choice is the cheapest safe scheme that the fleet has workers for."""

import random
from collections import Counter

import pytest

import darknight as dk
from darknight.errors import PlanError, UsageError
from darknight.fleet.seats import assignment
from darknight.plan import Prices, Speeds, make_plan
from plan.requests import request


def chosen(**changes):
    return make_plan(request(**{"model": "small-cnn", "spares": 0, "max_inputs": None, **changes}))


def test_without_prices_the_fastest_and_so_as_many_workers_as_there_are():
    plan = chosen(operators=tuple("abcdefg"), batch_size=20)
    assert (plan.scheme.inputs, plan.scheme.workers, plan.standbys) == (5, 7, 0)
    assert plan.considered == 5
    # Seven examples are two groups of four as well as of five, which would be more shares for nothing.
    assert chosen(operators=tuple("abcdefg"), batch_size=7).scheme.inputs == 4
    hours = [plan.run.seconds.total, *(choice.seconds.total for choice in plan.next_best)]
    assert hours == sorted(hours)
    assert isinstance(plan.scheme.arithmetic, dk.Field)
    assert plan.money is None


def test_with_prices_the_cheapest():
    """A dear enclave wants many workers, dear workers want few."""
    dear_enclave = chosen(operators=tuple("abcdefg"), batch_size=20, prices=Prices(enclave=100.0, worker=0.01))
    dear_workers = chosen(operators=tuple("abcdefg"), batch_size=20, prices=Prices(enclave=0.01, worker=100.0))
    assert dear_enclave.scheme.workers == 7
    assert dear_workers.scheme.workers < 5
    assert dear_workers.standbys == 7 - dear_workers.scheme.workers
    for plan in (dear_enclave, dear_workers):
        costs = [plan.money, *(choice.money for choice in plan.next_best)]
        assert costs == sorted(costs)
        prices = plan.request.prices
        hourly = prices.enclave + plan.scheme.workers * prices.worker
        assert plan.money == pytest.approx(plan.run.seconds.total / 3600 * hourly)


def test_between_equals_fewer_workers():
    """Time that does not depend on the scheme: passes alone."""
    fast = Speeds(worker_gflops=1e300, link_gbits=1e300, masking_gbytes=1e300, memory_gbytes=1e300, pass_ms=5.0)
    assert chosen(speeds=fast).scheme.workers == 3


def test_a_target_lets_the_two_arithmetics_compete():
    """Shares of floats are twice as large; weight gradients in the field take two products each."""
    slow_lines = Speeds(link_gbits=0.001, worker_gflops=1e6)
    slow_workers = Speeds(link_gbits=1e6, masking_gbytes=1e6, worker_gflops=0.01)
    assert isinstance(chosen(leakage_target=1.0, speeds=slow_lines).scheme.arithmetic, dk.Field)
    real = chosen(leakage_target=1.0, speeds=slow_workers)
    assert isinstance(real.scheme.arithmetic, dk.Real)
    assert 0.9 < real.run.nats <= 1.0
    assert real.request.epochs * real.step.nats == real.run.nats
    for target in (None, 0.0):  # nothing is preferred to a little, and none is all that 0 allows
        plan = chosen(leakage_target=target, speeds=slow_workers)
        assert isinstance(plan.scheme.arithmetic, dk.Field)
        assert plan.run.nats == 0


def test_gradients_are_always_masked_and_answers_checked():
    for changes in ({}, {"arithmetic": "real", "leakage_target": 1.0}):
        scheme = chosen(**changes).scheme
        assert (scheme.mask_gradients, scheme.integrity, scheme.mixing) == (True, "freivalds", "systematic")


def test_a_batch_bounds_the_inputs():
    assert chosen(batch_size=2).scheme.inputs == 2
    assert chosen(max_inputs=3).scheme.inputs == 3


def test_usable_workers_are_those_that_the_fleet_would_seat():
    """The rule of the fleet, at most M shares of a masking to one operator, on random fleets."""
    draw = random.Random(5)
    for _ in range(300):
        operators = tuple(draw.choice("abcdef") for _ in range(draw.randint(1, 14)))
        colluders = draw.randint(1, 4)
        asked = request(operators=operators, colluders=colluders, model="mlp")
        assert asked.usable_workers == len(assignment(operators, 99, colluders)), (operators, colluders)


def test_a_plan_fits_the_seats_of_its_fleet():
    for operators in ("aabbccdd", "aaabcdef", "abcabcabc"):
        for colluders in (1, 2):
            try:
                plan = chosen(operators=tuple(operators), colluders=colluders)
            except PlanError:
                continue
            seats = assignment(tuple(operators), plan.scheme.workers, colluders)
            assert len(seats) == plan.scheme.workers
            assert max(Counter(operators[worker] for worker in seats).values()) <= colluders


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"batch_size": 0}, "batch size 0"),
        ({"examples": 0}, "examples 0"),
        ({"epochs": 0}, "epochs 0"),
        ({"epochs": True}, "epochs True"),
        ({"colluders": 0}, "colluders 0"),
        ({"spares": -1}, "spares -1"),
        ({"max_inputs": 0}, "max inputs 0"),
        ({"operators": ()}, "no workers"),
        ({"arithmetic": "paper"}, "use one of auto, field, real"),
        ({"arithmetic": "real"}, "without a leakage target"),
        ({"leakage_target": -1.0}, "leakage target -1"),
        ({"leakage_target": float("nan")}, "leakage target nan"),
        ({"model": "lenet"}, "unknown model 'lenet'"),
        ({"model": "vgg16"}, "vgg16 needs 32x32 or more"),
    ],
)
def test_nonsense_is_refused(changes, complaint):
    with pytest.raises(UsageError, match=complaint):
        chosen(**changes)


@pytest.mark.parametrize("make", [lambda: Speeds(link_gbits=0), lambda: Speeds(pass_ms=-1), lambda: Prices(worker=-1)])
def test_nonsense_of_speeds_and_prices_is_refused(make):
    with pytest.raises(UsageError, match="needs a number"):
        make()
