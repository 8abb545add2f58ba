"""Flops of workers are those that torch counts while they compute; those of the enclave follow the code."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from darknight.integrity.vectors import PLAN
from darknight.ops import either
from darknight.plan import Candidate, flops
from darknight.plan.flops import enclave_flops, worker_flops
from darknight.plan.layers import count_network

FIELD = Candidate(inputs=3, colluders=1, spares=1, exact=True, training=True)
REAL = Candidate(inputs=3, colluders=1, spares=1, exact=False, training=True)


def products(name, shape=(3, 12, 8), batch_size=7):
    network = count_network(name, shape=shape, classes=5, batch_size=batch_size, training=True)
    return list(network.distinct)


def computed(product, candidate, batch_size):
    """What torch multiplies and adds in each pass of one worker."""
    groups, prime = candidate.groups(batch_size), candidate.prime
    x, y, w = (groups, *product.input_shape), (groups, *product.output_shape), product.weight_shape

    def share(shape):
        if prime is None:
            return torch.zeros(shape, dtype=torch.float64)
        return torch.zeros(shape, dtype=torch.int32)

    def weights(shape):  # the largest that are sent: their size decides how many limbs there are
        return share(shape) + 2**10

    passes = {
        "forward": lambda: either.forward(product.op, share(x), weights(w), prime),
        "grad_input": lambda: either.grad_input(product.op, share(y), weights(w), x, prime),
        "grad_weight": lambda: either.grad_weight(product.op, share(x), share(y), w, prime),
    }
    found = {}
    for kind, compute in passes.items():
        with FlopCounterMode(display=False) as counter:
            compute()
        found[kind] = counter.get_total_flops()
    return found


@pytest.mark.parametrize("candidate", [FIELD, REAL], ids=["field", "real"])
@pytest.mark.parametrize("name", ["resnet-small", "mlp", "small-cnn"])
def test_a_worker_computes_what_the_plan_says(name, candidate):
    for product in products(name):
        found, said = computed(product, candidate, 7), worker_flops(product, candidate, 7)
        assert (said.forward, said.grad_weight) == (found["forward"], found["grad_weight"]), product
        assert said.grad_input == (found["grad_input"] if product.grad_input else 0), product


def test_long_sums_are_cut_into_chunks_and_counted_so():
    """128 images of 24x40: more than one chunk of the weight gradient stays exact."""
    one = Candidate(inputs=1, colluders=1, spares=0, exact=True, training=True)
    product = products("small-cnn", shape=(1, 48, 80), batch_size=96)[0]
    found, said = computed(product, one, 96), worker_flops(product, one, 96)
    assert said.grad_weight == found["grad_weight"]
    assert said.grad_weight == 2 * said.forward  # two limbs


def test_all_workers_together():
    said = worker_flops(products("small-cnn")[1], FIELD, 7)
    assert said.of_all(FIELD) == 5 * said.forward + 5 * said.grad_input + 5 * said.grad_weight  # K+M+E twice, K+2M
    more = Candidate(inputs=3, colluders=2, spares=0, exact=True, training=True)
    assert said.of_all(more) == 5 * said.forward + 5 * said.grad_input + 7 * said.grad_weight
    alone = Candidate(inputs=3, colluders=1, spares=1, exact=True, training=False)
    inference = worker_flops(products("small-cnn")[1], alone, 7)
    assert (inference.grad_input, inference.grad_weight) == (0, 0)
    assert inference.forward == said.forward


def test_the_enclave_masks_with_additions_alone():
    """M=1 in the field, K=3, E=0. A has 2+2+2, 4 and 1 entries that are not zero, and so has B; decoding 2 for each
    input."""
    plain = Candidate(inputs=3, colluders=1, spares=0, exact=True, training=True)
    product = products("small-cnn")[1]
    x, y, w, groups = product.inputs, product.outputs, product.weights, 3
    check = 2 * 2 * (7 * (x + y) + w)
    forward = 2 * groups * (11 * x + 6 * y) + check
    backward = 2 * groups * (11 * y + 6 * x) + 5 * w + 2 * check
    assert enclave_flops(product, plain, plain.code(), 7) == forward + backward


def test_parity_adds_up_answers_instead_of_weighing_them():
    """K=3, M=1, E=1: two answers more than decode, each compared with four. Weight gradients are always weighed."""
    product = products("small-cnn")[1]
    x, y, w, groups = product.inputs, product.outputs, product.weights, 3
    weighing, adding = 2 * 2 * (7 * (x + y) + w), 2 * 2 * 5 * groups
    plain, parity, both = (
        enclave_flops(product, replace(FIELD, integrity=integrity), FIELD.code(), 7)
        for integrity in ("freivalds", "parity", "both")
    )
    assert both - plain == adding * (x + y)
    assert both - parity == 2 * weighing


def test_the_check_is_repeated_as_often_as_it_says():
    assert PLAN.count == flops._REPETITIONS
