"""Orders that nobody can guess."""

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chisquare

from darknight.trust import fresh
from darknight.trust.fresh import fresh_order

ORDERS = list(permutations(range(4)))
DRAWS = 24_000


def alike(draw):
    """How likely it is that all orders of four things are drawn as often as they were, or worse."""
    seen = [tuple(draw()) for _ in range(DRAWS)]
    return chisquare([seen.count(order) for order in ORDERS]).pvalue


@pytest.fixture
def two_piles(monkeypatch):
    """As if four were many: each goes on one of two piles, by the lowest bit of its byte."""
    tokens = fresh.secrets.token_bytes

    def bits(count):
        return bytes(byte & 1 for byte in tokens(count)) if count == 4 else tokens(count)

    monkeypatch.setattr(fresh, "_AT_ONCE", 0)
    monkeypatch.setattr(fresh, "_PILES", 2)
    monkeypatch.setattr(fresh.secrets, "token_bytes", bits)


def test_an_order_has_each_number_once():
    """Also of so many that they are put on piles first; and each takes as little memory as it can."""
    for count, dtype in ((0, np.uint8), (1, np.uint8), (255, np.uint8), (1000, np.uint16), (70_001, np.uint32)):
        order = fresh_order(count)
        assert order.dtype == dtype
        assert np.array_equal(np.sort(order), np.arange(count))


def test_all_orders_are_alike():
    """Of four things, over many draws; and a lazy shuffle, which swaps each with any other, is noticed."""
    assert alike(lambda: fresh_order(4).tolist()) > 1e-6
    generator = np.random.default_rng(0)

    def lazy():
        order = list(range(4))
        for at in range(4):
            other = int(generator.integers(4))
            order[at], order[other] = order[other], order[at]
        return order

    assert alike(lazy) < 1e-6


@pytest.mark.usefixtures("two_piles")
def test_so_are_those_of_many(monkeypatch):
    """And piles that are put on each other as they are would be noticed."""
    assert alike(lambda: fresh_order(4).tolist()) > 1e-6
    monkeypatch.setattr(fresh, "_shuffled", lambda numbers: numbers)
    assert alike(lambda: fresh_order(4).tolist()) < 1e-6
