"""Mutated frames at both readers: no crash, no hang, and no memory beyond what was expected.

A mutation is made on the frames of an honest conversation: bits flipped, frames cut, stretched, dropped, doubled and
swapped, numbers in headers made huge or negative, fields replaced by junk. The readers are driven frame by frame; a few
hundred conversations also go over a real connection.
"""

import json
import os
import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest
import torch

from darknight.errors import OpError
from darknight.types import Answer, BackwardTask, Forget, ForwardTask, Pass, Refusal, Seed, TooLarge, Weights
from darknight.wire import codec, handshake, readers
from darknight.wire.codec import BadFrame
from darknight.wire.grpc_link import connect
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.link import LinkError
from darknight.wire.mapped import Mapped
from darknight.wire.readers import MessageReader, Question, ReplyReader
from darknight.wire.tls import grpc
from wire.peers import EchoSession, ask, backward, bench, expected, task, weights
from wire.rogue import raw_stream, rogue_worker

CHUNK = 256  # so that small tensors have several chunks
LIMIT = 4000  # bytes of one tensor that a session has room for: less than the largest below
SEGMENT = 8192
SEED = Seed(key=bytes(range(32)), prime=2**28 - 57)
NUMBERS = [-1, 0, 1, 2, 7, 2**31, 2**40 - 1, 2**40, 2**62, 2**63, 2**64, 10**30, 1.5, True]
JUNK = [None, "", "x", [], {}, [1], {"a": 1}, [[1, 2]], "\ud800", "x" * 2000, [2**39, 1], *NUMBERS]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(codec, "CHUNK", CHUNK)
    monkeypatch.setattr(readers, "CHUNK", CHUNK)


class Store:
    """Makes tensors for a reader, and counts their bytes."""

    def __init__(self):
        self.bytes = 0

    def __call__(self, form):
        self.bytes += codec.nbytes_of(form)
        return readers.empty(form)


# --- honest conversations -------------------------------------------------------------------------------------------
def data_of(tensor):
    content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [content[begin:end] for begin, end in codec.chunks_of(len(content))]


def messages(rng):
    size = rng.choice([0, 1, 64, 65, 200])
    made = [
        weights(rng.randrange(5), torch.ones(size, 3)),
        task(1, torch.ones(size, dtype=torch.int32), keep=True),
        backward(1, torch.ones(2, size, dtype=torch.float64)),
        Forget(calls=(1, 2), weights=(("net.0", 3),)),
        task(2, torch.zeros(3, size, dtype=torch.int64)),
        replace(task(3, torch.zeros(size, 3, dtype=torch.int32), keep=True), seed=SEED),
        replace(backward(4, torch.zeros(2, size, dtype=torch.int32)), seed=SEED),
    ]
    rng.shuffle(made)
    return made


def frames_of_messages(rng, *, placed=False):
    """placed: tensors are in shared memory, one segment of SEGMENT bytes."""
    frames = []
    for ticket, message in enumerate(messages(rng), start=1):
        header = {**codec.header_of(message), "ticket": ticket}
        if placed and not isinstance(message, Forget):
            if not codec.has_seed(header):
                header["place"] = [1, 64 * rng.randrange(8)]
            if not isinstance(message, Weights):
                header["answers"] = {"forward": [1, 0]}
        frames.append(codec.pack(header))
        if not (placed or isinstance(message, Forget) or codec.has_seed(header)):
            frames += data_of(message.tensor)
    return frames


def at(place, form):
    """A tensor in that segment."""
    segment, offset = place
    if segment != 1 or offset % 64 or offset + codec.nbytes_of(form) > SEGMENT:
        raise BadFrame("no such place")
    return torch.zeros(form[1], dtype=form[0])


