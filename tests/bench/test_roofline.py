"""The bytes that a step moves at least: by hand for one layer, and against what a real step sends."""

from dataclasses import replace

import pytest
from torch import nn

from darknight.bench import Bandwidth, Ceiling, roofline_of
from darknight.bench.ceiling import KEPT, THREADS
from darknight.bench.roofline import LINKS, Moved, floor_of
from darknight.bench.steps import CLASSES, examples, network, step_of
from darknight.coding import Scheme
from darknight.nn import protect_, unprotect_
from darknight.ops import Linear
from darknight.plan.layers import Network, Operation, Product, count_network
from darknight.runtime import Runtime
from fleet.threads import thread_fleet

SCHEME = Scheme(inputs=3, colluders=1)  # P = 5 in training, 4 of which answer; 4 in inference
BATCH = 5  # two virtual batches, the second with a gap
X, Y, W = 5 * 7, 5 * 2, 14  # numbers of a batch and of a 7 -> 2 layer
SHARE_X, SHARE_Y = 2 * 7, 2 * 2  # of one worker


def one_layer(*, training=True, grad_input=True, batch=BATCH):
    product = Product(
        name="fc",
        kind="Linear",
        op=Linear(),
        input_shape=(7,),
        output_shape=(2,),
        weight_shape=(2, 7),
        grad_input=grad_input,
    )
    relu = Operation(kind="ReLU", calls=2, bytes=100, flops=10)
    return Network(
        batch_size=batch, training=training, layers=(product,), operations=(relu,), parameters=16, saved_bytes=0
    )


def moved(read, written):
    return Moved(read=4 * read, written=4 * written)


def test_a_training_step_of_one_layer_by_hand():
    floor = floor_of(one_layer(), SCHEME, {"fc"})
    sent = 4 * SHARE_X, 4 * SHARE_Y  # there and back again; the fifth is a seed
    came = 4 * SHARE_Y, 4 * SHARE_X, 5 * W  # y, the gradient of x, that of the weight
    assert floor.apart == {
        "weights": moved(2 * W, W + W // 2),
        "scale": moved(X + Y, 0),
        "encode": moved(
            X + SHARE_X + Y + SHARE_Y,  # values, noise
            sent[0] + SHARE_X + sent[1] + SHARE_Y + Y,  # shares, noise, integers of the gradient
        ),
        "checksum": moved(X, 0),
        LINKS: moved(W, W),  # shares are made, and answers read, where they lie
        "decode": moved(sum(came), Y + X + W),
        "check": moved(2 * (X + Y + W), 0),
        "optimizer": moved(3 * 16, 2 * 16),
        KEPT: Moved(read=60, written=40),
    }
    assert floor.joined == {
        "weights": moved(W, W),
        "encode": moved(X + Y, sum(sent)),
        "decode": moved(sum(came), Y + X + W),
        "optimizer": moved(3 * 16, 2 * 16),
        KEPT: Moved(read=60, written=40),
    }
    assert floor.sealed == 4 * (5 * W + sum(sent) + sum(came))


def test_inference_sends_no_weights_and_has_nothing_behind_it():
    floor = floor_of(one_layer(training=False), SCHEME.for_inference(), {"fc"})
    assert floor.apart.keys() == {"weights", "scale", "encode", "decode", "check", KEPT}
    assert floor.apart["weights"] == moved(2 * W, 0)  # that they did not change is seen every time
    assert floor.sealed == 4 * (3 * SHARE_X + 4 * SHARE_Y)
    assert floor.apart["check"] == moved(X + W, 0)


def test_the_first_layer_has_no_gradient_of_its_input():
    whole, first = (floor_of(one_layer(grad_input=each), SCHEME, {"fc"}) for each in (True, False))
    assert whole.apart["decode"].read - first.apart["decode"].read == 4 * 4 * SHARE_X
    assert whole.apart["check"].read - first.apart["check"].read == 4 * (Y + W)


def test_a_layer_that_stays_reads_its_factors_and_writes_its_result():
    floor = floor_of(one_layer(), SCHEME, set())
    assert floor.apart == floor.joined
    assert floor.apart[KEPT] == moved(2 * (X + Y + W), X + Y + W) + Moved(read=60, written=40)
    assert floor.apart.keys() == {KEPT, "optimizer"}
    assert floor.sealed == 0


@pytest.mark.parametrize("model", ["resnet-small", "small-cnn"])
def test_sealed_links_encrypt_what_a_real_step_sends(model):
    private = network(model, 16)
    with thread_fleet(SCHEME) as fleet, Runtime(SCHEME, fleet) as runtime:
        report = protect_(private, runtime)
        step_of(private, *examples(BATCH, 16), training=True)()
        ledger = runtime.ledger
        assert not ledger.overflows
        counted = count_network(model, shape=(3, 16, 16), classes=CLASSES, batch_size=BATCH, training=True)
        floor = floor_of(counted, SCHEME, {row.name for row in report.masked})
        assert floor.sealed == ledger.sent_bytes + ledger.received_bytes
        unprotect_(private)


# --- beside what was measured -----------------------------------------------------------------------------------------
MEMORY = Bandwidth(copy=2e9, in_place=1e9, read=4e9, seal=1e9)
MASKED = tuple(
    name for name, module in network("small-cnn", 16).named_modules() if isinstance(module, nn.Conv2d | nn.Linear)
)


def measured(**changes):
    found = Ceiling(
        model="small-cnn",
        batch=BATCH,
        size=16,
        training=True,
        times=1,
        plain=0.5,
        layout="channels_first",
        enclave=0.25,
        wall=3.0,
        processors=4.0,
        scheme=SCHEME,
        masked=MASKED,
        phases={"encode": 0.1, "send": 0.05, "receive": 0.04, THREADS: 0.03, "rest": 0.03},
    )
    return replace(found, **changes)


def test_measured_phases_stand_beside_the_least():
    limits = roofline_of(measured(), MEMORY)
    assert limits.phases[LINKS].measured == pytest.approx(0.12)
    assert limits.phases["rest"].over is None  # nothing needs to be moved for it
    encode = limits.phases["encode"]
    assert encode.over == pytest.approx(0.1 / MEMORY.seconds(encode.moved.read, encode.moved.written))
    assert next(iter(limits.phases)) == LINKS
    assert limits.least == pytest.approx(sum(each.least for each in limits.phases.values()))
    assert limits.ceiling == pytest.approx(0.5 / limits.least)
    assert limits.joined > limits.ceiling
    assert limits.measured == 0.25


def test_faster_memory_raises_the_limit_and_sealing_lowers_it():
    once, twice = (
        roofline_of(measured(), MEMORY),
        roofline_of(measured(), Bandwidth(copy=4e9, in_place=1e9, read=8e9, seal=1e9)),
    )
    assert twice.ceiling == pytest.approx(2 * once.ceiling)
    sealed = roofline_of(measured(links="sealed"), MEMORY)
    assert sealed.ceiling < once.ceiling
    assert sealed.joined < once.joined
    assert sealed.phases["encode"].least == once.phases["encode"].least


def test_without_masked_layers_nothing_is_encoded():
    assert roofline_of(measured(), MEMORY).phases["encode"].least > 0
    assert roofline_of(measured(masked=()), MEMORY).phases["encode"].least == 0
