"""A worker's transcript, taken in its seat and kept in another process."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch

from darknight.types import Answer, BackwardTask, Forget, ForwardTask, OpSpec, Pass, Refusal, TooLarge, Weights
from darknight.wire import Transcript, codec, recording
from darknight.wire.recording import Recording, RecordingSeat, recording_pair

OP = OpSpec("conv2d", (("stride", (2, 2)), ("padding_mode", "zeros")))
BIG = torch.arange(1 << 19).reshape(2, -1)  # 4 MiB: many packets


def messages():
    return [
        Weights(layer="a.0", version=3, op=OP, prime=8380417, tensor=torch.arange(6, dtype=torch.int32).reshape(2, 3)),
        Weights(layer="b", version=0, op=OpSpec("linear"), prime=None, tensor=torch.randn(2, 2, dtype=torch.float64)),
        ForwardTask(layer="a.0", call=1, version=3, tensor=BIG, compute=True, keep=False),
        ForwardTask(layer="ä", call=2, version=3, tensor=torch.randn(4, 3).t(), compute=False, keep=True),
        BackwardTask(
            layer="a.0",
            call=1,
            version=3,
            tensor=torch.randn(0, 5),
            passes=(Pass.GRAD_WEIGHT, Pass.GRAD_INPUT),
            x_shape=(1, 2, 3),
            row=(0.1, -2.5e300),
        ),
        BackwardTask(layer="b", call=9, version=0, tensor=torch.tensor(1.5), passes=(Pass.GRAD_INPUT,), x_shape=()),
        Forget(calls=(1, 2), weights=(("a.0", 3),)),
        Forget(everything=True),
    ]


def replies():
    both = {Pass.GRAD_INPUT: torch.arange(3, dtype=torch.int32), Pass.GRAD_WEIGHT: torch.arange(4)}
    return [
        Answer(layer="a.0", call=1, tensors={Pass.FORWARD: BIG.t()}, seconds=0.25),
        Answer(layer="a.0", call=1, tensors=both, seconds=0.0),  # the second one begins at an odd place
        Answer(layer="b", call=2, tensors={}, seconds=1e-9),
        Refusal(message="no room"),
    ]


class Script:
    """A seat that plays messages and keeps replies."""

    def __init__(self, found=(), on_write=None):
        self.left = list(found)
        self.written = []
        self.closed = False
        self.on_write = on_write

    def read(self):
        return self.left.pop(0) if self.left else None

    def write(self, ticket, reply):
        if self.on_write:
            self.on_write()
        self.written.append((ticket, reply))

    def close(self):
        self.closed = True


@pytest.fixture
def ends():
    parent, child = recording_pair()
    made = Recording(parent)
    yield made, child
    child.close()
    made.close()


def test_all_kinds_of_messages_arrive_as_they_were(ends):
    made, child = ends
    played = [*enumerate(messages()), (99, TooLarge(layer="c", version=1, reason="no room"))]
    script = Script(played)
    seat = RecordingSeat(script, child)
    expected = Transcript()
    for found in played:
        assert seat.read() is found  # the very same, not a copy
        if not isinstance(found[1], TooLarge):
            expected.received(found[1])
    assert seat.read() is None
    for ticket, reply in enumerate(replies()):
        seat.write(ticket, reply)
        expected.sent(reply)
    assert [ticket for ticket, _ in script.written] == [0, 1, 2, 3]
    seat.close()
    assert script.closed

    made.wait_for(4, timeout=30)
    assert len(made.records) == len(expected.records) == 9
    for record, wanted in zip(made.records, expected.records, strict=True):
        assert (record.layer, record.kind, record.call) == (wanted.layer, wanted.kind, wanted.call)
        assert record.detail == wanted.detail
        assert {k: type(v) for k, v in record.detail.items()} == {k: type(v) for k, v in wanted.detail.items()}
        assert record.tensor.dtype == wanted.tensor.dtype
        assert record.tensor.shape == wanted.tensor.shape
        assert torch.equal(record.tensor, wanted.tensor)
    assert len(made.take()) == 9
    assert not made.records
    made.wait_for(4, timeout=1)  # what was taken still counts


def test_a_reply_is_recorded_before_the_enclave_gets_it(ends):
    made, child = ends
    reply = replies()[0]
    script = Script(on_write=lambda: made.wait_for(1, timeout=30))  # a reply that is sent later would never be there
    RecordingSeat(script, child).write(7, reply)
    assert script.written == [(7, reply)]
    assert [record.kind for record in made.records] == ["forward.reply"]


def test_records_are_kept_apart_when_two_seats_write_at_once(ends):
    made, child = ends
    seats = [RecordingSeat(Script(), child) for _ in range(2)]
    answers = [Answer(layer=str(n), call=n, tensors={Pass.FORWARD: BIG + n}, seconds=0.0) for n in range(2)]

    def write(seat, answer):
        for _ in range(5):
            seat.write(0, answer)

    threads = [threading.Thread(target=write, args=pair) for pair in zip(seats, answers, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    made.wait_for(10, timeout=30)
    for record in made.records:
        assert torch.equal(record.tensor, BIG + record.call)


KILLED = """
import os, socket, sys, torch
from darknight.types import Answer, Pass
from darknight.wire.recording import RecordingSeat
class Silent:
    def write(self, ticket, reply): pass