def frames_of_replies(rng, questions):
    """Tensors follow in chunks, but for answers that are collected from shared memory."""
    frames = []
    order = list(questions)
    rng.shuffle(order)
    for ticket in order:
        question = questions[ticket]
        shapes, dtype = question.expected.shapes, question.expected.dtype
        tensors = {kind: torch.ones(shape, dtype=dtype) for kind, shape in shapes.items()}
        reply = Answer(layer=question.layer, call=question.call, tensors=tensors, seconds=0.1)
        if rng.random() < 0.2:
            reply, tensors = Refusal(message="no room"), {}
        frames.append(codec.pack({**codec.reply_header(reply), "ticket": ticket}))
        for tensor in tensors.values() if question.collect is None else ():
            frames += data_of(tensor)
    return frames


# --- mutations ------------------------------------------------------------------------------------------------------
def flip(rng, frames, at):
    if frames[at]:
        frame = bytearray(frames[at])
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        frames[at] = bytes(frame)


def cut(rng, frames, at):
    frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]


def stretch(rng, frames, at):
    frames[at] += rng.randbytes(rng.choice([1, 7, CHUNK, 70_000]))


def drop(rng, frames, at):
    del frames[at]


def double(rng, frames, at):
    frames.insert(rng.randrange(len(frames) + 1), frames[at])


def swap(rng, frames, at):
    other = rng.randrange(len(frames))
    frames[at], frames[other] = frames[other], frames[at]


def truncate(rng, frames, at):
    del frames[at:]


def noise(rng, frames, at):
    frames.insert(at, rng.randbytes(rng.choice([0, 1, 20, CHUNK, 70_000])))


def change(rng, frames, at):
    """Another value somewhere in a header: huge claims among them."""
    headers = [n for n, frame in enumerate(frames) if frame.startswith(b"{")]
    if not headers:
        return
    at = rng.choice(headers)
    try:
        header = json.loads(frames[at])
    except ValueError:
        return
    spots = list(_spots(header))
    holder, key = rng.choice(spots)
    action = rng.random()
    if action < 0.6:
        holder[key] = rng.choice(NUMBERS)
    elif action < 0.9:
        holder[key] = rng.choice(JUNK)
    elif isinstance(holder, dict):
        del holder[key]
        holder[rng.choice(["place", "answers", "seed", "code", "kind"])] = rng.choice(JUNK)
    frames[at] = json.dumps(header).encode()


