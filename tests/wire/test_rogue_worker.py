"""What a link withstands: a worker that answers what it has not read, Ctrl-C at a bad moment, no more descriptors."""

import errno
import gc
import os
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress

import pytest
import torch

from darknight.types import Expected, Forget, Pass
from darknight.wire import LinkClosed, Misbehaved, Refused, codec, doors, grpc_link, handshake
from darknight.wire.grpc_link import connect
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.outbox import MOST_PARCELS
from fleet.workers import eventually
from wire.peers import ABOUT, ask, bench, task
from wire.rogue import rogue_worker


def refusal(ticket):
    return codec.pack({"kind": "refusal", "message": "no", "ticket": ticket})


@pytest.fixture
def plain_link():
    with bench() as made:
        yield made.connect()


def gone(references):
    """gRPC's thread drops the message that it was sending a moment after the end."""
    gc.collect()
    return eventually(lambda: not any(reference() is not None for reference in references), 10)


@pytest.fixture
def blind():
    """A link to a worker that reads nothing, and refuses ticket after ticket whenever it is told to."""
    enclave, told = Identity.create(ENCLAVE), threading.Semaphore(0)

    def talk(_requests):
        for ticket in range(1, 100):
            told.acquire()
            yield refusal(ticket)

    with rogue_worker(enclave, talk) as (address, certificate):
        link = connect(address, certificate=certificate, identity=enclave)
        try:
            yield link, told
        finally:
            link.close()
            told.release(100)


def test_a_worker_cannot_refuse_what_was_not_sent_and_keeps_none_of_it_alive(blind):
    link, told = blind
    tensor = torch.zeros(2 << 20)  # more than fits on the way
    alive = weakref.ref(tensor)
    future = link.ask(task(1, tensor), Expected({Pass.FORWARD: (3,)}, torch.float32, None))
    del tensor
    told.release()
    with pytest.raises(Misbehaved, match="was not sent yet"):
        future.result(10)
    assert isinstance(link.failure, Misbehaved)
    assert gone([alive])  # though the link is still there


def test_what_waits_to_be_sent_goes_when_the_link_is_closed(blind):
    link, _ = blind
    tensors = [torch.zeros(2 << 20) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    for call, tensor in enumerate(tensors):
        link.ask(task(call, tensor), Expected({Pass.FORWARD: (3,)}, torch.float32, None))
    del tensors, tensor
    assert all(share() is not None for share in alive)
    link.close()
    assert gone(alive)


@pytest.mark.parametrize("calls", [1, 10_000])
def test_a_worker_that_reads_nothing_is_not_written_to_for_ever(blind, calls):
    """Not even with messages that want no answer: their number is limited, and their bytes."""
    link, _ = blind
    posted = 0
    while link.failure is None and posted < 20_000:
        with suppress(LinkClosed):
            link.post(Forget(calls=tuple(range(posted * calls, (posted + 1) * calls))))
            posted += 1
    assert MOST_PARCELS <= posted < 20_000 if calls == 1 else posted < MOST_PARCELS
    assert isinstance(link.failure, LinkClosed)
    with pytest.raises(LinkClosed, match="reads nothing"):
        link.ask(task(), Expected({Pass.FORWARD: (3,)}, torch.float32, None))
    assert link._stream._outbox._queue.qsize() <= 1  # what waited is gone


def test_who_reads_may_be_sent_more_than_that():
    with bench() as made:
        link = made.connect()
        for call in range(4 * MOST_PARCELS):
            link.post(Forget(calls=(call,)))
            if call % 100 == 0:
                assert ask(link, task(call)).result(30).call == call
        assert link.failure is None
        assert not link._stream._outbox.full


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (700_000,), (1 << 19,)])
def test_a_worker_may_answer_as_soon_as_it_has_the_last_frame(shape):
    """Messages of one frame, of several, and that end with a whole chunk; none is ever taken for unsent."""
    enclave = Identity.create(ENCLAVE)

    def talk(requests):
        due = 1 + len(list(codec.chunks_of(torch.empty(shape).nbytes)))
        for ticket in range(1, 31):
            for _ in range(due):
                next(requests)
            yield refusal(ticket)

    with rogue_worker(enclave, talk) as (address, certificate):
        link = connect(address, certificate=certificate, identity=enclave)
        for call in range(30):
            with pytest.raises(Refused):
                ask(link, task(call, torch.zeros(shape))).result(10)
        link.close()


