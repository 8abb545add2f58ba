"""The gRPC transport: what crosses it, what breaks a link, and what never breaks anything else."""

import gc
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from darknight.errors import OpError, UsageError
from darknight.types import Answer, Expected, Forget, Pass, Refusal, Weights
from darknight.wire import codec, grpc_link, grpc_seat, handshake
from darknight.wire.codec import CHUNK
from darknight.wire.grpc_link import connect
from darknight.wire.grpc_seat import WorkerServer
from darknight.wire.identity import ENCLAVE, WORKER, Identity
from darknight.wire.link import LinkClosed, Misbehaved, Refused
from darknight.wire.shared_memory import Host
from darknight.wire.tls import SERVICE, client_credentials, grpc
from wire.peers import (
    EchoSession,
    ask,
    backward,
    bench,
    everything,
    task,
    weights,
    worker_process,
)
from wire.rogue import negotiated_version, raw_stream, rogue_worker, signed_by, tap, tls_client

DOOR = f"@darknight-test-{os.getpid()}"
WAIT = 30.0  # seconds for what takes milliseconds, on a machine that is busy with other things


@pytest.fixture(scope="module")
def enclave():
    return Identity.create(ENCLAVE)


@pytest.fixture(params=["stream", "pipe", "shared memory"])
def both(request):
    """A bench whose tensors go through the stream, a pipe beside it, or shared memory."""
    door, port = DOOR if request.param == "shared memory" else None, 0 if request.param == "pipe" else None
    with bench(shared_memory=door, pipe_port=port) as made:
        yield made


@pytest.fixture
def plain():
    with bench() as made:
        yield made


def threads():
    return {thread for thread in threading.enumerate() if thread.is_alive()}


