"""What a product costs here and there, and where it goes for that, from rates that are given: the same everywhere."""

from dataclasses import replace

import pytest

from darknight.errors import UsageError
from darknight.ops import Conv, ConvTranspose, Linear
from darknight.ops.cost import Form, Rates, Sharing, alone_seconds, sent_seconds
from darknight.ops.place import DEPTHWISE, PLACES, check_place, stays_by_cost, stays_by_structure

NOTHING = Rates(**dict.fromkeys(Rates.__dataclass_fields__, 0.0))
# Of one core with AVX2, rounded.
SERVER = Rates(
    product=1e-11,
    grouped=1e-10,
    copy=1e-10,
    encode=1e-10,
    decode=1e-10,
    survey=4e-10,
    rounding=6e-10,
    weigh=7e-10,
    fold=3e-8,
    check=4e-4,
    message=3e-4,
    link=3e-10,
    call=3e-4,
)
SHARING = Sharing(inputs=4, colluders=1, workers=6, computing=5, answering=6, training=True)
INFERENCE = Sharing(inputs=4, colluders=1, workers=5, computing=5, answering=5, training=False)

DENSE = Form(op=Conv.make((3, 3), padding=1), x_shape=(16, 256, 56, 56), w_shape=(256, 256, 3, 3))
NARROW = Form(op=Conv.make((1, 1)), x_shape=(16, 16, 112, 112), w_shape=(96, 16, 1, 1))
WISE = Form(op=Conv.make((3, 3), padding=1, groups=96), x_shape=(16, 96, 56, 56), w_shape=(96, 1, 3, 3))
HEAD = Form(op=Linear(), x_shape=(8, 25088), w_shape=(4096, 25088))


@pytest.mark.parametrize(
    ("op", "w_shape", "stays"),
    [
        (Conv.make((3, 3), groups=6), (6, 1, 3, 3), True),
        (Conv.make((3, 3), groups=6), (12, 1, 3, 3), True),  # two outputs of each channel
        (Conv.make((3,), groups=6), (6, 1, 3), True),
        (ConvTranspose.make((2, 3), groups=6), (6, 1, 2, 3), True),
        (ConvTranspose.make((2, 3), groups=6), (6, 2, 2, 3), True),
        (Conv.make((3, 3), groups=3), (6, 2, 3, 3), False),
        (ConvTranspose.make((2, 3), groups=3), (6, 2, 2, 3), False),
        (Conv.make((3, 3)), (6, 1, 3, 3), False),  # grey images: one channel, and no groups
        (Linear(), (6, 1), False),
    ],
)
def test_by_structure_depthwise_convolutions_stay(op, w_shape, stays):
    assert stays_by_structure(op, w_shape) == (DEPTHWISE if stays else "")


@pytest.mark.parametrize("sharing", [SHARING, INFERENCE], ids=["training", "inference"])
def test_each_goes_where_it_is_cheaper(sharing):
    assert not stays_by_cost([DENSE], sharing, SERVER)
    for form in (WISE, NARROW):
        assert "cheaper to compute" in stays_by_cost([form], sharing, SERVER)
        alone, sent = alone_seconds(form, SERVER, training=sharing.training), sent_seconds(form, sharing, SERVER)
        assert (alone < sent) is True


def test_the_reason_says_both_costs():
    rates = replace(NOTHING, product=1e-9, call=0.02)
    form = Form(op=Linear(), x_shape=(5, 100), w_shape=(1000, 100))  # 10^6 flops, three passes
    assert stays_by_cost([form], SHARING, rates) == ("cheaper to compute (3 ms a step) than to mask and check (40 ms)")
    assert "(6 ms a step) than to mask and check (80 ms)" in stays_by_cost([form, form], SHARING, rates)


def test_a_layer_that_is_never_called_is_sent():
    assert not stays_by_cost([], SHARING, SERVER)


def test_weights_decide_about_a_large_layer_with_a_small_batch():
    """They are new in every step, go to everybody, and their gradient comes back from everybody. Without a training
    they are still compared with those that were sent, and weighed by the check.
    """
    assert stays_by_cost([HEAD], SHARING, SERVER)
    assert not stays_by_cost([replace(HEAD, x_shape=(2048, 25088))], SHARING, SERVER)
    assert sent_seconds(HEAD, INFERENCE, SERVER) < sent_seconds(HEAD, SHARING, SERVER) / 4
    assert stays_by_cost([HEAD], INFERENCE, SERVER)


