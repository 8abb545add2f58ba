"""Sealed pipes: what goes in comes out, and whoever sits in the middle can do nothing but end it."""

import logging
import os
import random
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import Counter
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from darknight.errors import UsageError
from darknight.types import Answer, Forget, Pass
from darknight.wire import LinkClosed, LinkError, codec, grpc_link, handshake, pipe
from darknight.wire.codec import CHUNK
from darknight.wire.doors import TOKEN, Doorkeeper
from darknight.wire.grpc_seat import WorkerServer
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.outbox import MOST_PARCELS, Outbox
from darknight.wire.pipe import Agreement, Pipe, PipeBroken, _Direction, new_secret
from darknight.wire.readers import Question, ReplyReader, raw
from darknight.wire.seat import GrpcSeat
from wire.peers import ABOUT, EchoSession, ask, backward, bench, expected, frames_through_grpc, task, weights
from wire.rogue import rogue_worker, tap
from wire.test_fuzz import mutated

WAIT = 30.0
LENGTH, TAG = 4, 16
KNOWN = "3e58225fe270e604157820919e9b4b43cda4d8146c537117b2795764cbfbd485"


@contextmanager
def connected():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


@contextmanager
def ends(agreement=None):
    """The enclave's and the worker's end of a pipe."""
    agreement = agreement or Agreement.of(new_secret(), new_secret())
    with connected() as (near, far):
        yield (
            Pipe(near, agreement.enclave_key, agreement.worker_key),
            Pipe(far, agreement.worker_key, agreement.enclave_key),
        )


def sealed(frames, agreement, *, from_worker=False):
    """The records that an end sends for these frames, one message each."""
    with connected() as (near, far):
        keys = agreement.enclave_key, agreement.worker_key
        end = Pipe(near, *(reversed(keys) if from_worker else keys))
        for frame in frames:
            end.send([frame])
        end.finish(0)
        stream = b"".join(iter(lambda: far.recv(1 << 16), b""))
    records = []
    while stream:
        size = LENGTH + struct.unpack(">I", stream[:LENGTH])[0]
        records.append(stream[:size])
        stream = stream[size:]
    return records


def opened(stream, agreement, *, at_worker=True):
    """The frames that the other end takes from these bytes, and whether it complained."""
    found, broken = [], False
    with connected() as (near, far):
        keys = agreement.worker_key, agreement.enclave_key
        end = Pipe(far, *(keys if at_worker else reversed(keys)))
        near.sendall(stream)
        near.shutdown(socket.SHUT_WR)
        try:
            found = [bytes(frame) for frame in iter(end.receive, None)]
        except PipeBroken:
            broken = True
    return found, broken


# --- what crosses -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 15, 16, 17, 65515, 65516, 65517, 1 << 16, CHUNK - 1, CHUNK])
def test_a_frame_of_any_size_arrives_in_both_directions(size):
    frame = secrets.token_bytes(size)
    with ends() as (enclave, worker):
        for sender, receiver in ((enclave, worker), (worker, enclave)):
            thread = threading.Thread(target=sender.send, args=([b"{}", frame, memoryview(frame)],))
            thread.start()
            assert [bytes(receiver.receive()) for _ in range(3)] == [b"{}", frame, frame]
            thread.join()


def test_messages_arrive_in_their_order_however_they_are_cut(full):
    """Large and small ones, many at once: most do not end where a read does."""
    rng = random.Random(0)
    sizes = [rng.choice([1, 20, 300, 5000, 65530, 70_000, CHUNK]) for _ in range(600 if full else 60)]
    frames = [rng.randbytes(size) for size in sizes]
    with ends() as (enclave, worker):
        thread = threading.Thread(target=lambda: [enclave.send(frames[n : n + 7]) for n in range(0, len(frames), 7)])
        thread.start()
        assert all(bytes(worker.receive()) == frame for frame in frames)
        thread.join()
        enclave.finish(0)
        assert worker.receive() is None


def test_an_idle_pipe_gives_signs_of_life():
    """A firewall between forgets a connection on which nothing is said, and nobody would hear of it."""
    with ends() as both:
        for end in both:
            option = end._connection.getsockopt
            assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, each, count = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
            assert (
                option(socket.IPPROTO_TCP, idle) + option(socket.IPPROTO_TCP, each) * option(socket.IPPROTO_TCP, count)
                <= 60
            )