seat = RecordingSeat(Silent(), socket.socket(fileno=int(sys.argv[1])))
seat.write(0, Answer(layer="whole", call=0, tensors={Pass.FORWARD: torch.arange(10)}, seconds=0.0))
print("whole", flush=True)
while True:
    seat.write(1, Answer(layer="part", call=1, tensors={Pass.FORWARD: torch.arange(1 << 22)}, seconds=0.0))
"""


def test_a_worker_killed_in_the_middle_of_a_record_does_not_garble_the_next_ones():
    parent, child = recording_pair()
    # Nobody reads yet: the child is stuck inside its second record when it is killed.
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(child.fileno())],
        pass_fds=[child.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "whole\n"
        while select.select([], [child], [], 0)[1]:  # until the socket is full
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    made = Recording(parent)
    RecordingSeat(Script(), child).write(0, replies()[1])  # its successor, on the same socket
    made.wait_for(2, timeout=30)
    assert [record.layer for record in made.records] == ["whole", "a.0", "a.0"]
    child.close()
    made.close()


def test_waiting_ends_with_words(ends):
    made, child = ends
    with pytest.raises(TimeoutError, match="0 replies of the worker are recorded, needs 1: no more came"):
        made.wait_for(1, timeout=0.05)
    made.wait_for(0, timeout=0)
    child.close()
    with pytest.raises(TimeoutError, match="closed its end"):
        made.wait_for(1, timeout=60)


def test_a_seat_works_on_when_the_recording_is_closed(ends):
    made, child = ends
    script = Script([(0, messages()[0])])
    seat = RecordingSeat(script, child)
    made.close()
    assert seat.read()[0] == 0
    for reply in replies():
        seat.write(1, reply)
    assert len(script.written) == 4
    assert made.records == []


HEADER = codec.pack(codec.reply_header(replies()[0]))
BEGIN = recording._PACKET.pack(1, 1, recording._SENT)
MORE = recording._PACKET.pack(1, 1, recording._MORE)


@pytest.mark.parametrize(
    "packets",
    [
        [b"?"],
        [recording._PACKET.pack(1, 1, 77) + b"data"],
        [MORE + b"belongs to nothing"],
        [BEGIN + b"\0\0"],
        [BEGIN + bytes(8) + b"no header"],
        [BEGIN + bytes(8) + HEADER],  # fewer bytes than the header says
        [BEGIN + recording._LENGTH.pack(BIG.nbytes + 8) + HEADER, *[MORE + bytes(1 << 16)] * 65],  # more
        [recording._PACKET.pack(1, 1, recording._RECEIVED) + bytes(8) + HEADER],  # a reply is no message
    ],
)
def test_a_record_that_is_none_ends_the_recording_and_keeps_what_there_was(ends, packets):
    made, child = ends
    RecordingSeat(Script(), child).write(0, replies()[2])
    RecordingSeat(Script(), child).write(0, replies()[1])
    for packet in packets:
        child.send(packet)
    with pytest.raises(TimeoutError, match="a record that is none"):
        made.wait_for(3, timeout=30)
    assert len(made.records) == 2
    script = Script()
    seat = RecordingSeat(script, child)
    for _ in range(3):  # more than the socket holds: the worker does not wait for a reader
        seat.write(0, replies()[0])
    assert len(script.written) == 3


def test_nothing_is_allocated_on_the_word_of_a_header(ends):
    made, child = ends
    huge = {"dtype": "int64", "shape": [1 << 40]}
    header = codec.pack({"kind": "answer", "layer": "a", "call": 0, "seconds": 0.0, "tensors": {"forward": huge}})
    for process in range(recording._UNFINISHED + 10):
        child.send(recording._PACKET.pack(process, 0, recording._SENT) + recording._LENGTH.pack(1 << 43) + header)
    RecordingSeat(Script(), child).write(0, replies()[0])
    made.wait_for(1, timeout=30)
    assert len(made._unfinished) <= recording._UNFINISHED


def test_a_stream_is_refused():
    one, two = socket.socketpair()
    for make in (lambda: Recording(one), lambda: RecordingSeat(Script(), two)):
        with pytest.raises(ValueError, match="recording_pair"):
            make()
    one.close()
    two.close()


def test_closing_ends_the_thread():
    before, count = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    parent, child = recording_pair()
    made = Recording(parent)
    made.close()
    made.close()
    child.close()
    assert set(threading.enumerate()) == before
    assert len(os.listdir("/proc/self/fd")) == count