def eventually(condition, seconds=WAIT):
    """Waits for what another process or gRPC's own threads do, of which no event tells."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


# --- what crosses ---------------------------------------------------------------------------------------------------
def test_every_message_arrives_as_it_was_sent(both):
    link = both.connect()
    sent = [weights(), task(), backward(), Forget(calls=(1, 2), weights=(("net.0", 0),)), task(7)]
    answers = [link.post(m) if isinstance(m, Weights | Forget) else ask(link, m).result(WAIT) for m in sent]
    read = both.sessions[0].read
    assert [type(message) for message in read] == [type(message) for message in sent]
    assert (read[0].op, read[0].prime, read[0].version) == (sent[0].op, None, 0)
    assert (read[2].passes, read[2].x_shape, read[2].row) == (sent[2].passes, (2, 3), None)
    assert read[3] == sent[3]
    assert torch.equal(answers[1].tensors[Pass.FORWARD], sent[1].tensor + 1)
    assert list(answers[2].tensors) == [Pass.GRAD_INPUT, Pass.GRAD_WEIGHT]
    assert (answers[4].layer, answers[4].call, answers[4].seconds) == ("net.0", 7, 0.5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_every_dtype_and_odd_shapes(both, dtype):
    link = both.connect()
    edge = CHUNK // dtype.itemsize
    for shape in [(), (0,), (3, 0, 2), (1,), (edge,), (edge + 1,), (2, edge - 1)]:
        tensor = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)
        answer = ask(link, task(tensor=tensor)).result(WAIT).tensors[Pass.FORWARD]
        assert answer.dtype == dtype
        assert torch.equal(answer, tensor + 1)


def test_a_share_that_is_not_contiguous_arrives_in_order(both):
    tensor = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(ask(both.connect(), task(tensor=tensor)).result(WAIT).tensors[Pass.FORWARD], tensor + 1)


def test_the_welcome_says_what_the_worker_is(both):
    welcome = both.connect().welcome
    assert (welcome.operator, welcome.device, welcome.memory, welcome.protocol) == (
        "acme",
        "cpu",
        1 << 30,
        handshake.PROTOCOL,
    )


def test_answers_come_in_any_order(both):
    class Backwards(EchoSession):
        def serve(self, seat):
            read = [seat.read() for _ in range(5)]
            for ticket, message in reversed(read):
                seat.write(ticket, self.reply(message))
            super().serve(seat)

    both._make = Backwards
    link = both.connect()
    tensors = [torch.full((300, 1000), float(n)) for n in range(5)]  # more than one chunk
    done = []
    futures = [ask(link, task(n, tensor)) for n, tensor in enumerate(tensors)]
    for n, future in enumerate(futures):
        future.add_done_callback(lambda _, n=n: done.append(n))
    for future, tensor in zip(futures, tensors, strict=True):
        assert torch.equal(future.result(WAIT).tensors[Pass.FORWARD], tensor + 1)
    assert done == [4, 3, 2, 1, 0]


def test_an_answer_is_memory_of_its_own(both):
    link = both.connect()
    first = ask(link, task(1)).result(WAIT).tensors[Pass.FORWARD]
    before = first.clone()
    for n in range(5):
        ask(link, task(n, torch.full((2, 3), 9.0))).result(WAIT)
    assert torch.equal(first, before)


def test_a_cancelled_answer_is_dropped_and_the_link_lives(both):
    link = both.connect()
    ask(link, task()).result(WAIT)
    session = both.sessions[0]
    session.gate.clear()
    late = ask(link, task(2))
    assert late.cancel()
    session.gate.set()
    assert ask(link, task(3)).result(WAIT).call == 3
    assert link.failure is None


def test_a_refusal_ends_one_task_and_its_words_are_printable(both):
    class Refusing(EchoSession):
        def reply(self, message):
            return Refusal(message="no \x1b[31mroom\n") if message.call == 1 else super().reply(message)

    both._make = Refusing
    link = both.connect()
    with pytest.raises(Refused, match=r"^no  \[31mroom $"):
        ask(link, task(1)).result(WAIT)
    assert ask(link, task(2)).result(WAIT).call == 2


def test_what_the_session_has_no_room_for_is_not_kept_and_refused_in_its_words(both):
    both._make = lambda peer: EchoSession(peer, limit=1000)
    link = both.connect()
    link.post(weights(version=3, tensor=torch.ones(100, 100)))
    with pytest.raises(Refused, match="8000000 bytes needed and 1000 free"):
        ask(link, task(1, torch.ones(2_000_000))).result(WAIT)
    assert ask(link, task(2)).result(WAIT).call == 2
    read = both.sessions[0].read
    assert [(m.layer, m.version) for m in read[:2]] == [("net.0", 3), ("net.0", None)]


def test_a_long_list_to_forget_arrives_whole(both):
    link = both.connect()
    calls = tuple(range(2**62, 2**62 + 5_000))
    keys = tuple((f"layer {'ä' * 900} {n}", n) for n in range(50))
    link.post(Forget(calls=calls, weights=keys))
    ask(link, task()).result(WAIT)
    read = both.sessions[0].read[:-1]
    assert tuple(call for message in read for call in message.calls) == calls
    assert tuple(key for message in read for key in message.weights) == keys


def test_what_does_not_fit_the_wire_is_said_before_it_is_sent(both):
    link = both.connect()
    for message in (task(tensor=torch.ones(2, dtype=torch.float16)), task(layer="x" * 70_000)):
        with pytest.raises(OpError, match="does not fit the wire"):
            ask(link, message)
    assert ask(link, task()).result(WAIT).call == 1


# --- what a worker can do to an enclave -----------------------------------------------------------------------------
def reply_to(ticket, message=None, **changes):
    message = message or task()
    answer = Answer(layer="net.0", call=1, tensors={Pass.FORWARD: message.tensor}, seconds=0.0)
    return {**codec.reply_header(answer), "ticket": ticket, **changes}


def form(dtype="float32", shape=(2, 3)):
    return {"dtype": dtype, "shape": list(shape)}


DATA = bytes(24)
MISDEEDS = {
    "junk": [b"\xff\x00junk"],
    "not an object": [b"[1, 2]"],
    "a ticket that was never given": [codec.pack(reply_to(9)), DATA],
    "answered twice": [codec.pack(reply_to(1)), DATA, codec.pack(reply_to(1)), DATA],
    "another call": [codec.pack(reply_to(1, call=5)), DATA],
    "another layer": [codec.pack(reply_to(1, layer="net.1")), DATA],
    "another shape": [codec.pack(reply_to(1, tensors={"forward": form(shape=(3, 2))})), DATA],
    "another dtype": [codec.pack(reply_to(1, tensors={"forward": form("int32")})), DATA],
    "a huge claim": [codec.pack(reply_to(1, tensors={"forward": form(shape=(2**30, 2**10))})), DATA],
    "no tensor": [codec.pack(reply_to(1, tensors={}))],
    "another pass": [codec.pack(reply_to(1, tensors={"grad_input": form()})), DATA],
    "a short chunk": [codec.pack(reply_to(1)), DATA[:-1]],
    "a long chunk": [codec.pack(reply_to(1)), DATA + b"x"],
    "an extra key": [codec.pack(reply_to(1, code="x")), DATA],
    "a place of its own": [codec.pack(reply_to(1, place=[1, 0]))],
    "time that is none": [codec.pack(reply_to(1, seconds=-1.0)), DATA],
    "a frame that is too large": [bytes(3 * CHUNK)],
    "a chunk before its header": [DATA],
}


@pytest.mark.parametrize("frames", MISDEEDS.values(), ids=MISDEEDS.keys())
def test_a_worker_that_misbehaves_loses_its_link_and_every_future_ends(enclave, frames):
    before = threads()

    def talk(requests):
        for _ in range(4):  # two tasks
            next(requests)
        yield from frames
        next(requests, None)  # it keeps the stream open

    with rogue_worker(enclave, talk) as (address, certificate):
        link = connect(address, certificate=certificate, identity=enclave)
        futures = [ask(link, task()), ask(link, task(2))]
        with pytest.raises(Misbehaved):
            futures[1].result(WAIT)
        if frames != MISDEEDS["answered twice"]:
            assert isinstance(futures[0].exception(WAIT), Misbehaved)
        assert isinstance(link.failure, Misbehaved)
        with pytest.raises(Misbehaved):
            link.post(everything())
        with pytest.raises(Misbehaved):
            ask(link, task())
        link.close()
    eventually(lambda: threads() <= before)


def test_a_small_frame_cannot_become_a_large_one(enclave):
    """Zeros compress a thousandfold. A compressed frame is taken as it is; gRPC must not unpack it."""

    def talk(requests):
        for _ in range(2):
            next(requests)
        yield bytes(4 * CHUNK)

    with rogue_worker(enclave, talk, compression=grpc.Compression.Gzip) as (address, certificate):
        link = connect(address, certificate=certificate, identity=enclave)
        with pytest.raises(Misbehaved, match="not UTF-8 JSON"):
            ask(link, task()).result(WAIT)
        link.close()


def test_nor_at_the_worker(plain):
    frames, gzip = _held([bytes(4 * CHUNK)]), grpc.Compression.Gzip
    with (
        raw_stream(plain.address, plain.worker.certificate, plain.enclave, frames, compression=gzip) as call,
        pytest.raises(grpc.RpcError, match="not UTF-8 JSON"),
    ):
        list(call)


@pytest.mark.parametrize(
    ("welcome", "error", "words"),
    [
        (
            codec.pack({"darknight": "9.9", "protocol": 4, "new": 1}),
            LinkClosed,
            "protocol 4 .*9.9.*Upgrade this enclave",
        ),
        (codec.pack({"darknight": "0.0", "protocol": 0}), LinkClosed, "Upgrade the worker"),
        (handshake.refusal("it is full"), LinkClosed, "refused the link: it is full"),
        (codec.pack({"darknight": "9.9", "protocol": 1}), Misbehaved, "other keys"),
        (b"SSH-2.0", Misbehaved, "not UTF-8 JSON"),
        (codec.pack({"protocol": True, "darknight": "1"}), Misbehaved, "whole number"),
    ],
)
def test_a_handshake_that_does_not_fit_is_refused_in_words(enclave, welcome, error, words):
    with (
        rogue_worker(enclave, lambda requests: iter(()), welcome=welcome) as (address, certificate),
        pytest.raises(error, match=words),
    ):
        connect(address, certificate=certificate, identity=enclave)


def test_a_worker_that_never_says_hello_is_given_up(enclave):
    gate = threading.Event()

    def wait():
        gate.wait(2 * WAIT)
        yield b""

    with rogue_worker(enclave, lambda requests: wait(), welcome=wait) as (address, certificate):
        begun = time.monotonic()
        with pytest.raises(LinkClosed, match="did not answer within"):
            connect(address, certificate=certificate, identity=enclave, timeout=0.5)
        assert time.monotonic() - begun < WAIT
        gate.set()


# --- what an enclave can do to a worker -----------------------------------------------------------------------------
def message(ticket=1, **changes):
    return codec.pack({**codec.header_of(task()), "ticket": ticket, **changes})


BAD_MESSAGES = {
    "junk": [b"junk"],
    "no ticket": [codec.pack(codec.header_of(task()))],
    "the same ticket": [message(), DATA, message(), DATA],
    "a short chunk": [message(), DATA[:-4]],
    "an unknown kind": [message(kind="run")],
    "an unknown key": [message(code="import os")],
    "a place without shared memory": [message(place=[0, 0])],
    "answers without a place": [message(answers={"forward": [0, 0]})],
    "an axis beyond every limit": [message(shape=[2**41])],
    "a frame that is too large": [bytes(2 * CHUNK)],
}


@pytest.mark.parametrize("frames", BAD_MESSAGES.values(), ids=BAD_MESSAGES.keys())
def test_a_malformed_message_ends_its_stream_only(plain, frames):
    honest = plain.connect()
    with raw_stream(plain.address, plain.worker.certificate, plain.enclave, _held(frames)) as call:
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        code = caught.value.code()
        assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
        if frames != BAD_MESSAGES["a frame that is too large"]:
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details()
    assert plain.sessions[1].closed.wait(WAIT)
    assert ask(honest, task()).result(WAIT).call == 1
    assert ask(plain.connect(), task()).result(WAIT).call == 1


def _held(frames):
    """Hello, the frames, and then silence: the stream stays open."""
    yield handshake.hello(None)
    yield from frames
    threading.Event().wait(2)


def test_a_huge_claim_is_put_to_the_session_before_room_is_made(monkeypatch):
    made = []
    monkeypatch.setattr("darknight.wire.readers.torch.empty", lambda *a, **k: made.append(k) or torch.zeros(0))
    with bench(lambda peer: EchoSession(peer, limit=1000)) as plain:
        frames = [message(shape=[2**20, 2**10]), *[bytes(CHUNK)] * 3]
        with raw_stream(plain.address, plain.worker.certificate, plain.enclave, _held(frames)) as call:
            next(call)
            eventually(lambda: plain.sessions[0].asked_for == [2**32])
    assert all(settings.get("device") == "meta" for settings in made)


def test_an_enclave_that_goes_away_ends_its_session_also_while_it_computes(plain):
    link = plain.connect()
    ask(link, task()).result(WAIT)
    session = plain.sessions[0]
    session.gate.clear()
    session.computing.clear()
    for n in range(3):
        ask(link, task(n))
    assert session.computing.wait(WAIT)
    link.close()
    eventually(lambda: link.failure is not None)
    assert not session.closed.is_set()
    session.gate.set()
    assert session.closed.wait(WAIT)
    assert len(session.read) <= 3  # the first, the one under way, and at most one that was half-way there


def test_an_enclave_that_reads_no_answers_gets_no_further_ones(plain):
    big = torch.ones(CHUNK)  # 4 MiB of answer each

    def frames():
        yield handshake.hello(None)
        for n in range(1, 9):
            yield message(n, call=n, shape=[CHUNK])
            for begin, end in codec.chunks_of(big.nbytes):
                yield bytes(end - begin)
        threading.Event().wait(3)

    with raw_stream(plain.address, plain.worker.certificate, plain.enclave, frames()) as call:
        next(call)
        eventually(lambda: len(plain.sessions[0].read) >= 2)
        time.sleep(0.5)  # to show that something does not happen, one has to wait
        assert len(plain.sessions[0].read) < 8
    assert plain.sessions[0].closed.wait(WAIT)


def test_another_protocol_is_refused_by_the_worker_in_words(plain):
    for protocol, side in ((0, "the enclave"), (7, "this worker")):
        hello = codec.pack({"darknight": "0.0.1", "protocol": protocol, "other": "things"})
        with raw_stream(plain.address, plain.worker.certificate, plain.enclave, [hello]) as call:
            said = codec.unpack(next(call))
        assert said["protocol"] == handshake.PROTOCOL
        assert f"protocol {protocol}" in said["refused"]
        assert said["refused"].endswith(f"Upgrade {side}.")
    assert plain.sessions == []


def test_a_session_that_is_refused_says_why(plain):
    def full(peer):
        assert peer.fingerprint == plain.enclave.fingerprint
        raise UsageError("two enclaves are served already; raise --enclaves")

    plain._make = full
    with pytest.raises(LinkClosed, match="raise --enclaves"):
        plain.connect()


@pytest.mark.parametrize("what", ["thread", "door"])
def test_a_session_that_cannot_begin_is_closed(what, monkeypatch):
    """It would hold its place and its memory for ever."""
    start = threading.Thread.start

    def none_left(thread):
        if thread.name == "darknight-session":
            raise RuntimeError("can't start new thread")
        start(thread)

    def closed(*_):
        raise OSError("no descriptor left")

    with bench(shared_memory=DOOR, streams=1) as made:
        with monkeypatch.context() as patch:
            if what == "thread":
                patch.setattr(threading.Thread, "start", none_left)
            else:
                patch.setattr(made.server._keeper, "expect", closed)
            with pytest.raises(LinkClosed):
                made.connect()
            assert made.sessions[0].closed.wait(WAIT)
        eventually(lambda: not made.server._seats)
        assert ask(made.connect(), task()).result(WAIT)  # its place is free


def test_a_stream_that_says_nothing_is_dropped(plain, monkeypatch):
    monkeypatch.setattr(grpc_seat, "_HELLO", 0.2)
    over = threading.Event()

    def silence():
        over.wait(2 * WAIT)
        yield b""

    begun = time.monotonic()
    with (
        raw_stream(plain.address, plain.worker.certificate, plain.enclave, silence()) as call,
        pytest.raises(grpc.RpcError),
    ):
        next(call)
    assert time.monotonic() - begun < WAIT
    over.set()
    assert plain.sessions == []


def quiet_streams(where, number, method=None):
    """Streams that say nothing: the calls, and what lets them go."""
    over = threading.Event()

    def silence():
        over.wait(2 * WAIT)
        yield from ()

    options = [("grpc.ssl_target_name_override", WORKER)]
    channel = grpc.secure_channel(where[0], client_credentials(where[2], where[1]), options)
    stream = channel.stream_stream(method or f"/{SERVICE}/Link")
    return [stream(silence()) for _ in range(number)], over, channel


@pytest.mark.parametrize("method", [f"/{SERVICE}/Link", "/grpc.health.v1.Health/Check"])
def test_silent_streams_of_one_enclave_are_few_and_keep_no_other_out(enclave, monkeypatch, method):
    monkeypatch.setattr(grpc_seat, "_HELLO", 2 * WAIT)
    other = Identity.create(ENCLAVE)
    with bench(streams=1, allowed=[enclave.certificate, other.certificate]) as made:
        calls, over, channel = quiet_streams((made.address, made.worker.certificate, enclave), 16, method)
        try:
            eventually(lambda: sum(call.done() for call in calls) == 16 - grpc_seat._NEWCOMERS)  # those end at once
            assert {call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            with pytest.raises(LinkClosed, match="are waiting to be heard already"):
                made.connect(identity=enclave)
            assert ask(made.connect(identity=other), task()).result(WAIT).call == 1
        finally:
            over.set()
            channel.close()
        eventually(lambda: not any(made.server._newcomers.values()))


def test_an_enclave_that_does_not_take_its_answers_loses_its_stream_when_its_session_ends(plain, monkeypatch):
    """Else such streams would pile up: their sessions are over, so nothing counts them."""
    monkeypatch.setattr(grpc_seat, "_FAREWELL", 0.2)
    ended = []
    monkeypatch.setattr(plain.server, "_peer", _noting_the_end(plain.server._peer, ended))
    answering = threading.Event()

    def frames():
        yield from (handshake.hello(None), message(shape=[4 * CHUNK]), *[bytes(CHUNK)] * 16)
        answering.wait(WAIT)
        yield b"no header"

    with raw_stream(plain.address, plain.worker.certificate, plain.enclave, frames()) as call:
        for _ in ("welcome", "header of the answer"):
            next(call)
        answering.set()  # the rest of it, 16 MiB, is never read
        eventually(lambda: plain.sessions[0].closed.is_set())
        eventually(lambda: ended)


def _noting_the_end(look, ended):
    def peer(context):
        context.add_callback(lambda: ended.append(1))
        return look(context)

    return peer


def test_more_streams_than_allowed_are_refused():
    with bench(streams=1) as made:
        first = made.connect()
        with pytest.raises(LinkClosed, match="serves 1 enclaves already"):
            made.connect()
        first.close()
        assert made.sessions[0].closed.wait(WAIT)
        eventually(lambda: not made.server._seats)
        assert ask(made.connect(), task()).result(WAIT).call == 1


# --- who is who -----------------------------------------------------------------------------------------------------
def test_a_stranger_is_refused_by_the_worker(plain):
    with pytest.raises(LinkClosed, match="--allow-enclave"):
        plain.connect(identity=Identity.create(ENCLAVE))
    assert plain.sessions == []


def test_a_worker_with_another_certificate_is_refused(plain):
    other = Identity.create(WORKER)
    with pytest.raises(LinkClosed, match=f"another certificate than {other.fingerprint}"):
        plain.connect(certificate=other.certificate)
    assert plain.sessions == []


def test_a_certificate_that_an_allowed_one_signed_is_not_allowed(plain):
    """An enclave must not be able to let others in. TLS would accept it: OpenSSL takes every root for an authority."""
    child = signed_by(plain.enclave)
    with pytest.raises(LinkClosed):
        plain.connect(identity=child)
    assert plain.sessions == []


def test_an_enclaves_certificate_is_no_workers(enclave):
    server = WorkerServer(
        listen="127.0.0.1:0",
        identity=enclave,
        allowed=[enclave.certificate],
        about={"operator": "a", "device": "cpu", "memory": 1},
        open_session=EchoSession,
    )
    with pytest.raises(LinkClosed, match="not a worker's"):
        connect(server.start(), certificate=enclave.certificate, identity=enclave)
    server.stop(1)


def test_addresses_where_no_worker_is(enclave):
    certificate = Identity.create(WORKER).certificate
    with pytest.raises(LinkClosed, match="nothing listens there"):
        connect("127.0.0.1:1", certificate=certificate, identity=enclave)
    with pytest.raises(LinkClosed, match="no such host"):
        connect("no-such-host.invalid:7001", certificate=certificate, identity=enclave)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(LinkClosed, match="did not answer within"):
        connect(f"127.0.0.1:{silent.getsockname()[1]}", certificate=certificate, identity=enclave, timeout=0.3)


def test_only_tls_1_3_is_spoken(plain, tmp_path):
    with tap(plain.address) as (through, seen):
        link = connect(through, certificate=plain.worker.certificate, identity=plain.enclave, pipe=False)
        tensor = torch.full((1000,), 1234.5)
        ask(link, task(tensor=tensor, layer="a-name-to-look-for")).result(WAIT)
        link.close()
    assert negotiated_version(bytes(seen["down"])) == 0x0304
    assert len(seen["up"]) > tensor.nbytes
    for direction in seen.values():
        assert tensor[:4].numpy().tobytes() not in direction
        assert b"a-name-to-look-for" not in direction
    with tls_client(plain.address, plain.worker.certificate, plain.enclave, ssl.TLSVersion.TLSv1_3, tmp_path) as new:
        assert new.version() == "TLSv1.3"
    with pytest.raises(OSError, match=r"(?i)eof|handshake|reset"):
        tls_client(plain.address, plain.worker.certificate, plain.enclave, ssl.TLSVersion.TLSv1_2, tmp_path)


def test_nobody_is_heard_without_a_certificate(plain, tmp_path):
    heard = []
    for who in (plain.enclave, None):  # with one, as the control
        with tls_client(plain.address, plain.worker.certificate, who, ssl.TLSVersion.TLSv1_3, tmp_path) as client:
            try:
                client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                heard.append(client.recv(9))
            except OSError:
                heard.append(b"")
    assert heard[0]
    assert heard[1] == b""


def test_a_worker_does_not_start_where_tls_1_2_is_possible():
    """The control: with gRPC imported first, TLS 1.2 is spoken, and that is noticed."""
    script = (
        "import grpc; from darknight.wire.identity import *; from darknight.wire.grpc_seat import WorkerServer\n"
        "me = Identity.create(WORKER)\n"
        "WorkerServer(listen='127.0.0.1:0', identity=me, allowed=[me.certificate],"
        " about=dict(operator='a', device='cpu', memory=1), open_session=None)"
    )
    clean = {name: value for name, value in os.environ.items() if name != "GRPC_SSL_CIPHER_SUITES"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean, timeout=60)
    assert "TLS 1.2 cannot be ruled out" in done.stderr


# --- start, stop, health --------------------------------------------------------------------------------------------
def test_a_taken_port_is_said_in_words(plain):
    with pytest.raises(UsageError, match=r"port is taken.*Choose another --listen\.$"):
        bench(listen=plain.address).__enter__()


def test_a_worker_that_serves_nobody_does_not_construct(enclave):
    with pytest.raises(UsageError, match="--allow-enclave"):
        WorkerServer(listen="127.0.0.1:0", identity=enclave, allowed=[], about={}, open_session=EchoSession)


def health(address, certificate, enclave, service):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = [("grpc.ssl_target_name_override", WORKER)]
    with grpc.secure_channel(address, client_credentials(enclave, certificate), options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=WAIT).status


def test_nobody_can_watch_a_workers_health_nor_ask_for_what_is_not_there(plain):
    """Watch of the stock service holds a lock while it sends: who does not read stops the server."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    where = plain.address, plain.worker.certificate, plain.enclave
    options = [("grpc.ssl_target_name_override", WORKER)]
    with grpc.secure_channel(plain.address, client_credentials(where[2], where[1]), options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE, "x" * 1000):
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=WAIT))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        junk = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError) as caught:
            junk(b"\xff", timeout=WAIT)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for service, code in (("other", grpc.StatusCode.NOT_FOUND), ("x" * 1000, grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.RpcError) as caught:
            health(*where, service)
        assert caught.value.code() is code


def test_a_certificate_that_an_allowed_one_signed_may_not_ask_for_health(plain):
    signed = signed_by(plain.enclave)
    with pytest.raises(grpc.RpcError) as caught:
        health(plain.address, plain.worker.certificate, signed, "")
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_stopping_answers_what_runs_refuses_what_comes_and_says_so(plain):
    where = plain.address, plain.worker.certificate, plain.enclave
    assert [health(*where, service) for service in ("", SERVICE)] == [1, 1]  # SERVING
    link = plain.connect()
    ask(link, task()).result(WAIT)
    session = plain.sessions[0]
    session.gate.clear()
    session.computing.clear()
    running, queued = ask(link, task(2)), ask(link, task(3))
    assert session.computing.wait(WAIT)
    stopping = threading.Thread(target=plain.server.stop, args=(2 * WAIT,))
    stopping.start()
    eventually(lambda: plain.server._stopping)
    assert [health(*where, service) for service in ("", SERVICE)] == [2, 2]  # NOT_SERVING
    with pytest.raises(LinkClosed, match="stopping"):
        plain.connect()
    session.gate.set()
    assert running.result(WAIT).call == 2
    assert isinstance(queued.exception(WAIT), LinkClosed)
    stopping.join(WAIT)  # much less than it would allow
    assert not stopping.is_alive()


def test_stopping_does_not_wait_for_an_enclave_that_is_idle(plain):
    link = plain.connect()
    ask(link, task()).result(WAIT)
    begun = time.monotonic()
    plain.server.stop(2 * WAIT)
    assert time.monotonic() - begun < WAIT
    eventually(lambda: isinstance(link.failure, LinkClosed))


# --- workers that stall or die --------------------------------------------------------------------------------------
@pytest.mark.parametrize("door", [None, f"{DOOR}-process"], ids=["stream", "shared memory"])
def test_a_worker_that_stalls_or_dies_holds_up_nobody(enclave, door, monkeypatch):
    monkeypatch.setattr(grpc_link, "_GRACE", 2 * WAIT)
    before = threads()
    big = torch.zeros(4 * CHUNK)
    arguments = () if door is None else (door,)
    host = Host()
    with worker_process(enclave, *arguments) as (process, address, certificate):
        settings = {"certificate": certificate, "identity": enclave, "host": host, "shared_memory": door}
        link, second = connect(address, **settings), connect(address, **settings)
        assert ask(link, task()).result(WAIT).call == 1
        os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        futures = [ask(link, task(n, big)) for n in range(4)]
        assert time.monotonic() - begun < WAIT
        begun = time.monotonic()
        link.close()
        assert time.monotonic() - begun < WAIT
        assert all(isinstance(future.exception(0), LinkClosed) for future in futures)
        os.kill(process.pid, signal.SIGCONT)
        assert ask(second, task(5, big)).result(WAIT).call == 5
        futures = [ask(second, task(n, big)) for n in range(4)]
        process.kill()
        assert isinstance(futures[3].exception(WAIT), LinkClosed)
        assert isinstance(second.failure, LinkClosed)
        second.close()
    host.close()
    eventually(lambda: threads() <= before)


@pytest.mark.full
def test_a_worker_that_is_silent_is_noticed_and_one_that_is_idle_is_not(enclave):
    with worker_process(enclave) as (process, address, certificate):
        link = connect(address, certificate=certificate, identity=enclave)
        time.sleep(40)  # longer than any silence that is allowed
        assert ask(link, task()).result(WAIT).call == 1
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        assert isinstance(ask(link, task()).exception(40), LinkClosed)
        link.close()


ENDINGS = {
    "exit": "sys.exit(3)",
    "fork": """
    if os.fork() == 0:
        process.kill = process.wait = lambda: None  # the worker is the parent's
        link.close()
        sys.exit(0)
    assert os.wait()[1] == 0
    sys.exit(3)""",
}


@pytest.mark.parametrize("ending", ["fork", pytest.param("exit", marks=pytest.mark.full)])
def test_a_program_that_ends_with_an_open_link_ends(ending):
    """With a task under way, in a process and in a copy of it: no hang, no traceback."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from wire.peers import *
enclave = Identity.create(ENCLAVE)
with worker_process(enclave) as (process, address, certificate):
    link = connect(address, certificate=certificate, identity=enclave)
    ask(link, task()).result(30)
    pending = ask(link, task(2, torch.zeros(1 << 22)))
    {ENDINGS[ending]}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


def test_dropping_a_link_closes_it(plain):
    link = connect(plain.address, certificate=plain.worker.certificate, identity=plain.enclave)
    ask(link, task()).result(WAIT)
    del link
    assert plain.sessions[0].closed.wait(WAIT)


def test_a_callback_may_close_the_link(plain):
    link = plain.connect()
    closed = threading.Event()
    ask(link, task()).add_done_callback(lambda _: (link.close(), closed.set()))
    assert closed.wait(WAIT)
    assert isinstance(link.failure, LinkClosed)


def test_the_answer_must_have_the_form_that_the_enclave_fixed(plain):
    link = plain.connect()
    future = link.ask(task(), Expected({Pass.FORWARD: (3, 2)}, torch.float32, None))
    with pytest.raises(Misbehaved, match=r"forward: an answer of shape \(2, 3\)"):
        future.result(WAIT)


def test_shared_memory_is_used_again():
    with bench(shared_memory=DOOR) as made:
        link = made.connect()
        segments = link._stream._lending._memory._arena._segments
        for step in range(30):
            link.post(weights(step))
            tensor = torch.full((300_000,), float(step))
            futures = [ask(link, task(10 * step + n, tensor, keep=n == 0)) for n in range(3)]
            futures[1].cancel()
            assert torch.equal(futures[2].result(WAIT).tensors[Pass.FORWARD], tensor + 1)
            assert torch.equal(ask(link, backward(10 * step, tensor)).result(WAIT).tensors[Pass.GRAD_INPUT], tensor + 1)
            link.post(Forget(calls=(10 * step,), weights=(("net.0", step),)))
        assert len(segments) == 1  # 30 steps would need ten
        assert all(segment.free.whole for segment in segments.values())
        assert made.host._arena.take(64)[1].offset == 0
        assert [m.tensor.sum() for m in made.sessions[0].read if isinstance(m, Weights)]  # their memory is still there


def test_nothing_is_left_behind(both):
    before, descriptors = threads(), 0
    for n in range(4):
        link = both.connect()
        ask(link, task()).result(WAIT)
        link.close()
        link.close()
        assert both.sessions[n].closed.wait(WAIT)
        if n == 0:  # what gRPC keeps for good it has by now
            eventually(lambda: threads() <= before)
            descriptors = len(os.listdir("/proc/self/fd"))
    eventually(lambda: threads() <= before)
    gc.disable()  # closed means closed, not when the collector comes by
    try:
        eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    finally:
        gc.enable()