@pytest.fixture
def hasty(monkeypatch):
    """Seconds are short."""
    monkeypatch.setattr(pipe, "PULSE", 0.03)
    monkeypatch.setattr(pipe, "SILENCE", 1.0)
    monkeypatch.setattr(pipe, "_pulses", pipe._Pulses())  # the one there is may be asleep, for seconds that are long


def test_an_end_with_nothing_to_say_is_there_all_the_same(hasty):
    with ends() as both:
        found = [[], []]

        def receive(end, frames):
            with suppress(PipeBroken):
                frames.extend(bytes(frame) for frame in iter(end.receive, None))

        threads = [threading.Thread(target=receive, args=each) for each in zip(both, found, strict=True)]
        for thread in threads:
            thread.start()
        time.sleep(2.5 * pipe.SILENCE)
        assert all(thread.is_alive() for thread in threads)
        assert all(end._pulses > 10 for end in both)
        for end in both:
            end.send([b"after all"])
        for end in both:
            end.finish(0)
        for thread in threads:
            thread.join(WAIT)
    assert found == [[b"after all"], [b"after all"]]


def test_an_end_that_says_nothing_is_gone(hasty):
    agreement = Agreement.of(new_secret(), new_secret())
    with connected() as (near, _):
        begun = time.monotonic()
        with pytest.raises(PipeBroken, match="nothing came for 1 s"):
            Pipe(near, agreement.enclave_key, agreement.worker_key).receive()
        assert 0.9 < time.monotonic() - begun < WAIT


def test_pulses_that_come_all_the_time_break_the_pipe():
    with ends() as (enclave, worker):
        for number in range(9):
            enclave._said = -1e9
            enclave.pulse()
            if number == 7:
                enclave.send([b"between"])
                assert bytes(worker.receive()) == b"between"
        with pytest.raises(PipeBroken, match="again and again"):
            worker.receive()


def test_a_pulse_waits_for_nobody_and_an_empty_frame_is_no_frame():
    with ends() as (enclave, _):
        with enclave._sends:
            enclave._said = -1e9
            enclave.pulse()  # somebody is sending
        connection = enclave._connection
        connection.setblocking(False)
        with suppress(BlockingIOError):
            while connection.send(bytes(1 << 20)):
                pass
        connection.setblocking(True)
        enclave.pulse()  # there is no room
        assert enclave._said == -1e9
        with pytest.raises(ValueError, match="without bytes"):
            enclave.send([b""])


def test_a_pulse_that_fails_stops_no_other(hasty, monkeypatch):
    failing = []

    def fail(self):
        failing.append(self)
        raise MemoryError

    with ends() as (first, _):
        monkeypatch.setattr(first, "pulse", fail.__get__(first))
        with ends() as (second, third):
            deadline = time.monotonic() + WAIT
            while not (failing and third._said > third._begun and second._said > second._begun):
                assert time.monotonic() < deadline
                time.sleep(0.01)


@pytest.mark.parametrize("upwards", [True, False])
def test_who_takes_everything_and_passes_nothing_on_ends_the_link_and_it_can_be_opened_again(
    upwards, hasty, monkeypatch
):
    swallowing = threading.Event()

    def meddle(data, up):
        return b"" if swallowing.is_set() and up is upwards else data

    with bench() as made, through_a_proxy(made, monkeypatch, meddle) as link:
        assert ask(link, task()).result(WAIT).call == 1
        swallowing.set()
        assert type(ask(link, task(2)).exception(WAIT)) is LinkClosed
        assert made.sessions[0].closed.wait(WAIT)
        assert ask(made.connect(), task(3)).result(WAIT).call == 3


def test_a_frame_is_opened_in_its_place_if_it_has_just_that_size():
    with ends() as (enclave, worker):
        enclave.send([b"four", b"five5"])
        place = memoryview(bytearray(4))
        assert worker.receive(place) is place
        assert bytes(place) == b"four"
        assert bytes(worker.receive(place)) == b"five5"
        assert bytes(place) == b"four"


