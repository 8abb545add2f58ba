"""Seconds and money: sums of counted work over stated speeds."""

import pytest

from darknight.plan import Candidate, Prices, Speeds, make_plan
from darknight.plan.costs import Seconds, alone_seconds, money, run_seconds, step_seconds
from darknight.plan.flops import worker_flops
from darknight.plan.layers import count_network
from darknight.plan.misses import Misses
from plan.requests import request

ENDLESS = 1e300
NETWORK = count_network("small-cnn", shape=(3, 12, 8), classes=5, batch_size=7, training=True)
FIELD = Candidate(inputs=3, colluders=1, spares=1, exact=True, training=True)


def speeds(**slow):
    fast = dict.fromkeys(("worker_gflops", "link_gbits", "masking_gbytes", "memory_gbytes", "enclave_gflops"), ENDLESS)
    return Speeds(**{**fast, "pass_ms": 0.0, **slow})


def test_passes_alone():
    """Four layers, a forward and a backward pass each."""
    assert step_seconds(NETWORK, FIELD, 7, speeds(pass_ms=2.0)).total == pytest.approx(8 * 0.002)


def test_workers_alone():
    one = [worker_flops(product, FIELD, 7) for product in NETWORK.products]
    flops = sum(each.forward + each.grad_input + each.grad_weight for each in one)
    found = step_seconds(NETWORK, FIELD, 7, speeds(worker_gflops=3.0))
    assert found.workers == pytest.approx(flops / 3e9)
    assert found.total == pytest.approx(found.workers)


def test_lines_alone_have_the_part_of_one_worker():
    plan = make_plan(request(model="small-cnn"))
    traffic = plan.step.traffic
    found = step_seconds(NETWORK, FIELD, 7, speeds(link_gbits=1.0))
    # Some workers have less to send or to get; none has more than all of them together over the smallest number.
    assert 8 * (traffic.sent + traffic.received) / 6 < found.links * 1e9 < 8 * (traffic.sent + traffic.received) / 5


def test_masking_and_torch():
    plan = make_plan(request(model="small-cnn"))
    traffic = plan.step.traffic
    shares = traffic.sent + traffic.received - traffic.weights - traffic.weight_gradients
    found = step_seconds(NETWORK, FIELD, 7, speeds(masking_gbytes=0.5))
    assert found.enclave == pytest.approx(shares / 0.5e9)
    moved = sum(operation.bytes for operation in NETWORK.operations) + 20 * NETWORK.parameters
    found = step_seconds(NETWORK, FIELD, 7, speeds(memory_gbytes=2.0))
    assert found.enclave == pytest.approx((moved + traffic.weights + traffic.weight_gradients) / 2e9)


def test_a_run_is_the_sum_of_its_steps():
    asked = request(model="small-cnn", examples=17, batch_size=7, epochs=5, unreliable=0.2)
    found = run_seconds(NETWORK, FIELD, asked)
    misses = Misses(unreliable=0.2, standbys=0)
    steps = [step_seconds(NETWORK, FIELD, size, asked.speeds, misses) for size in (7, 7, 3)]
    assert all(step.repeats > 0 for step in steps)
    assert found.total == pytest.approx(5 * sum(step.total for step in steps))


def test_alone_there_is_nothing_but_products_and_torch():
    asked = request(model="small-cnn", examples=14, batch_size=7, epochs=3, speeds=speeds(enclave_gflops=2.0))
    one = [product.op.flops((7, *product.input_shape), product.weight_shape) for product in NETWORK.products]
    assert alone_seconds(NETWORK, asked) == pytest.approx(3 * 2 * (3 * sum(one) - one[0]) / 2e9)


def test_money_is_for_all_machines_all_the_time():
    assert money(Seconds(enclave=1800, links=900, workers=600, repeats=300), 6, Prices(enclave=2.0, worker=0.5)) == 5.0
