"""What missing answers cost in a plan, and that the runtime does what the model says of it."""

import math
import random
import string
import time

import pytest
import torch

import darknight as dk
from darknight.models import build_model
from darknight.plan import Candidate, Speeds
from darknight.plan.flops import worker_flops
from darknight.plan.layers import count_network
from darknight.plan.misses import RELIABLE, Misses, repeats
from darknight.types import Pass
from fleet.faults import Plan, faulty_fleet
from plan.requests import BATCH, CLASSES, SHAPE

ENDLESS = 1e300


def candidate(**changes):
    return Candidate(**{"inputs": 3, "colluders": 1, "spares": 0, "exact": True, "training": True, **changes})


def speeds(**slow):
    fast = dict.fromkeys(("worker_gflops", "link_gbits", "masking_gbytes", "memory_gbytes", "enclave_gflops"), ENDLESS)
    return Speeds(**{**fast, "pass_ms": 0.0, **slow})


def layers(training=True):
    """The first has no input gradient, the second has one."""
    return count_network("small-cnn", shape=SHAPE, classes=CLASSES, batch_size=BATCH, training=training).products[:2]


# --- probabilities ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("unreliable", [0.0, 0.001, 0.2, 0.5])
@pytest.mark.parametrize(("spared", "asked"), [(0, 1), (0, 5), (1, 5), (4, 7), (7, 7), (9, 7)])
def test_the_tail_of_the_binomial(unreliable, spared, asked):
    """Added up from the other end."""
    expected = sum(
        math.comb(asked, missing) * unreliable**missing * (1 - unreliable) ** (asked - missing)
        for missing in range(spared + 1, asked + 1)
    )
    assert Misses(unreliable=unreliable).more_than(spared, asked) == pytest.approx(expected, abs=1e-12)


def test_counted_by_drawing():
    draw = random.Random(3)
    found = sum(sum(draw.random() < 0.15 for _ in range(6)) > 1 for _ in range(20_000)) / 20_000
    assert Misses(unreliable=0.15).more_than(1, 6) == pytest.approx(found, abs=0.012)
    assert Misses(unreliable=0.15).more_than(0, 6) != pytest.approx(found, abs=0.012)  # the comparison can fail


# --- seconds ----------------------------------------------------------------------------------------------------------
def test_who_is_reliable_costs_nothing():
    for product in layers():
        assert repeats(product, candidate(), BATCH, Speeds(notice_ms=1000.0), RELIABLE) == 0


def test_second_rounds_of_each_pass():
    """Passes alone: forward and input gradient need K + M of K + M + E, the weight gradient all of K + 2M."""
    first, second = layers()
    misses = Misses(unreliable=0.1, standbys=1)
    for spares in (0, 1, 2):
        short, lost = misses.more_than(spares, 4 + spares), misses.more_than(0, 5)
        tried = candidate(spares=spares)
        found = [repeats(product, tried, BATCH, speeds(pass_ms=1000.0), misses) for product in (first, second)]
        assert found == pytest.approx([short + lost, 2 * short + lost])
    inference = candidate(training=False, spares=1)
    found = repeats(layers(training=False)[0], inference, BATCH, speeds(pass_ms=1000.0), misses)
    assert found == pytest.approx(misses.more_than(1, 5))


def test_a_spare_is_one_more_to_wait_for():
    product, misses = layers()[1], Misses(unreliable=0.1, standbys=1)
    for spares in (0, 1, 2):
        found = repeats(product, candidate(spares=spares), BATCH, speeds(notice_ms=1000.0), misses)
        assert found == pytest.approx(2 * misses.more_than(0, 5 + spares))


def test_parity_wants_every_answer():
    product, misses = layers()[1], Misses(unreliable=0.1, standbys=1)
    for spares in (0, 1):
        tried = candidate(spares=spares, integrity="parity")
        found = repeats(product, tried, BATCH, speeds(pass_ms=1000.0), misses)
        assert found == pytest.approx(2 * misses.more_than(0, 5 + spares) + misses.more_than(0, 5))


def test_who_stands_in():
    """In training somebody idles; in inference it is a standby, or else the enclave."""
    product = layers(training=False)[0]
    tried, short = candidate(training=False), Misses(unreliable=0.1).more_than(0, 4)
    flops = worker_flops(product, tried, BATCH).forward
    slow_workers, slow_enclave = speeds(worker_gflops=2.0), speeds(enclave_gflops=2.0)
    for standbys, slow, fast in ((1, slow_workers, slow_enclave), (0, slow_enclave, slow_workers)):
        misses = Misses(unreliable=0.1, standbys=standbys)
        assert repeats(product, tried, BATCH, slow, misses) == pytest.approx(short * flops / 2e9)
        assert repeats(product, tried, BATCH, fast, misses) == pytest.approx(0, abs=1e-12)


# --- what is said of the runtime, by the runtime ----------------------------------------------------------------------
def one_pass(scheme, plans, *, standbys=0, patience=60.0):
    """One batch of inference, with the masked layers of a small network; the ledger, and how many tasks there were."""
    model = build_model("small-cnn", shape=SHAPE, classes=CLASSES, seed=0).eval()
    images = torch.randn(BATCH, *SHAPE, generator=torch.Generator().manual_seed(2))
    operators = string.ascii_lowercase[: scheme.workers + standbys]
    with faulty_fleet(operators, plans, patience=patience) as fleet, dk.Runtime(scheme, fleet, seed=0) as runtime:
        dk.protect_(model, runtime)
        with torch.no_grad():
            model(images)
    return runtime.ledger, sum(len(plan.seen) for plan in plans.values())


@pytest.mark.usefixtures("one_thread")
def test_the_runtime_asks_again_only_if_more_are_missing_than_there_are_spares():
    """A worker refuses in the first of four layers, after which it is asked again as if nothing had been."""
    none = dk.Scheme(inputs=2, colluders=1, training=False)
    one = dk.Scheme(inputs=2, colluders=1, spares=1, training=False)
    for worker in range(4):
        ledger, tasks = one_pass(one, {worker: Plan({1: "refuse"})})
        assert (ledger.missed.total(), tasks) == (1, 4 * 4)  # nobody was asked a second time
        assert not ledger.done_in_enclave
    for worker in range(3):
        ledger, tasks = one_pass(none, {worker: Plan({1: "refuse"})})
        assert (ledger.missed.total(), tasks) == (1, 4 * 3)
        assert ledger.done_in_enclave[Pass.FORWARD] == 1
    ledger, tasks = one_pass(one, {0: Plan({1: "refuse"}), 1: Plan({1: "refuse"})})
    assert ledger.done_in_enclave[Pass.FORWARD] == 1
    # Who dies is replaced by a standby, in a second round.
    ledger, tasks = one_pass(none, {0: Plan({1: "die"})}, standbys=1)
    assert (ledger.missed.total(), tasks) == (1, 4 * 3 + 1)
    assert not ledger.done_in_enclave


@pytest.mark.usefixtures("one_thread")
def test_the_runtime_waits_for_a_late_worker_although_there_is_a_spare():
    """If this ever ends before its patience, a spare is worth more than the plan says."""
    plans = {0: Plan({1: "hang"})}
    begun = time.monotonic()
    ledger, _ = one_pass(dk.Scheme(inputs=2, colluders=1, spares=1, training=False), plans, patience=1.5)
    plans[0].woken.set()
    assert ledger.missed.total() == 1
    assert time.monotonic() - begun > 1.5
