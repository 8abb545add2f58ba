"""What is counted on the meta device is what the model does, and what protect_ does with it."""

from dataclasses import replace

import pytest
import torch

import darknight as dk
from darknight.kernels import compiled_layers
from darknight.models import MODELS, build_model, describe
from darknight.nn.modules import op_of
from darknight.plan import Candidate
from darknight.plan.layers import ENCLAVE, MASKED, Resident, count_network
from darknight.runtime import sharing_of
from models.meta import on_meta
from nn.three_ways import everything
from ops.test_place import SERVER
from plan.requests import BATCH, CLASSES, SHAPE

SCHEME = dk.Scheme(inputs=3, colluders=1)
SLOW = replace(SERVER, product=1e-9)
SMALL = ("resnet-small", "mobilenet-small", "vgg-small", "small-cnn", "mlp")


def counted(name, shape=SHAPE, classes=CLASSES, batch_size=BATCH, training=True, **more):
    return count_network(name, shape=shape, classes=classes, batch_size=batch_size, training=training, **more)


@pytest.mark.parametrize("shape", [(3, 64, 96), (3, 32, 40)], ids=["ImageNet", "CIFAR"])
@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_description_and_their_ops_those_of_protect(name, shape):
    network, described = counted(name, shape, place="workers"), describe(name, shape, CLASSES)
    model = on_meta(name, shape, CLASSES)
    assert network.parameters == described.parameters
    assert len(network.products) == described.bilinear_layers
    macs = sum(layer.op.flops((1, *layer.input_shape), layer.weight_shape) for layer in network.products) // 2
    assert macs == described.macs
    for layer in network.products:
        assert layer.op == op_of(model.get_submodule(layer.name))
        assert layer.op.output_shape((1, *layer.input_shape), layer.weight_shape) == (1, *layer.output_shape)
    # Only what sees the examples themselves has an input without a gradient.
    assert [layer.name for layer in network.products if not layer.grad_input] == [network.products[0].name]
    assert sum(network.distinct.values()) == len(network.products)
    assert set(network.distinct) <= set(network.products)


EXAMPLE = torch.empty(BATCH, *SHAPE)
PLACES = {
    "structure": ({}, {}),
    "workers": ({"where": everything}, {"place": "workers"}),
    "cost": ({"example": EXAMPLE, "rates": SERVER}, {"place": "cost", "rates": SERVER}),
    "cost, slow products": ({"example": EXAMPLE, "rates": SLOW}, {"place": "cost", "rates": SLOW}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SMALL)
def test_where_and_why_are_what_the_report_of_protect_says(name, place, training):
    asked, planned = PLACES[place]
    scheme, model = (
        SCHEME if training else SCHEME.for_inference(),
        build_model(name, shape=SHAPE, classes=CLASSES, seed=0),
    )
    with dk.Runtime(scheme, None) as runtime:
        report = dk.protect_(model, runtime, **asked)
        dk.unprotect_(model)
    candidate = Candidate(inputs=3, colluders=1, spares=0, exact=True, training=training)
    assert candidate.sharing == sharing_of(scheme)
    layers = counted(name, training=training, **planned).under(candidate.sharing).layers
    stays = {layer.name: layer.why if isinstance(layer, Resident) else layer.stays for layer in layers}
    assert {(row.name, row.kind, row.where) for row in report.rows} == {
        (layer.name, layer.kind, ENCLAVE if stays[layer.name] else MASKED) for layer in layers
    }
    assert {row.name: row.why for row in report.enclave} == {name: why for name, why in stays.items() if why}


def test_the_places_differ():
    """The comparison says something: by cost, layers with a small batch stay, and with a large one all
    but the depthwise ones are sent."""
    sharing = Candidate(inputs=3, colluders=1, spares=0, exact=True, training=True).sharing

    def kept(size, **place):
        return {layer.name for layer in counted("mobilenet-small", batch_size=size, **place).under(sharing).kept}

    depthwise = kept(BATCH)
    assert len(depthwise) == 7
    assert not kept(BATCH, place="workers")
    assert len(kept(BATCH, place="cost", rates=SERVER)) == len(counted("mobilenet-small", place="workers").products)
    assert kept(50_000, place="cost", rates=SLOW) == depthwise


def kept_by_autograd(model, batch):
    """Bytes of everything that the graph holds on to, but for the parameters; each piece of memory once."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = model(batch)
    apart = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = sum(tensor.untyped_storage().nbytes() for place, tensor in held.items() if place not in apart)
    del scores
    return total


def pools(model):
    return [module for module in model.modules() if isinstance(module, torch.nn.MaxPool2d)]


@pytest.mark.skipif(compiled_layers.chosen() is None, reason="nothing was compiled: torch keeps what it keeps")
@pytest.mark.parametrize("name", SMALL)
def test_what_autograd_keeps_is_what_it_keeps_of_the_protected_model(name):
    model = build_model(name, shape=SHAPE, classes=CLASSES, seed=0)
    batch = torch.randn(BATCH, *SHAPE, generator=torch.Generator().manual_seed(0))
    indices = []
    handles = [pool.register_forward_hook(lambda *call: indices.append(call[2].numel())) for pool in pools(model)]
    plain = kept_by_autograd(model, batch) - 7 * sum(indices)  # torch keeps 8 bytes of each, and the enclave one
    for handle in handles:
        handle.remove()
    with dk.Runtime(dk.Scheme(inputs=3, colluders=1), None) as runtime:
        dk.protect_(model, runtime)
        protected = kept_by_autograd(model, batch)
        dk.unprotect_(model)
    found = counted(name).saved_bytes
    # Of a batch norm, what the CPU saves beside its input is some numbers a channel more or less than on meta.
    assert found == pytest.approx(protected, rel=0.02)
    relu6 = any(isinstance(module, torch.nn.ReLU6) for module in model.modules())  # of which torch keeps a copy more
    assert found < 0.8 * plain if relu6 else found == pytest.approx(plain, rel=0.01)
    assert counted(name, batch_size=2 * BATCH).saved_bytes > 1.8 * found


def test_operations_are_what_is_not_a_product_and_grow_with_the_batch():
    network = counted("resnet-small")
    kinds = {operation.kind: operation for operation in network.operations}
    assert {"batch norm", "ReLU", "addition", "average pooling"} <= set(kinds)
    assert kinds["ReLU"].calls == 2 * 7  # there and back
    relus = sum(layer.outputs for layer in network.products if "downsample" not in layer.name) - CLASSES
    assert kinds["ReLU"].flops == 2 * BATCH * relus  # one for each number, there and back
    assert kinds["ReLU"].bytes == (2 + 3) * 4 * BATCH * relus  # in place: read and written; back: two read, one written
    alone = counted("resnet-small", training=False)
    assert sum(each.bytes for each in alone.operations) < sum(each.bytes for each in network.operations) / 2
    assert alone.saved_bytes == BATCH * 3 * 12 * 8 * 4
    assert not any(layer.grad_input for layer in alone.products)


def test_counting_draws_nothing_and_builds_nothing():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    counted("vgg16", (3, 224, 224), 1000, batch_size=512)
    assert torch.equal(before, torch.get_rng_state())