def _spots(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(pairs):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _spots(inner)


MUTATIONS = [flip, flip, cut, stretch, drop, double, swap, truncate, noise, change, change, change, change]


def mutated(rng, frames):
    frames = list(frames)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if frames:
            rng.choice(MUTATIONS)(rng, frames, rng.randrange(len(frames)))
    return frames


# --- the worker's reader --------------------------------------------------------------------------------------------
def read_messages(frames, *, placed=False):
    """What a worker's reader makes of the frames: the kinds of results."""
    store, admitted, seeded = Store(), 0, 0

    def admit(nbytes):
        nonlocal admitted
        if nbytes > LIMIT:
            raise OpError("no room")
        admitted += nbytes

    reader, outcomes, ticket = MessageReader(admit, store, at if placed else None), [], 0
    for frame in frames:
        try:
            found = reader.feed(frame)
        except BadFrame:
            outcomes.append("refused")
            break
        finally:
            assert store.bytes <= admitted
        if found is not None:
            seeded += 0 if placed else seeded_bytes(found.message)
            outcomes.append(type(found.message).__name__)
            assert found.ticket > ticket
            ticket = found.ticket
            assert isinstance(found.message, Weights | ForwardTask | BackwardTask | Forget | TooLarge)
            assert placed or found.answers is None
    assert placed or store.bytes == admitted - seeded
    return outcomes


def seeded_bytes(message):
    """Room that was granted for a share which whoever computes will make."""
    seed = getattr(message, "seed", None)
    if seed is None:
        return 0
    assert message.tensor.is_meta
    assert message.tensor.dtype == torch.int32
    assert len(seed.key) == 32
    assert 2 <= seed.prime < 2**31
    return message.tensor.nbytes


def test_the_workers_reader(full):
    rng = random.Random(1)
    seen = Counter(
        read_messages(frames_of_messages(rng, placed=placed), placed=placed)[-1] for placed in [True, False] * 30
    )
    assert "refused" not in seen  # the control
    tracemalloc.start()
    for n in range(10_000 if full else 300):
        placed = n % 4 == 0
        seen.update(read_messages(mutated(rng, frames_of_messages(rng, placed=placed)), placed=placed))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert min(seen[kind] for kind in ("refused", "TooLarge", "Weights", "ForwardTask", "BackwardTask", "Forget")) > 0


# --- the enclave's reader -------------------------------------------------------------------------------------------
class Shelf:
    """Answers in shared memory: what a question collects, and how often."""

    def __init__(self, expected):
        self.expected = expected
        self.collected = 0

    def __call__(self):
        self.collected += 1
        return {kind: torch.ones(shape, dtype=self.expected.dtype) for kind, shape in self.expected.shapes.items()}


def read_replies(frames, questions):
    store, outcomes = Store(), []
    waiting = dict(questions)
    reader = ReplyReader(waiting.get, store)
    most = sum(torch.Size(shape).numel() * 8 for q in questions.values() for shape in q.expected.shapes.values())
    for frame in frames:
        try:
            found = reader.feed(frame)
        except BadFrame:
            outcomes.append("refused")
            break
        finally:
            assert store.bytes <= most
        if found is None:
            continue
        ticket, reply = found
        question = waiting.pop(ticket)  # once
        if question.collect is not None:
            assert question.collect.collected == isinstance(reply, Answer)
        outcomes.append(type(reply).__name__)
        if isinstance(reply, Answer):
            assert (reply.layer, reply.call) == (question.layer, question.call)
            assert {kind: tuple(tensor.shape) for kind, tensor in reply.tensors.items()} == question.expected.shapes
            assert all(tensor.dtype == question.expected.dtype for tensor in reply.tensors.values())
        else:
            assert question.future.cancelled() or isinstance(reply, Refusal)
    assert all(question.collect is None or question.collect.collected <= 1 for question in questions.values())
    if all(question.collect is not None for question in questions.values()):
        assert store.bytes == 0  # nothing of a worker's choosing is ever made room for
    return outcomes


def questions_of(rng, *, placed=False):
    tasks = [message for message in messages(rng) if isinstance(message, ForwardTask | BackwardTask)]
    questions = {}
    for message in tasks:
        questions[rng.randrange(1, 50)] = question = Question(message.layer, message.call, expected(message))
        if rng.random() < 0.1:
            question.future.cancel()
        if placed:
            question.collect = Shelf(question.expected)
    return questions


@pytest.mark.parametrize("placed", [False, True], ids=["stream", "shared memory"])
def test_the_enclaves_reader(full, placed):
    rng = random.Random(2)
    seen = Counter()
    for _ in range(50):  # the control
        questions = questions_of(rng, placed=placed)
        seen.update(read_replies(frames_of_replies(rng, questions), questions))
    assert "refused" not in seen
    tracemalloc.start()
    for _ in range(10_000 if full else 300):
        questions = questions_of(rng, placed=placed)
        seen.update(read_replies(mutated(rng, frames_of_replies(rng, questions)), questions))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert min(seen[kind] for kind in ("refused", "Answer", "Refusal", "NoneType")) > 0


def test_a_reader_that_believes_a_header_would_be_caught(monkeypatch):
    """The test of the test: with the worker's form for the enclave's, the count of bytes goes beyond the expected."""
    monkeypatch.setattr(readers, "_due", lambda expected: {Pass.FORWARD: (torch.float32, (9, 9))})
    header = codec.reply_header(Answer(layer="net.0", call=1, tensors={Pass.FORWARD: torch.ones(9, 9)}, seconds=0.0))
    question = Question("net.0", 1, expected(task()))
    with pytest.raises(AssertionError):
        read_replies([codec.pack({**header, "ticket": 1})], {1: question})


def test_an_answer_that_is_taken_for_the_usual_one_without_looking_would_be_caught(monkeypatch):
    """The same for answers in shared memory, most of which are recognised and not read."""
    monkeypatch.setattr(readers.usual, "seconds_of", lambda *_: 0.5)
    header = codec.reply_header(Answer(layer="net.0", call=2, tensors={Pass.FORWARD: torch.ones(9, 9)}, seconds=0.0))
    question = Question("net.0", 1, expected(task()))
    question.collect = Shelf(question.expected)
    assert read_replies([codec.pack({**header, "ticket": 1})], {1: question}) == ["Answer"]
    monkeypatch.undo()
    question.collect = Shelf(question.expected)
    assert read_replies([codec.pack({**header, "ticket": 1})], {1: question}) == ["refused"]


# --- over a connection ----------------------------------------------------------------------------------------------
def test_a_worker_survives_every_stream(full):
    rng = random.Random(3)
    ends = Counter()
    with bench(lambda peer: EchoSession(peer, limit=LIMIT)) as made:
        honest = made.connect()
        for _ in range(300 if full else 40):
            frames = [handshake.hello(None), *frames_of_messages(rng)]
            where = made.address, made.worker.certificate, made.enclave
            with raw_stream(*where, mutated(rng, frames)) as call:
                try:
                    for _ in call:
                        pass
                    ends["ended"] += 1
                except grpc.RpcError as error:
                    ends[error.code().name] += 1
        assert ask(honest, task()).result(30).call == 1
        for session in made.sessions[1:]:
            assert session.closed.wait(30)
    assert ends["INVALID_ARGUMENT"] > 0
    assert ends.keys() <= {"ended", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "CANCELLED"}, ends


def test_an_enclave_survives_every_worker(full):
    rng = random.Random(4)
    enclave = Identity.create(ENCLAVE)
    tasks = [task(1), backward(2), task(3, torch.ones(300))]
    questions = {n: Question(t.layer, t.call, expected(t)) for n, t in enumerate(tasks, start=1)}
    ends = Counter()

    def talk(requests):
        for _ in range(sum(1 + len(data_of(message.tensor)) for message in tasks)):
            next(requests)
        yield from mutated(rng, frames_of_replies(rng, questions))

    with rogue_worker(enclave, talk) as (address, certificate):
        for _ in range(200 if full else 30):
            link = connect(address, certificate=certificate, identity=enclave)
            for future in [ask(link, message) for message in tasks]:
                error = future.exception(30)  # an end, in time
                assert error is None or isinstance(error, LinkError)
                ends[type(error).__name__] += 1
            link.close()
    assert ends["Misbehaved"] > 0
    assert ends["NoneType"] > 0


def test_an_enclave_survives_every_worker_of_its_machine(full, monkeypatch):
    """Answers are in shared memory; what comes over its door only says that they are there."""
    rng, send, said, ends = random.Random(5), Mapped.send, [], Counter()
    tasks = [task(1), backward(2), task(3, torch.ones(300))]

    def babbling(mapped, frame):
        said.append(frame)
        if len(said) == len(tasks):  # when all were asked
            for each in mutated(rng, said):
                send(mapped, each)
            said.clear()
            mapped.hang_up()

    monkeypatch.setattr(Mapped, "send", babbling)
    with bench(shared_memory=f"@darknight-test-{os.getpid()}") as made:
        for _ in range(200 if full else 30):
            link = made.connect()
            for message, future in [(message, ask(link, message)) for message in tasks]:
                error = future.exception(30)  # an end, in time
                assert error is None or isinstance(error, LinkError)
                if error is None:
                    found = {kind: tuple(tensor.shape) for kind, tensor in future.result().tensors.items()}
                    assert found == expected(message).shapes
                ends[type(error).__name__] += 1
            link.close()
    assert ends["Misbehaved"] > 0
    assert ends["NoneType"] > 0
