"""Who sits where: the plan that does not construct, standbys, and workers that come back."""

import pytest
from torch import nn

import darknight as dk
from darknight.fleet import Fleet, Member, Seats
from darknight.wire import in_process
from fleet.faults import redial

SCHEME = dk.Scheme(inputs=2, colluders=1)  # four seats


def idle(operators, **options):
    """A fleet at whose other ends nobody sits, with the links that it opened, by worker."""
    links = [[] for _ in operators]

    def member(number, operator):
        def dial():
            links[number].append(in_process()[0])
            return links[number][-1]

        return Member(f"w{number}", operator, dial)

    return Fleet([member(j, operator) for j, operator in enumerate(operators)], **options), links


def places(seats):
    return [seats.worker(seat) for seat in range(4)]


def test_a_plan_that_gives_one_operator_too_much_explains_collusion_and_lists_the_workers():
    fleet, _ = idle("aabc")
    with fleet, pytest.raises(dk.errors.FleetError) as caught:
        dk.Runtime(SCHEME, fleet)
    message = str(caught.value)
    assert "operator 'a' runs w0, w1; operator 'b' runs w2; operator 'c' runs w3" in message
    assert "pool what its workers see" in message
    assert "at most 1 of one operator; here only 3 can be used" in message
    assert "insecure_one_operator=True" in message


def test_workers_beyond_an_operators_share_are_passed_over():
    fleet, _ = idle("aabbcd")
    with fleet:
        assert places(Seats(SCHEME, fleet)) == [0, 2, 4, 5]


def test_with_more_colluders_an_operator_may_hold_more():
    fleet, _ = idle("aabbcc")
    with fleet:
        seats = Seats(dk.Scheme(inputs=2, colluders=2), fleet)
        assert [seats.worker(seat) for seat in range(6)] == [0, 1, 2, 3, 4, 5]


def test_one_operator_may_have_everything_only_when_told_and_every_report_says_so():
    fleet, _ = idle("aaaa", insecure_one_operator=True)
    with fleet, dk.Runtime(SCHEME, fleet) as runtime:
        assert "EVERYTHING IS VISIBLE: insecure_one_operator=True" in str(runtime.ledger)
        assert "insecure_one_operator=True" in runtime.ledger.summary()["leakage"]["words"]
        report = dk.protect_(nn.Linear(3, 2), runtime)
        assert "insecure_one_operator=True" in str(report)


def test_a_standby_takes_the_seat_of_a_worker_that_fails():
    fleet, links = idle("abcde")
    with fleet:
        seats = Seats(SCHEME, fleet)
        assert not seats.settle()
        links[1][-1].close()
        changes = seats.settle()
        assert places(seats) == [0, 4, 2, 3]
        assert [(change.seat, change.worker) for change in changes] == [(1, None), (1, 4)]
        assert changes[0].reason == "the link was closed"


def test_a_standby_of_an_operator_that_sits_already_is_passed_over():
    fleet, links = idle("abcda")
    with fleet:
        seats = Seats(SCHEME, fleet)
        links[1][-1].close()
        seats.settle()
        assert places(seats) == [0, None, 2, 3]
        links[0][-1].close()  # now its operator has no seat any more
        seats.settle()
        assert places(seats) == [4, None, 2, 3]


def test_a_worker_that_comes_back_takes_an_empty_seat_with_an_empty_memory():
    fleet, links = idle("abcd")
    with fleet:
        seats = Seats(SCHEME, fleet)
        before = fleet.epoch(1)
        links[1][-1].close()
        seats.settle()
        assert places(seats) == [0, None, 2, 3]
        redial(fleet)
        seats.settle()
        assert places(seats) == [0, 1, 2, 3]
        assert fleet.epoch(1) == before + 1
