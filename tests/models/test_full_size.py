"""The paper's three networks at 224x224 through separate worker processes: what each layer gives, and a whole step.

Nothing stays in the enclave for being cheap there: depthwise layers are sent too.
"""

import copy
import statistics

import pytest
import torch

import darknight as dk
from models.full_size import (
    batch_of,
    cosine,
    forget_peak,
    layer_results,
    network,
    peak_mebibytes,
    peaks,
    plain_calls,
    scores,
    training_step,
    whole,
)
from nn.three_ways import everything

pytestmark = pytest.mark.full

NETWORKS = {"vgg16": 4, "resnet152": 4, "mobilenet-v2": 8}  # and images in a batch
SCHEMES = {
    "field": dk.Scheme(inputs=4, colluders=1),
    "real": dk.Scheme(inputs=4, colluders=1, arithmetic=dk.Real(noise_std=2e4, dtype=torch.float64)),
    "paper": dk.Scheme.paper(),
}


@pytest.fixture(scope="module", params=NETWORKS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def batch(name):
    return batch_of(NETWORKS[name])


@pytest.fixture(scope="module")
def calls(name, batch):
    return plain_calls(network(name), batch)


@pytest.mark.parametrize("label", ["field", "paper"])
def test_a_training_step_and_an_inference_batch(name, batch, label, capsys):
    """How close the gradient of a whole network is, is reported and not promised: at its start, a deep network with
    batch norm over a few images turns one rounding into another gradient, in the clear as well.
    """
    model, scheme = network(name), SCHEMES[label]
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet, seed=3) as runtime:
        dk.protect_(model, runtime, where=everything)
        forget_peak()
        step = training_step(model, batch)
        memory = {"enclave": peak_mebibytes(), "largest worker": max(peaks(fleet)), "all workers": sum(peaks(fleet))}
        dk.unprotect_(model)
        assert runtime.ledger.summary()["integrity"]["failed"] == 0
    inference = scheme.for_inference()
    with dk.local_fleet(inference) as fleet, dk.Runtime(inference, fleet) as runtime:
        assert len(fleet.processes) == scheme.inputs + scheme.colluders + scheme.spares
        dk.protect_(model, runtime, where=everything)
        answers = scores(model, batch)
        dk.unprotect_(model)
    if label == "field":
        alone_step, alone_answers = alone(name, batch, scheme)
        assert step.state.keys() == alone_step.state.keys()
        for key, value in alone_step.state.items():
            assert torch.equal(step.state[key], value), key
        assert torch.equal(answers, alone_answers)

    plain = whole(training_step(network(name), batch).gradients)
    reference = whole(training_step(network(name), batch, torch.float64).gradients)
    with capsys.disabled():
        print(
            f"\n{name}, {label}: gradient of all weights, cosine with plain float64: "
            f"{cosine(whole(step.gradients), reference):.6f}; plain float32: {cosine(plain, reference):.6f}; "
            + ", ".join(f"{who} {size:,} MiB" for who, size in memory.items())
        )
    assert all(bool(value.isfinite().all()) for value in step.state.values())
    clear = copy.deepcopy(model)  # the very weights that the step ended with
    assert cosine(answers, scores(clear, batch)) > 0.98


def alone(name, batch, scheme):
    """The same arithmetic by the enclave alone."""
    model = network(name)
    with dk.Runtime(scheme, None, seed=3) as runtime:
        dk.protect_(model, runtime, where=everything)
        step = training_step(model, batch)
        dk.unprotect_(model)
    inference = scheme.for_inference()
    with dk.Runtime(inference, None) as runtime:
        dk.protect_(model, runtime, where=everything)
        answers = scores(model, batch)
        dk.unprotect_(model)
    return step, answers


@pytest.mark.parametrize("label", SCHEMES)
def test_every_layer_gives_what_it_gives_in_the_clear(name, batch, calls, label, capsys):
    """On x and delta of the plain model, so that no layer answers for the errors of another."""
    plain, protected = network(name), network(name)
    scheme = SCHEMES[label]
    found = {"output": [], "grad_input": [], "grad_weight": []}
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(protected, runtime, where=everything)
        for layer, call in calls.items():
            expected = layer_results(plain.get_submodule(layer), call)
            for what, value in layer_results(protected.get_submodule(layer), call).items():
                found[what].append(cosine(value, expected[what]))
        dk.unprotect_(protected)
        assert runtime.ledger.summary()["integrity"]["failed"] == 0
    with capsys.disabled():
        print(f"\n{name}, {label}, {len(calls)} layers, cosine with plain float32 (least, median):", end=" ")
        print(", ".join(f"{what} {min(all_):.6f} {statistics.median(all_):.6f}" for what, all_ in found.items()))
    for what, cosines in found.items():
        assert len(cosines) == len(calls)
        if label == "paper":
            assert statistics.median(cosines) >= 0.99, what
        else:
            assert min(cosines) >= 0.999, what