def test_a_chunk_is_copied_only_if_it_came_elsewhere():
    """Both readers; what is fed was written to its place, or is something else than what is there."""
    question = Question("net.0", 1, expected(task()))
    header = codec.reply_header(Answer(layer="net.0", call=1, tensors={Pass.FORWARD: task().tensor}, seconds=0.0))
    for there in (True, False):
        reader = ReplyReader({1: question}.get)
        assert reader.place() is None
        assert reader.feed(codec.pack({**header, "ticket": 1})) is None
        place, data = reader.place(), bytes(raw(task().tensor))
        place[:] = data if there else bytes(len(data))
        _, answer = reader.feed(place if there else memoryview(data))
        assert torch.equal(answer.tensors[Pass.FORWARD], task().tensor)


def test_a_header_and_a_small_tensor_go_out_at_once(monkeypatch):
    pushed = []
    monkeypatch.setattr(Pipe, "_push", lambda self, count: pushed.append(count))
    with ends() as (enclave, _):
        enclave.send([bytes(200), bytes(5000)])
    assert pushed == [200 + 5000 + 2 * (LENGTH + TAG)]


# --- who sits in the middle -------------------------------------------------------------------------------------------
FRAMES = [b"the first frame", b"the second one", b"and a third"]


def changed(records):
    """Every byte of every record changed, its length among them."""
    stream = b"".join(records)
    for place in range(len(stream)):
        yield stream[:place] + bytes([stream[place] ^ 1 << place % 8]) + stream[place + 1 :]


def moved(records):
    first, second, third = records
    yield second + third  # left out
    yield first + third
    yield first + first + second + third  # repeated
    yield second + first + third  # in another order
    yield first + second[:-1]  # cut


def attacks_that_pass(frames, agreement):
    """Streams that are taken for something that was never sent: what came out is no beginning of what went in."""
    records = sealed(frames, agreement)
    passed = []
    for stream in (*changed(records), *moved(records)):
        found, broken = opened(stream, agreement)
        if found != frames[: len(found)] or (not broken and len(found) != len(frames)):
            passed.append(stream)
    backwards, _ = opened(b"".join(records), agreement, at_worker=False)  # to where they came from
    others, _ = opened(b"".join(records), Agreement.of(new_secret(), new_secret()))
    return passed + backwards + others


def test_nothing_passes_that_was_changed_left_out_repeated_or_moved():
    agreement = Agreement.of(new_secret(), new_secret())
    assert opened(b"".join(sealed(FRAMES, agreement)), agreement) == (FRAMES, False)
    assert attacks_that_pass(FRAMES, agreement) == []


def _without_numbers(monkeypatch):
    monkeypatch.setattr(_Direction, "_next", lambda self: bytes(12))


def _without_tags(monkeypatch):
    def open_anything(self, record, place):
        flow = self._cipher.encrypt(self._next(), bytes(len(record) - TAG), None)
        place[:] = bytes(a ^ b for a, b in zip(record[:-TAG], flow, strict=False))

    monkeypatch.setattr(_Direction, "open", open_anything)


def _with_one_key(monkeypatch):
    original = Agreement.of.__func__

    def same(cls, *secrets_of_both):
        made = original(cls, *secrets_of_both)
        return cls(made.enclave_says, made.worker_says, made.enclave_key, made.enclave_key)

    monkeypatch.setattr(Agreement, "of", classmethod(same))


@pytest.mark.parametrize("breaking", [_without_numbers, _without_tags, _with_one_key])
def test_the_attacks_find_a_broken_pipe(breaking, monkeypatch):
    """The test of the test."""
    breaking(monkeypatch)
    assert attacks_that_pass(FRAMES, Agreement.of(new_secret(), new_secret())) != []


def test_records_look_like_noise():
    """The same frame twice, and in both directions, is something else each time."""
    agreement, frame = Agreement.of(new_secret(), new_secret()), bytes(5000)
    records = [*sealed([frame, frame], agreement), *sealed([frame], agreement, from_worker=True)]
    assert len({record[LENGTH:] for record in records}) == 3
    for record in records:
        assert len(record) == LENGTH + len(frame) + TAG
        most = Counter(record[LENGTH:]).most_common(1)[0][1]
        assert most < 60, "20 on average; 60 have a chance of less than 1e-9"


