"""The rule that a worker sees one share of a masking, and an operator at most M."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from darknight.errors import FleetError
from darknight.fleet import Custody


def test_an_operator_gets_as_many_shares_as_there_are_colluders():
    custody = Custody("aab", colluders=1)
    assert not custody.sent(7, seat=0, worker=0)
    assert not custody.may_send(7, seat=1, worker=1)
    with pytest.raises(FleetError, match="operator 'a' would hold more shares"):
        custody.sent(7, seat=1, worker=1)
    assert custody.may_send(7, seat=1, worker=2)
    assert custody.may_send(8, seat=1, worker=1)  # another masking


def test_a_worker_gets_one_share_however_many_colluders_there_are():
    """Any M workers hold at most M shares only if each holds one."""
    custody = Custody("abb", colluders=2)
    custody.sent(1, seat=0, worker=0)
    assert custody.may_send(1, seat=0, worker=0)
    assert not custody.may_send(1, seat=1, worker=0)
    custody.sent(1, seat=1, worker=1)
    assert custody.may_send(1, seat=2, worker=2)  # the operator's second, at another worker


def test_a_share_goes_again_only_where_no_other_share_is():
    custody = Custody("abcc", colluders=2)
    custody.sent(1, seat=0, worker=0)
    custody.sent(1, seat=1, worker=1)
    custody.sent(1, seat=2, worker=2)
    assert custody.may_send(1, seat=3, worker=3)  # a first sending, the operator's second share of two
    assert not custody.may_send(1, seat=0, worker=3)  # a second sending, to an operator that holds another one
    assert not custody.may_send(1, seat=0, worker=1)
    assert custody.may_send(1, seat=2, worker=3)  # the same operator, the same share
    assert custody.sent(1, seat=2, worker=3) is False


def test_it_says_when_another_operator_has_the_share_already():
    custody = Custody("ab", colluders=1)
    assert custody.sent(1, seat=0, worker=0) is False
    assert custody.sent(1, seat=0, worker=1) is True


def test_a_masking_that_is_over_is_forgotten():
    custody = Custody("a", colluders=1)
    custody.sent(1, seat=0, worker=0)
    custody.forget(1)
    custody.forget(1)
    assert custody.may_send(1, seat=1, worker=0)


def test_with_one_operator_by_choice_everything_goes():
    custody = Custody("aaaa", colluders=1, one_operator=True)
    for seat, worker in itertools.product(range(4), range(4)):
        custody.sent(1, seat, worker)


@pytest.mark.parametrize("colluders", [1, 2, 3])
def test_no_order_of_sendings_breaks_the_rule(colluders):
    """Every order of three sendings of any share to anybody, against the rule in its shortest form."""
    operators = "aabb"
    moves = list(itertools.product(range(3), range(4)))
    for order in itertools.product(moves, repeat=3):
        custody, held = Custody(operators, colluders), {"a": set(), "b": set()}
        for seat, worker in order:
            if custody.may_send(1, seat, worker):
                custody.sent(1, seat, worker)
                held[operators[worker]].add(seat)
        assert all(len(seats) <= colluders for seats in held.values())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=8),
    st.sampled_from(["abcdef", "aabbcc", "aaabbb"]),
    st.integers(1, 3),
)
def test_the_rule_is_the_one_in_the_docstring(wishes, operators, colluders):
    """Whatever was sent before: the rule as it is written, over plain sets of who holds what."""
    custody, sent = Custody(operators, colluders), set()
    for seat, worker in wishes:
        own = {s for s, w in sent if w == worker}
        operators_own = {s for s, w in sent if operators[w] == operators[worker]}
        again = any(s == seat for s, _ in sent)
        allowed = own <= {seat} and (operators_own <= {seat} if again else len(operators_own | {seat}) <= colluders)
        assert custody.may_send(7, seat, worker) == allowed
        if allowed:
            elsewhere = any(s == seat and operators[w] != operators[worker] for s, w in sent)
            assert custody.sent(7, seat, worker) == elsewhere
            sent.add((seat, worker))
        else:
            with pytest.raises(FleetError):
                custody.sent(7, seat, worker)
