"""Orders that nobody can guess."""

from itertools import permutations

import numpy as np
import pytest
from scipy.stats import chisquare

from darknight.trust import fresh
from darknight.trust.fresh import fresh_order


def test_an_order_has_each_number_once():
    """Also of so many that they are put on piles first; and each takes as little memory as it can."""
    for count, dtype in ((0, np.uint8), (1, np.uint8), (255, np.uint8), (1000, np.uint16), (70_001, np.uint32)):
        order = fresh_order(count)
        assert order.dtype == dtype
        assert np.array_equal(np.sort(order), np.arange(count))


@pytest.mark.parametrize("piles", [0, 2])
def test_all_orders_are_alike(monkeypatch, piles):
    """Of four things, over many draws; and a lazy shuffle, which swaps each with any other, is noticed."""
    orders = list(permutations(range(4)))
    draws = 24_000
    if piles:
        # Two piles, by the lowest bit of the byte, which is as random as all of it.
        monkeypatch.setattr(fresh, "_AT_ONCE", 0)
        monkeypatch.setattr(fresh, "_PILES", piles)
        tokens = fresh.secrets.token_bytes
        monkeypatch.setattr(
            fresh.secrets, "token_bytes", lambda n: bytes(byte & 1 for byte in tokens(n)) if n == 4 else tokens(n)
        )
    seen = [tuple(fresh_order(4).tolist()) for _ in range(draws)]
    assert chisquare([seen.count(order) for order in orders]).pvalue > 1e-6

    def lazy(generator):
        order = list(range(4))
        for at in range(4):
            other = int(generator.integers(4))
            order[at], order[other] = order[other], order[at]
        return tuple(order)

    generator = np.random.default_rng(0)
    seen = [lazy(generator) for _ in range(draws)]
    assert chisquare([seen.count(order) for order in orders]).pvalue < 1e-6


def test_piles_that_are_not_shuffled_are_noticed(monkeypatch):
    """A number that is on the same pile as the one before it would always come after it."""

    def neighbours(order):
        place = np.argsort(order)
        return float((place[1:] > place[:-1]).mean())

    count = 100_000
    chance = 6.5 / np.sqrt(count)  # once in ten thousand million runs
    assert abs(neighbours(fresh_order(count)) - 0.5) < chance
    monkeypatch.setattr(fresh, "_shuffled", lambda numbers: numbers)
    monkeypatch.setattr(fresh, "_PILES", 256)
    broken = neighbours(fresh_order(count))
    assert abs(broken - 0.5 - 0.5 / 256) < 0.01  # so little that only what is side by side in one pile shows it
