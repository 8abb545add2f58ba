"""The noise for a target is the least that meets it."""

import pytest

from darknight.errors import SchemeError
from darknight.plan import Candidate
from darknight.plan.layers import count_network
from darknight.plan.leakage import least_noise, most_noise, nats_of, nats_per_sending, rounded_up

NETWORK = count_network("small-cnn", shape=(3, 12, 8), classes=5, batch_size=7, training=True)
NUMBERS = sum(product.inputs + product.outputs for product in NETWORK.products)


def candidate(inputs=3, colluders=1, spares=1, training=True):
    return Candidate(inputs=inputs, colluders=colluders, spares=spares, exact=False, training=training)


@pytest.mark.parametrize("colluders", [1, 2])
@pytest.mark.parametrize("target", [50.0, 1.0, 1e-5])
def test_the_noise_meets_the_target_and_a_little_less_does_not(target, colluders):
    one = candidate(colluders=colluders)
    noise = least_noise(NETWORK, one, 90, target)

    def total(sigma):
        return 90 * nats_per_sending(NETWORK, nats_of(one.code(), sigma))

    assert total(noise) <= target < total(noise * 0.999)
    assert noise == float(f"{noise:.4g}")
    # In words, for one colluder: at most C1^2 / (2 sigma^2) for each number.
    if colluders == 1 and target <= 1:
        assert noise == pytest.approx((90 * NUMBERS / (2 * target)) ** 0.5, rel=1e-3)


def test_noise_smaller_than_the_data_is_never_asked_for():
    assert least_noise(NETWORK, candidate(), 1, 1e9) == 1.0


def test_inference_leaks_nothing_about_gradients():
    nats = nats_of(candidate(training=False).code(), 100.0)
    assert nats.gradient == 0
    assert nats_per_sending(NETWORK, nats) == pytest.approx(sum(p.inputs for p in NETWORK.products) * nats.input)


def test_the_most_noise_is_where_schemes_stop_constructing():
    for one in (candidate(), candidate(inputs=2, colluders=3), candidate(training=False)):
        most = most_noise(one)
        one.scheme(most)
        with pytest.raises(SchemeError):
            one.scheme(most * 1.0001)
    assert most_noise(candidate(colluders=4)) is None
    assert most_noise(candidate(training=False)) == pytest.approx(4e6)


def test_what_cannot_be_met_asks_for_more_than_any_scheme_takes():
    with pytest.raises(SchemeError):
        candidate().scheme(least_noise(NETWORK, candidate(), 90, 1e-12))


@pytest.mark.parametrize(("value", "digits", "rounded"), [(1234.1, 4, 1235), (1234, 4, 1234), (9.9999e-7, 3, 1e-6)])
def test_rounding_up(value, digits, rounded):
    assert rounded_up(value, digits) == rounded