def test_no_nonce_is_used_twice_and_both_ends_change_keys_together(monkeypatch):
    monkeypatch.setattr(pipe, "RECORDS", 3)
    used, original = [], _Direction._next

    def noted(self):
        nonce = original(self)
        used.append((self._key, nonce))
        return nonce

    with ends() as (enclave, worker), monkeypatch.context() as patch:
        patch.setattr(_Direction, "_next", noted)
        for number in range(10):
            enclave.send([b"%d" % number])
        sent, used = used, []
        assert [bytes(worker.receive()) for _ in range(10)] == [b"%d" % number for number in range(10)]
    assert len(set(sent)) == 10
    assert len({key for key, _ in sent}) == 4


def test_a_forked_process_cannot_send():
    """It would seal something else under a nonce that was used, which shows the difference of both."""
    with ends() as (enclave, worker):
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                enclave._said = -1e9
                enclave.pulse()  # would take the number of what is sent below
                try:
                    enclave.send([b"twice"])
                except PipeBroken:
                    code = 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        enclave.send([b"once"])
        assert bytes(worker.receive()) == b"once"


# --- agreement --------------------------------------------------------------------------------------------------------
def test_both_secrets_make_all_of_it_and_it_stays_as_it_is():
    """A known answer: a version that made other keys would not understand this one."""
    mine, theirs = bytes(range(32)), bytes(range(32, 64))
    made = Agreement.of(mine, theirs)
    parts = [made.enclave_says, made.worker_says, made.enclave_key, made.worker_key]
    assert [len(part) for part in parts] == [TOKEN, TOKEN, 32, 32]
    assert made.enclave_key.hex() == KNOWN
    for other in (Agreement.of(theirs, mine), Agreement.of(bytes(32), theirs), Agreement.of(mine, bytes(32))):
        there = {other.enclave_says, other.worker_says, other.enclave_key, other.worker_key}
        assert there.isdisjoint(parts)
    with pytest.raises(ValueError, match="secrets of 31 and 32 bytes"):
        Agreement.of(mine[1:], theirs)


def test_an_agreement_does_not_wander():
    made = Agreement.of(new_secret(), new_secret())
    assert made.enclave_key.hex() not in repr(made)
    assert repr(handshake.Waiting(7, b"\x07" * 32)) == "Waiting(port=7)"
    assert "0707" not in repr(handshake.read_hello(handshake.hello(None, pipe=b"\x07" * 32)))
    with pytest.raises(TypeError, match="secret"):
        made.__reduce__()


# --- the end ----------------------------------------------------------------------------------------------------------
def test_who_waits_is_woken_when_somebody_hangs_up():
    for who in (0, 1):
        with ends() as both:
            found = []
            thread = threading.Thread(target=lambda both=both, found=found: found.append(both[0].receive()))
            thread.start()
            both[who].hang_up()
            thread.join(WAIT)
            assert found == [None]
            with pytest.raises(PipeBroken):
                both[0].send([bytes(CHUNK)] * 100)


def test_what_was_sent_last_is_read_though_the_other_end_sent_more():
    """A connection that is closed with something unread loses what it has not delivered."""
    with ends() as (enclave, worker):
        enclave.send([bytes(CHUNK)])  # which nobody reads
        thread = threading.Thread(target=lambda: (worker.send([bytes(CHUNK)] * 3), worker.finish(WAIT), worker.close()))
        thread.start()
        assert [len(frame) for frame in iter(enclave.receive, None)] == [CHUNK] * 3
        enclave.hang_up()
        thread.join(WAIT)
        assert not thread.is_alive()


# --- whole links ------------------------------------------------------------------------------------------------------
def test_with_a_pipe_nothing_but_the_greeting_goes_through_grpc(monkeypatch):
    seen = frames_through_grpc(monkeypatch)
    counts = []
    for options in ({}, {"pipe_port": None}):
        with bench(**options) as made:
            link = made.connect()
            link.post(weights())
            assert torch.equal(ask(link, task()).result(WAIT).tensors[Pass.FORWARD], task().tensor + 1)
            assert link.has_pipe != bool(options)
        counts.append(len(seen))
        seen.clear()
    assert counts[0] == 1
    assert counts[1] > 4


