"""Frames over the door of shared memory: nothing else is heard there, nothing is lost, the network is left alone."""

import os
import socket
import threading
import time

import pytest
import torch

from darknight.types import Pass
from darknight.wire.bell import OVER, Bell
from darknight.wire.fields import HEADER_LIMIT, BadFrame
from darknight.wire.link import LinkClosed, Misbehaved
from darknight.wire.mapped import BadPlace, Mapped
from darknight.wire.seat import GrpcSeat
from darknight.wire.segments import Kind
from darknight.wire.shared_memory import Host, Memory
from wire.peers import EchoSession, ask, bench, everything, frames_through_grpc, task, weights

DOOR = f"@darknight-bell-{os.getpid()}"


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def anything(nbytes: int) -> None:
    pass


def heard(bell: Bell) -> list[bytes]:
    """Everything until the door is closed, which it is here."""
    return list(iter(bell.read, OVER))


# --- the two ends -----------------------------------------------------------------------------------------------------
def test_frames_go_both_ways_in_order_between_segments():
    mine, theirs = pair()
    memory, mapped = Memory(Host(), mine), Mapped(theirs, anything)
    memory.ring(b"first")
    block = memory.put(torch.arange(5))
    memory.ring(b"second")
    assert [mapped.next_frame(), mapped.next_frame()] == [b"first", b"second"]
    assert torch.equal(mapped.tensor(block[:2], torch.int64, (5,), writable=False), torch.arange(5))
    bell = memory.listen()
    assert bell.read() is None
    mapped.send(b"one")
    mapped.send(b"x" * HEADER_LIMIT)
    mapped.close()
    assert heard(bell) == [b"one", b"x" * HEADER_LIMIT]
    bell.close()
    memory.close()
    assert mapped.next_frame() is None


def test_what_a_worker_said_last_is_heard_although_it_left_something_unread():
    mine, theirs = pair()
    memory, mapped = Memory(Host(), mine), Mapped(theirs, anything)
    bell = memory.listen()
    memory.ring(b"never read")
    mapped.send(b"the last word")
    mapped.close()
    assert heard(bell) == [b"the last word"]
    bell.close()
    memory.close()


@pytest.mark.parametrize(
    "packet",
    [
        b"\x01",
        bytes([Kind.FRAME]),
        bytes([Kind.GONE]) + bytes(12),
        b'{"kind":"answer"}',
        bytes([Kind.FRAME]) + b"x" * (HEADER_LIMIT + 1),
    ],
)
def test_what_is_no_frame_is_refused_by_the_enclave(packet):
    mine, theirs = pair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    theirs.send(packet)
    with pytest.raises(BadFrame, match="another form"):
        heard(Bell(mine))
    theirs.close()


def test_descriptors_from_a_worker_are_dropped():
    mine, theirs = pair()
    before = len(os.listdir("/proc/self/fd"))
    with open("/dev/null") as file:
        socket.send_fds(theirs, [bytes([Kind.FRAME]) + b"hello"], [file.fileno()])
    bell = Bell(mine)
    assert bell.read() == b"hello"
    assert len(os.listdir("/proc/self/fd")) == before
    bell.close()
    theirs.close()


def test_a_worker_that_waits_for_a_frame_or_for_room_is_woken():
    mine, theirs = pair()
    mapped = Mapped(theirs, anything)
    done = []
    threads = [
        threading.Thread(target=lambda: done.append(mapped.next_frame())),
        threading.Thread(target=lambda: done.extend(mapped.send(b"x" * 60_000) for _ in range(1000))),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    mapped.hang_up()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    mapped.close()
    mine.close()


def test_a_worker_takes_no_frame_for_a_segment_and_waits_for_none_that_comes_later():
    mine, theirs = pair()
    mapped = Mapped(theirs, anything)
    mine.send(bytes([Kind.FRAME]) + b"early")
    begun = time.monotonic()
    with pytest.raises(BadPlace, match="after it"):
        mapped.tensor((1, 0), torch.int64, (5,), writable=False)
    assert time.monotonic() - begun < 2
    assert mapped.next_frame() == b"early"
    mapped.close()
    mine.close()


def test_a_worker_that_reads_nothing_is_given_up():
    mine, theirs = pair()
    memory = Memory(Host(), mine)

    def pester():
        for _ in range(100_000):
            memory.ring(b"x" * 60_000)

    with pytest.raises(LinkClosed, match="reads nothing"):
        pester()
    memory.close()
    theirs.close()


# --- whole links ------------------------------------------------------------------------------------------------------
def test_with_shared_memory_nothing_but_the_greeting_goes_through_the_network(monkeypatch):
    """So it is in both directions. The test can fail: without shared memory the same messages are seen there."""
    seen = frames_through_grpc(monkeypatch)
    counts = []
    for options in ({"shared_memory": DOOR}, {"pipe_port": None}):
        with bench(**options) as made:
            link = made.connect()
            link.post(weights())
            link.post(everything())
            for call in (1, 2):
                assert torch.equal(ask(link, task(call)).result(10).tensors[Pass.FORWARD], task().tensor + 1)
        counts.append(len(seen))
        seen.clear()
    assert counts[0] == 1
    assert counts[1] > 6


def test_an_answer_through_the_network_on_a_link_of_shared_memory_breaks_it(monkeypatch):
    monkeypatch.setattr("darknight.wire.mapped.Mapped.send", lambda self, frame: None)
    original = GrpcSeat.frames

    def beside(seat):
        yield b"{}"
        yield from original(seat)

    monkeypatch.setattr(GrpcSeat, "frames", beside)
    with bench(shared_memory=DOOR) as made:
        link = made.connect()
        future = ask(link, task())
        made.server.stop(0.2)
        assert isinstance(future.exception(10), Misbehaved | LinkClosed)
        assert link.failure is not None


def test_a_door_that_closes_ends_the_link_also_if_the_stream_stays_open(monkeypatch):
    class Stubborn(EchoSession):
        def serve(self, seat):
            seat.read()
            seat._mapped.hang_up()
            self.gate.wait(20)

    with bench(Stubborn, shared_memory=DOOR) as made:
        link = made.connect()
        assert isinstance(ask(link, task()).exception(10), LinkClosed)
        made.sessions[0].gate.set()
