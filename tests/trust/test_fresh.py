"""Orders that nobody can guess."""

from itertools import permutations

import numpy as np
from scipy.stats import chisquare

from darknight.trust.fresh import fresh_order


def test_an_order_has_each_number_once():
    for count in (0, 1, 2, 1000):
        order = fresh_order(count)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(count))


def test_all_orders_are_alike():
    """Of four things, over many draws; and a lazy shuffle, which swaps each with any other, is noticed."""
    orders = list(permutations(range(4)))
    draws = 24_000
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