def test_without_a_way_to_the_port_frames_go_through_grpc_and_somebody_is_told(caplog):
    with bench() as made:
        made.server._porter.close()
        with caplog.at_level(logging.WARNING, "darknight.fleet"):
            link = made.connect()
        assert torch.equal(ask(link, task()).result(WAIT).tensors[Pass.FORWARD], task().tensor + 1)
        assert not link.has_pipe
    port = made.server.pipe_port
    assert f"no pipe to 127.0.0.1 port {port} (Connection refused)" in caplog.text
    assert "--pipe-port" in caplog.text


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n", b""])
def test_another_program_at_the_port_is_told_nothing(says, caplog):
    heard = []

    def serve(listener):
        visitor = listener.accept()[0]
        with visitor:
            heard.append(visitor.recv(1 << 16))
            visitor.sendall(says)

    with bench() as made, socket.create_server(("127.0.0.1", 0)) as listener:
        made.server._pipe_port = listener.getsockname()[1]
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        link = made.connect()
        assert torch.equal(ask(link, task()).result(WAIT).tensors[Pass.FORWARD], task().tensor + 1)
        thread.join(WAIT)
    assert [len(each) for each in heard] == [TOKEN]
    assert "another program than the worker answers" in caplog.text


def test_a_program_that_says_its_word_slowly_is_not_listened_to_for_long():
    over = threading.Event()

    def serve(listener):
        with listener.accept()[0] as visitor, suppress(OSError):
            while not over.wait(0.1):
                visitor.sendall(b"x")

    with bench() as made, socket.create_server(("127.0.0.1", 0)) as listener:
        made.server._pipe_port = listener.getsockname()[1]
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        begun = time.monotonic()
        link = made.connect(timeout=0.5)
        assert time.monotonic() - begun < 1.5, "a word of 16 letters takes longer"
        assert ask(link, task()).result(WAIT).call == 1
        over.set()
        thread.join(WAIT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_sender_that_fails_ends_the_link(monkeypatch):
    """Otherwise nothing would be sent any more, and everybody would wait."""

    def no_memory(tensor):
        raise RuntimeError("not enough memory")

    with bench() as made:
        link = made.connect()
        monkeypatch.setattr("darknight.wire.outbox.raw", no_memory)
        assert isinstance(ask(link, task()).exception(WAIT), LinkClosed)


@pytest.mark.parametrize("port", [0, None])
def test_a_link_that_waits_keeps_no_tensor_alive(port, monkeypatch):
    kept = []

    def watched(tensor):
        memory = np.asarray(raw(tensor)).view(_Watched)
        kept.append(weakref.ref(memory))
        return memory.data

    for room in ("outbox", "seat", "readers"):
        monkeypatch.setattr(f"darknight.wire.{room}.raw", watched)
    with bench(pipe_port=port) as made:
        link = made.connect()
        assert ask(link, task(tensor=torch.ones(CHUNK))).result(WAIT).call == 1
        deadline = time.monotonic() + WAIT
        while any(reference() is not None for reference in kept):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(kept) == 4, "sent and received, at both ends"


class _Watched(np.ndarray):
    """One that can be watched."""


def test_an_older_worker_has_no_pipe():
    enclave, hellos = Identity.create(ENCLAVE), []

    def welcome():
        hellos.append(1)
        yield handshake.refusal("Upgrade this worker.", 2) if len(hellos) == 1 else handshake.welcome(ABOUT, None, 2)

    def talk(requests):
        if len(hellos) == 2:
            header = codec.unpack(next(requests))
            tensor = next(requests)
            form = {"dtype": header["dtype"], "shape": header["shape"]}
            kept = {name: header[name] for name in ("layer", "call", "ticket")}
            yield codec.pack({"kind": "answer", **kept, "seconds": 0.5, "tensors": {"forward": form}})
            yield tensor

    with rogue_worker(enclave, talk, welcome=welcome) as (address, certificate):
        link = grpc_link.connect(address, certificate=certificate, identity=enclave)
        assert (link.welcome.protocol, link.welcome.pipe) == (2, None)
        assert link.takes_seeds
        assert torch.equal(ask(link, task()).result(WAIT).tensors[Pass.FORWARD], task().tensor)
        link.close()
    assert len(hellos) == 2


def test_an_older_enclave_is_not_told_of_pipes():
    said = handshake.welcome(ABOUT, None, 2)
    assert b"pipe" not in said
    assert b"pipe" not in handshake.hello(None, 2)
    assert handshake.read_welcome(said, 2).pipe is None


@pytest.mark.parametrize(
    "place",
    [
        {"port": 0, "secret": "00" * 32},
        {"port": 1 << 16, "secret": "00" * 32},
        {"port": 7, "secret": "00"},
        {"port": 7},
        7,
    ],
)
def test_a_pipe_that_is_none_is_refused(place):
    good = codec.unpack(handshake.welcome(ABOUT, None))
    with pytest.raises(codec.BadFrame):
        handshake.read_welcome(codec.pack({**good, "pipe": place}))


@contextmanager
def through_a_proxy(made, monkeypatch, meddle):
    """A link whose pipe goes through somebody: meddle(bytes, upwards) -> the bytes that he passes on."""
    dial, threads = pipe.dial, []

    def pump(source, target, upwards):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(meddle(data, upwards))
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def dial_through(host, port, agreement, timeout):
        listener = socket.create_server(("127.0.0.1", 0))
        far = socket.create_connection((host, port))

        def accept():
            with listener:
                near = listener.accept()[0]
            for arguments in ((near, far, True), (far, near, False)):
                threads.append(threading.Thread(target=pump, args=arguments, daemon=True))
                threads[-1].start()

        threading.Thread(target=accept, daemon=True).start()
        return dial(host, listener.getsockname()[1], agreement, timeout)

    monkeypatch.setattr(pipe, "dial", dial_through)
    link = made.connect()
    monkeypatch.setattr(pipe, "dial", dial)
    yield link
    link.close()
    for thread in threads:
        thread.join(2)


@pytest.mark.parametrize("upwards", [True, False])
def test_who_changes_a_byte_on_the_way_ends_the_link_and_the_worker_is_not_to_blame(upwards, monkeypatch):
    meddling = threading.Event()

    def meddle(data, up):
        return data[:-1] + bytes([data[-1] ^ 1]) if meddling.is_set() and up is upwards else data

    with bench() as made, through_a_proxy(made, monkeypatch, meddle) as link:
        assert ask(link, task()).result(WAIT).call == 1
        meddling.set()
        error = ask(link, task(2)).exception(WAIT)
        assert type(error) is LinkClosed
        assert made.sessions[0].closed.wait(WAIT)
        assert len(made.sessions[0].read) == (1 if upwards else 2)
        assert ask(made.connect(), task(3)).result(WAIT).call == 3


def test_what_passes_by_is_not_in_the_clear(monkeypatch):
    seen = bytearray()

    def listen(data, upwards):
        seen.extend(data)
        return data

    tensor = torch.full((1000,), 1234.5)
    with bench() as made, through_a_proxy(made, monkeypatch, listen) as link:
        answer = ask(link, task(tensor=tensor, layer="a-name-to-look-for")).result(WAIT)
    assert len(seen) > 2 * tensor.nbytes
    for word in (tensor[:4], answer.tensors[Pass.FORWARD][:4]):
        assert word.numpy().tobytes() not in seen
    assert b"a-name-to-look-for" not in seen


def test_a_worker_that_reads_nothing_holds_up_nobody_and_is_noticed():
    class Blind(EchoSession):
        def serve(self, seat):
            seat.read()
            self.gate.wait(WAIT)

    with bench(Blind) as made:
        link = made.connect()
        made.sessions[0].gate.clear()
        large = torch.zeros(8 << 20)
        futures = [ask(link, task(call, large)) for call in range(3)]  # more than a connection holds
        assert not any(future.done() for future in futures)
        with suppress(LinkClosed):
            for number in range(2 * MOST_PARCELS):
                link.post(Forget(calls=(number,)))
        assert "reads nothing" in str(link.failure)
        assert all(isinstance(future.exception(WAIT), LinkClosed) for future in futures)
        made.sessions[0].gate.set()


def test_a_worker_that_stops_is_heard_to_its_last_word():
    with bench() as made:
        link = made.connect()
        session = made.sessions[0]
        session.gate.clear()
        future = ask(link, task(tensor=torch.ones(CHUNK)))
        assert session.computing.wait(WAIT)
        stopping = threading.Thread(target=made.server.stop, args=(WAIT,))
        stopping.start()
        session.gate.set()
        assert future.result(WAIT).tensors[Pass.FORWARD].sum() == 2 * CHUNK
        stopping.join(WAIT)
        with pytest.raises(LinkError):
            ask(link, task(2)).result(WAIT)


def test_a_link_that_is_closed_leaves_no_thread_and_no_connection():
    with bench() as made:
        before = set(threading.enumerate())
        link = made.connect()
        assert ask(link, task()).result(WAIT).call == 1
        connection = link._stream._pipe._connection
        link.close()
        assert connection.fileno() == -1
        assert made.sessions[0].closed.wait(WAIT)
        deadline = time.monotonic() + WAIT
        while (
            left := {t for t in set(threading.enumerate()) - before if "pipe" in t.name}
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left


# --- who comes to the port --------------------------------------------------------------------------------------------
@pytest.fixture
def porter():
    listener = pipe.listen_for_pipes("127.0.0.1", 0)
    made = Doorkeeper(listener)
    yield SimpleNamespace(keeper=made, address=listener.getsockname())
    made.close()


def test_a_word_may_come_in_pieces(porter):
    visit = porter.keeper.expect(b"e" * TOKEN, b"w" * TOKEN)
    with socket.create_connection(porter.address) as visitor:
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in (b"e" * 3, b"e" * 12, b"e"):
            visitor.sendall(part)
            time.sleep(0.02)
        visitor.settimeout(WAIT)
        assert visitor.recv(TOKEN) == b"w" * TOKEN
        visit.wait(WAIT).close()


@pytest.mark.parametrize("said", [b"x" * TOKEN, b"e" * TOKEN + b"x", bytes(5000), b"e" * (TOKEN - 1)])
def test_a_stranger_gets_no_word_and_no_hearing(porter, said, monkeypatch):
    monkeypatch.setattr("darknight.wire.doors._PATIENCE", 0.1)
    visit = porter.keeper.expect(b"e" * TOKEN, b"w" * TOKEN)
    with socket.create_connection(porter.address) as visitor:
        visitor.sendall(said)
        visitor.settimeout(WAIT)
        with suppress(ConnectionResetError):
            assert visitor.recv(TOKEN) == b""
    visit.cancel()


def test_strangers_keep_no_enclave_out():
    with bench() as made:
        silent = [socket.create_connection(("127.0.0.1", made.server.pipe_port)) for _ in range(100)]
        for number, visitor in enumerate(silent):
            with suppress(OSError):
                visitor.sendall(bytes(number % 40))
        link = made.connect()
        assert link.has_pipe
        assert ask(link, task()).result(WAIT).call == 1
        for visitor in silent:
            visitor.close()


def test_what_keys_were_made_of_is_dropped():
    with bench() as made:
        link = made.connect()
        assert ask(link, task()).result(WAIT).call == 1
        assert link.welcome.pipe is None
        (seat,) = made.server._seats
        assert seat._open_pipe is None


def test_a_connection_is_closed_when_nobody_uses_it_any_more():
    """Its number would be another's at once, and what is sent would go there."""
    with ends() as (enclave, _):
        enclave._receives.acquire()
        closing = threading.Thread(target=enclave.close)
        closing.start()
        time.sleep(0.05)
        assert enclave._connection.fileno() > 0
        enclave._receives.release()
        closing.join(WAIT)
        assert enclave._connection.fileno() == -1


def test_who_says_a_word_again_is_not_let_in(monkeypatch):
    """The word is seen on the way. Whoever says it first is let in and can do nothing; later it opens nothing."""
    words, original = [], Agreement.of.__func__
    monkeypatch.setattr(
        Agreement, "of", classmethod(lambda cls, *both: words.append(original(cls, *both)) or words[-1])
    )
    with bench() as made:
        link = made.connect()
        with socket.create_connection(("127.0.0.1", made.server.pipe_port)) as visitor:
            visitor.sendall(words[-1].enclave_says)
            visitor.settimeout(WAIT)
            with suppress(ConnectionResetError):
                assert visitor.recv(TOKEN) == b""
        assert ask(link, task()).result(WAIT).call == 1


def test_an_enclave_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("darknight.wire.grpc_seat._DOOR", 0.1)

    def late(*_):
        time.sleep(0.5)
        raise PipeBroken("too late")

    monkeypatch.setattr(pipe, "dial", late)
    with bench() as made:
        link = made.connect()  # through gRPC, by the second attempt
        assert made.sessions[0].closed.wait(WAIT)
        assert ask(link, task()).result(WAIT).call == 1


def test_a_port_that_is_taken_is_refused_in_words():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        identity = Identity.create(ENCLAVE)
        server = WorkerServer(
            listen="127.0.0.1:0",
            identity=identity,
            allowed=[identity.certificate],
            about=ABOUT,
            open_session=EchoSession,
            pipe_port=port,
        )
        with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1 port {port} for pipes: .*--pipe-port"):
            server.start()


# --- ends that do not keep to the protocol ----------------------------------------------------------------------------
def test_an_enclave_survives_every_worker_with_a_pipe(full, monkeypatch):
    """It has the keys, and says what it likes."""
    rng, seen = random.Random(6), Counter()
    tasks = [task(1), backward(2), task(3, torch.ones(300))]

    def babbling(seat):
        frames = [bytes(frame) for _, message in zip(tasks, seat._outbox.messages(), strict=False) for frame in message]
        with suppress(PipeBroken):
            for frame in mutated(rng, frames):
                seat._pipe.send([frame] if 0 < len(frame) <= CHUNK else [b"{}"])
        seat._pipe.finish(1)
        yield from ()

    monkeypatch.setattr(GrpcSeat, "frames", babbling)
    with bench() as made:
        for _ in range(200 if full else 30):
            link = made.connect()
            for message, future in [(message, ask(link, message)) for message in tasks]:
                error = future.exception(WAIT)  # an end, in time
                assert error is None or isinstance(error, LinkError)
                if error is None:
                    shapes = {kind: tuple(tensor.shape) for kind, tensor in future.result().tensors.items()}
                    assert shapes == expected(message).shapes
                seen[type(error).__name__] += 1
            link.close()
    assert seen["Misbehaved"] > 0
    assert seen["NoneType"] > 0


def test_a_worker_survives_every_enclave_with_a_pipe(full, monkeypatch):
    rng, original = random.Random(7), Outbox.detour

    def babbling(outbox):
        for frames in original(outbox):
            yield [frame for frame in mutated(rng, [bytes(frame) for frame in frames]) if 0 < len(frame) <= CHUNK]

    with bench(lambda peer: EchoSession(peer, limit=1 << 20)) as made:
        honest = made.connect()
        for _ in range(200 if full else 30):
            with monkeypatch.context() as patch:
                patch.setattr(Outbox, "detour", babbling)
                link = made.connect()
            futures = []
            with suppress(LinkError):
                link.post(weights())
                futures = [ask(link, task(call)) for call in range(3)]
            time.sleep(0.01)
            link.close()
            assert all(future.done() for future in futures)
        assert ask(honest, task()).result(WAIT).call == 1
        for session in made.sessions[1:]:
            assert session.closed.wait(WAIT)


def test_the_tap_on_the_stream_sees_no_tensor():
    """A proxy in front of the first port alone: the pipe goes past it, and the stream stays small."""
    tensor = torch.ones(1 << 20)
    with bench() as made, tap(made.address) as (through, seen):
        link = grpc_link.connect(through, certificate=made.worker.certificate, identity=made.enclave)
        assert ask(link, task(tensor=tensor)).result(WAIT).call == 1
        link.close()
    assert len(seen["up"]) + len(seen["down"]) < 20_000
