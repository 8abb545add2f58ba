"""The loop: every task gets one reply, whatever comes; what has no answer gets none."""

import pytest
import torch

from darknight.types import Answer, Forget, Refusal, TooLarge
from darknight.wire import LinkClosed
from darknight.worker import Executor, serve
from worker.test_executor import CASES, forward, weights


class Script:
    """A seat that reads a list of messages and notes what is written."""

    def __init__(self, *messages, broken=False):
        self.messages = list(enumerate(messages))
        self.written = []
        self.closed = False
        self.broken = broken

    def read(self):
        return self.messages.pop(0) if self.messages else None

    def write(self, ticket, reply):
        if self.broken:
            raise LinkClosed("gone")
        self.written.append((ticket, reply))

    def close(self):
        self.closed = True


CASE = CASES[0]
GOOD = weights(CASE.op, torch.ones(CASE.w_shape, dtype=torch.int32))
SHARE = torch.ones(CASE.x_shape, dtype=torch.int32)


def test_tasks_are_answered_or_refused_and_the_loop_goes_on():
    bad = weights(CASE.op, torch.ones(CASE.w_shape, dtype=torch.int32), version=2)
    object.__setattr__(bad, "op", None)  # nothing that a reader lets through; it ends no loop either
    seat = Script(
        forward(SHARE),
        GOOD,
        forward(SHARE),
        bad,
        forward(SHARE, version=2),
        TooLarge(layer="a", version=3, reason="no room"),
        forward(SHARE, version=3),
        TooLarge(layer="a", version=None, reason="no room"),
        Forget(everything=True),
        forward(SHARE),
    )
    seen = []
    serve(seat, Executor(), lambda message, reply: seen.append((message, reply)))
    kinds = {ticket: type(reply) for ticket, reply in seat.written}
    assert kinds == {0: Refusal, 2: Answer, 4: Refusal, 6: Refusal, 7: Refusal, 9: Refusal}
    assert seat.written[3][1].message == "layer a: weights of version 3 were refused: no room"
    assert seat.written[4][1].message == "no room"
    assert len(seen) == 10
    assert isinstance(seen[3][1], Refusal)  # the observer hears of weights that nobody else is told about
    assert seat.closed


def test_an_enclave_that_is_gone_ends_the_loop_quietly():
    seat = Script(GOOD, forward(SHARE), forward(SHARE), broken=True)
    serve(seat, Executor())
    assert seat.closed
    assert len(seat.messages) == 1


def test_the_loop_closes_its_seat_whatever_happens():
    class Failing(Script):
        def read(self):
            raise OSError("the machine is on fire")

    seat = Failing()
    with pytest.raises(OSError, match="fire"):
        serve(seat, Executor())
    assert seat.closed