# Each rate is what it says: alone among rates of 0, it counts what a hand can count. Shapes have three examples of
# K = 2: two virtual batches.
FORM = Form(op=Conv.make((1, 1), groups=2), x_shape=(3, 4, 5, 1), w_shape=(6, 2, 1, 1))
X, Y, W = 3 * 4 * 5, 3 * 6 * 5, 12
GX, GY = 2 * 4 * 5, 2 * 6 * 5  # numbers of one share of x, and of y
FEW = Sharing(inputs=2, colluders=1, workers=5, computing=4, answering=4, training=True)
COUNTS = {
    "copy": 4 * W,
    "encode": 4 * (X + 7 * GX + 2 * W + Y + 7 * GY + Y),
    "decode": 4 * (4 * GY + Y + 4 * GX + X + 4 * W + W),
    "survey": X + W + Y + X,
    "rounding": Y,
    "weigh": (X + W) + (Y + W) + (X + Y),
    "fold": 3 * 2 * (5 + 5),
    "check": 3,
    "message": 3 * 5,
    "link": 0,
    "call": 2,
    "product": 0,
    "grouped": 0,
}


@pytest.mark.parametrize("rate", COUNTS)
def test_what_sending_counts(rate):
    assert sent_seconds(FORM, FEW, replace(NOTHING, **{rate: 1.0})) == COUNTS[rate]


@pytest.mark.parametrize("rate", COUNTS)
def test_what_sending_to_other_machines_counts(rate):
    """Shares, answers, weights and their gradients are sealed, and weights are not written for who is here."""
    other = {"copy": 0, "message": 2 * 3 * 5, "link": 4 * (5 * GX + 4 * GY + 5 * GY + 4 * GX + 5 * W + 4 * W)}
    rates = replace(NOTHING, **{rate: 1.0})
    assert sent_seconds(FORM, replace(FEW, elsewhere=1.0), rates) == other.get(rate, COUNTS[rate])
    if rate in other:  # and so much of it as goes there
        between = (COUNTS[rate] + 3 * other[rate]) / 4
        assert sent_seconds(FORM, replace(FEW, elsewhere=0.75), rates) == between


def test_who_gets_a_seed_is_sent_nothing_else():
    seeded = replace(FEW, seeded=2, elsewhere=1.0)
    assert sent_seconds(FORM, seeded, replace(NOTHING, encode=1.0)) == COUNTS["encode"] - 4 * 2 * (GX + GY)
    less = sent_seconds(FORM, replace(FEW, elsewhere=1.0), replace(NOTHING, link=1.0)) - 4 * 2 * (GX + GY)
    assert sent_seconds(FORM, seeded, replace(NOTHING, link=1.0)) == less


def test_a_layer_that_pays_here_need_not_pay_on_other_machines():
    between = Form(op=Conv.make((1, 1)), x_shape=(16, 256, 28, 28), w_shape=(256, 256, 1, 1))
    assert not stays_by_cost([between], SHARING, SERVER)
    assert stays_by_cost([between], replace(SHARING, elsewhere=1.0), SERVER)


def test_what_is_not_wanted_is_not_counted():
    first = replace(FORM, grad_input=False)
    assert sent_seconds(first, FEW, replace(NOTHING, check=1.0)) == 2
    assert sent_seconds(FORM, replace(FEW, checked=False), replace(NOTHING, check=1.0)) == 1  # the weights' gradient
    unchecked = replace(FEW, checked=False, gradients_checked=False)
    for rate in ("check", "weigh", "fold"):
        assert sent_seconds(FORM, unchecked, replace(NOTHING, **{rate: 1.0})) == 0
    inference = replace(FEW, training=False)
    for rate, count in {"message": 5, "survey": X + W, "weigh": X + W}.items():
        assert sent_seconds(FORM, inference, replace(NOTHING, **{rate: 1.0})) == count
    assert alone_seconds(first, replace(NOTHING, grouped=1.0), training=True) == 2 * (2 * W * 3 * 5) / 2


def test_what_computing_counts():
    """2 W multiplications and additions at each of 3 x 5 positions, and a group has two channels."""
    flops = 2 * W * 3 * 5
    assert FORM.op.flops(FORM.x_shape, FORM.w_shape) == flops
    assert alone_seconds(FORM, replace(NOTHING, grouped=1.0), training=True) == 3 * flops / 2
    assert alone_seconds(FORM, replace(NOTHING, grouped=1.0, product=0.75), training=False) == 0.75 * flops
    assert alone_seconds(FORM, replace(NOTHING, copy=1.0), training=False) == 4 * (X + Y + W)
    plain = replace(FORM, op=Conv.make((1, 1)), w_shape=(6, 4, 1, 1))
    assert alone_seconds(plain, replace(NOTHING, grouped=1.0, product=0.5), training=False) == flops


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), True, "1"])
def test_rates_are_seconds(value):
    with pytest.raises(UsageError, match="the rate weigh is"):
        replace(SERVER, weigh=value)


def test_places_are_those_that_are_named():
    for place in PLACES:
        check_place(place)
    with pytest.raises(UsageError, match="structure, cost, workers"):
        check_place("cloud")
