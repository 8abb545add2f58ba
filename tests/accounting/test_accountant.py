"""Bounds add up: over layers, steps, re-maskings and runs, for an example, for coalitions, and in all."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darknight.accounting import (
    Accountant,
    Masked,
    SentClear,
    coalition_bounds,
    in_bits,
    papers_bound,
    theorem_1,
    theorem_2,
    worst_coalition,
)
from darknight.coding.systematic import real_systematic
from darknight.errors import UsageError


def masked(layer="a", what="input", *, groups=3, features=5, nats=1e-3, seats=((0,), (1,)), paper=2e-3):
    by_coalition = {seat: nats / (1 + place) for place, seat in enumerate(seats)}
    return Masked(
        layer=layer,
        what=what,
        examples=2 * groups,
        groups=groups,
        features=features,
        nats=nats,
        by_coalition=by_coalition,
        paper=paper,
    )


events = st.lists(
    st.builds(
        masked,
        layer=st.sampled_from(["a", "b", "c"]),
        what=st.sampled_from(["input", "gradient"]),
        groups=st.integers(1, 9),
        features=st.integers(1, 1000),
        nats=st.floats(1e-9, 1.0),
        seats=st.sampled_from([((0,), (1,)), ((1,), (0,)), ((2,), (0,))]),
    ),
    max_size=12,
)


def accounted(found):
    accountant = Accountant()
    for event in found:
        accountant.masked(event)
    return accountant


@given(events)
def test_every_masking_counts_in_full(found):
    accountant = accounted(found)
    total = accountant.total
    assert total.maskings == len(found)
    assert total.nats == pytest.approx(math.fsum(e.features * e.nats for e in found))
    assert total.everything == pytest.approx(math.fsum(e.groups * e.features * e.nats for e in found))
    assert total.scalar == pytest.approx(math.fsum(e.nats for e in found))
    assert total.paper == pytest.approx(math.fsum(e.features * e.paper for e in found))
    for layer, what in {(e.layer, e.what) for e in found}:
        own = [e for e in found if (e.layer, e.what) == (layer, what)]
        assert accountant.layers[layer, what].maskings == len(own)
        assert accountant.layers[layer, what].nats == pytest.approx(math.fsum(e.features * e.nats for e in own))


@given(events)
def test_no_coalition_of_fixed_seats_is_shown_more_than_any_m_workers(found):
    """`total` takes the worst seats of every masking: workers may change their seats."""
    accountant = accounted(found)
    for seat in range(3):
        own = math.fsum(e.features * e.by_coalition.get((seat,), 0.0) for e in found)
        assert accountant.seen_by([seat]) == pytest.approx(own)
        assert own <= accountant.total.nats * (1 + 1e-9)
    assert accountant.worst[1] == pytest.approx(max(accountant.coalitions.values(), default=0.0))


@given(events, events)
def test_an_earlier_run_counts_as_if_it_were_this_one(before, after):
    """Through JSON, as a checkpoint keeps it."""
    continued = accounted(after)
    continued.add(Accountant.of(json.loads(json.dumps(accounted(before).state()))))
    whole = accounted([*before, *after])
    assert continued.total.maskings == whole.total.maskings
    assert continued.total.nats == pytest.approx(whole.total.nats)
    assert continued.coalitions == pytest.approx(whole.coalitions)
    assert continued.largest == whole.largest
    assert {key: one.nats for key, one in continued.layers.items()} == pytest.approx(
        {key: one.nats for key, one in whole.layers.items()}
    )


def test_coalitions_of_other_sizes():
    accountant = Accountant(colluders=2)
    assert accountant.seen_by([0, 1, 2]) == 0.0  # nothing was sent
    accountant.masked(masked(features=10, nats=1e-3, seats=((0, 1), (0, 2), (1, 2))))
    assert accountant.seen_by([1, 0]) == pytest.approx(10e-3)
    assert accountant.seen_by([2]) == pytest.approx(10e-3 / 3)  # no more than (1, 2), of which it is a part
    assert accountant.seen_by([0, 1, 2]) == math.inf
    exact = Accountant(colluders=2)
    exact.masked(masked(nats=0.0, seats=()))
    assert exact.seen_by([0, 1]) == 0.0
    assert exact.seen_by([0, 1, 2]) == math.inf


def test_gradients_in_the_clear_have_no_bound():
    accountant = Accountant()
    accountant.sent_clear(SentClear(layer="a", examples=8))
    assert accountant.total.clear == accountant.layers["a", "gradient"].clear == 1
    assert accountant.seen_by([0]) == math.inf


def test_what_a_real_code_shows_every_coalition():
    """The numbers that the runtime puts into its events."""
    for mixing in real_systematic(2, 2, 0, True).masking:
        bounds = coalition_bounds(mixing, bound=1.0, noise_std=1e2)
        assert len(bounds) == math.comb(mixing.workers, 2)
        assert worst_coalition(mixing, bound=1.0, noise_std=1e2)[1] == max(bounds.values())
        smallest = min(mixing.unit * math.hypot(*row) for row in mixing.noise)
        assert papers_bound(mixing, bound=1.0, noise_std=1e2) == theorem_2([1.0, 1.0], smallest, 1e2)
    for mixing in real_systematic(3, 1, 1, True).masking:  # inputs and noise with coefficients of 1 at least
        assert papers_bound(mixing, bound=2.0, noise_std=1e3) == pytest.approx(theorem_1(3, 2.0, 1.0, 1e3))


def test_bits():
    assert in_bits(math.log(2)) == 1.0


@pytest.mark.parametrize(
    "damage",
    [
        {},
        3,
        {"nats": -1.0},
        {"nats": math.nan},
        {"nats": "many"},
        {"maskings": True},
        {"step": None},
        {"layers": [{"layer": "a"}]},
        {"coalitions": [[[0], -1.0]]},
        {"coalitions": 7},
    ],
)
def test_a_damaged_state_is_refused(damage):
    state = accounted([masked()]).state()
    broken = {**state, **damage} if damage and damage != 3 else damage
    with pytest.raises(UsageError, match="leakage is damaged"):
        Accountant.of(broken)
    Accountant.of(state)