# --- a welcome that comes at a bad moment -----------------------------------------------------------------------------
class Hasty(Future):
    """Settled just after somebody asked whether it is."""

    def done(self):
        return False


def test_a_link_that_is_closed_just_as_its_welcome_comes_is_closed_in_silence(plain_link):
    stream = plain_link._stream
    stream._welcome.__class__ = Hasty
    plain_link.close()
    assert isinstance(stream.failure, LinkClosed)
    assert stream._welcome.exception() is None


def test_a_welcome_that_comes_just_after_the_end_is_not_used(plain_link):
    stream = plain_link._stream
    stream._welcome = Future()
    plain_link.close()
    stream._take_welcome(handshake.welcome(ABOUT, None))
    assert isinstance(stream._welcome.exception(), LinkClosed)


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------
def interrupted(line, function, call):
    """call(), with a KeyboardInterrupt where `function` reaches this line of its own. Whether it came to that."""
    code, before = function.__code__, sys.gettrace()

    def tracer(frame, event, _):
        if frame.f_code is code and event == "line" and frame.f_lineno == code.co_firstlineno + line:
            raise KeyboardInterrupt
        return tracer if frame.f_code is code or event == "line" else None

    sys.settrace(lambda frame, event, _: tracer if frame.f_code is code else None)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def blocks_in_use(link):
    return sum(len(segment.live) for segment in link._stream._lending._memory._arena._segments.values())


@pytest.mark.parametrize("shared_memory", [False, True])
def test_ctrl_c_while_a_task_is_sent_does_the_link_no_harm(shared_memory):
    """At every line: an honest worker is not blamed, the next task is answered, and no memory stays taken."""
    options = {"shared_memory": f"@darknight-test-{os.getpid()}"} if shared_memory else {}
    function = grpc_link._Stream.ask
    with bench(**options) as made:
        link = made.connect()
        lines = sorted({line - function.__code__.co_firstlineno for *_, line in function.__code__.co_lines() if line})
        hits = 0
        for line in lines[1:]:
            hits += interrupted(line, function, lambda: ask(link, task(keep=False)))
            for call in (2, 3):  # the answer to the first shows that all before was dealt with
                assert ask(link, task(call)).result(10).call == call
            assert link.failure is None
            assert not link._stream._open
            if shared_memory:
                assert blocks_in_use(link) == 0, f"line {line}"
        assert hits >= 8


def test_ctrl_c_after_a_task_went_out_leaves_it_to_be_answered(monkeypatch):
    put = grpc_link.Outbox.put

    def put_and_interrupt(self, parcel):
        put(self, parcel)
        went_out.wait(10)
        raise KeyboardInterrupt

    with bench(shared_memory=f"@darknight-test-{os.getpid()}") as made:
        link = made.connect()
        session = made.sessions[0]
        went_out = session.computing
        with monkeypatch.context() as patch:
            patch.setattr(grpc_link.Outbox, "put", put_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                ask(link, task())
        assert ask(link, task(2)).result(10).call == 2
        assert link.failure is None
        assert blocks_in_use(link) == 0


# --- words ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("ipv4:127.0.0.1:1: connect: Connection refused (111)", "nothing listens there"),
        ("ipv4:127.0.0.1:1: Ssl handshake failed (TSI_PROTOCOL_FAILURE)", "TLS with it failed"),
        ("ipv4:127.0.0.1:1: Socket closed", "it ended the connection"),
        ("ipv4:127.0.0.1:1: recvmsg:Connection reset by peer", "it ended the connection"),
        ("ipv4:127.0.0.1:1: connect: No route to host (113)", "no way leads there"),
    ],
)
def test_what_grpc_says_is_said_in_our_words_alone(details, words):
    certificate = Identity.create(ENCLAVE).certificate
    said = grpc_link._why_unavailable(
        f"failed to connect to all addresses; last error: UNKNOWN: {details}", certificate
    )
    assert said.startswith(words)
    assert "all addresses" not in said
    assert "127.0.0.1" not in said


# --- no more descriptors --------------------------------------------------------------------------------------------
def test_no_descriptor_for_a_door_is_a_link_that_could_not_be_made(monkeypatch):
    def none_left():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with bench(shared_memory=f"@darknight-test-{os.getpid()}") as made:
        monkeypatch.setattr(doors, "_socket", none_left)
        with pytest.raises(LinkClosed, match="Too many open files"):
            made.connect()
