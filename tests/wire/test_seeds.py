"""Seeds in the place of shares: made into the same residues, on every road, and refused where they are none."""

import json
import os
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from darknight.errors import OpError
from darknight.randomness import Branch, uniform_below
from darknight.types import BackwardTask, Expected, Pass, Seed, TooLarge
from darknight.wire import Transcript, codec, handshake, in_process, seeds, usual
from darknight.wire.codec import BadFrame
from darknight.wire.grpc_link import connect
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.lending import Lending
from darknight.wire.link import Refused
from darknight.wire.readers import MessageReader
from darknight.wire.recording import Recording, RecordingSeat, recording_pair
from wire.peers import EchoSession, ask, bench, task
from wire.rogue import rogue_worker
from wire.test_lending import FakeMemory
from wire.test_recording import Script

PRIME = 2**28 - 57
KEY = bytes(range(32))
SEED = Seed(key=KEY, prime=PRIME)
SHAPE = (3, 5)
ROW = uniform_below(Branch(KEY), SHAPE, PRIME)
DOOR = f"@darknight-seeds-{os.getpid()}"
WAIT = 30.0


def seeded(call=1, *, keep=False):
    """As the enclave asks: it has the share too."""
    return replace(task(call, ROW, keep=keep), seed=SEED)


def seeded_backward(row=None):
    return BackwardTask(
        layer="net.0", call=1, version=0, tensor=ROW, passes=(Pass.GRAD_INPUT,), x_shape=SHAPE, row=row, seed=SEED
    )


# --- the same residues on both sides ----------------------------------------------------------------------------------
PRIMES = st.sampled_from([2, 3, 5, 7, 97, 2**16 + 1, 2**25 - 39, 2**28 - 57, 2**28 - 89, 2**30 + 3, 2**31 - 1])


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=32, max_size=32), PRIMES, st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_a_worker_makes_what_the_enclave_drew(key, prime, shape):
    found = seeds.expanded(Seed(key=key, prime=prime), shape)
    assert (found.dtype, tuple(found.shape)) == (torch.int32, shape)
    assert torch.equal(found, uniform_below(Branch(key), shape, prime))


@pytest.mark.parametrize("prime", [5, 2**28 - 57, 2**30 + 3])
def test_also_where_it_is_made_in_several_pieces(prime, monkeypatch):
    count = 2 * seeds._PIECE + 7
    wanted = uniform_below(Branch(KEY), (count,), prime)
    assert torch.equal(seeds.expanded(Seed(key=KEY, prime=prime), (count,)), wanted)
    monkeypatch.setattr(seeds, "_PIECE", 1000)
    monkeypatch.setattr(seeds, "_ZEROS", seeds._ZEROS[:4000])
    assert torch.equal(seeds.expanded(Seed(key=KEY, prime=prime), (count,)), wanted)


def test_what_the_protocol_says_in_plain_python():
    """The definition in `types.Seed`, word by word: a worker in another language needs nothing else."""
    prime, count = 5, 400
    stream = Cipher(algorithms.AES(KEY), modes.CTR(bytes(16))).encryptor().update(bytes(40 * count))
    words = iter(int.from_bytes(stream[begin : begin + 4], "little") & 7 for begin in range(0, len(stream), 4))
    values = [next(words) for _ in range(count)]
    while rejected := [place for place, value in enumerate(values) if value >= prime]:
        for place in rejected:
            values[place] = next(words)
    assert seeds.expanded(Seed(key=KEY, prime=prime), (count,)).tolist() == values
    block = bytes.fromhex("f29000b62a499fd0a9f39a6add2e7780")  # AES-256 of zeros under 00 01 .. 1f
    words = [int.from_bytes(block[begin : begin + 4], "little") % 2**28 for begin in range(0, 16, 4)]
    assert seeds.expanded(SEED, (4,)).tolist() == words


@pytest.mark.parametrize("prime", [3, 5, 2**16 + 1, 2**30 + 3, PRIME])
def test_what_is_drawn_again_was_asked_for(prime):
    count = 200_000
    words = uniform_below(Branch(KEY), (count,), 1 << (prime - 1).bit_length())
    shape = seeds.shadow(torch.int32, (count,))
    granted = seeds.scratch_bytes(replace(task(1, shape), seed=Seed(key=KEY, prime=prime)))
    assert seeds._REDRAWN * int((words >= prime).sum()) < granted
    assert seeds.scratch_bytes(task(1, shape)) == 0


def test_a_seed_shows_itself_to_nobody():
    assert KEY.hex() not in repr(SEED) + repr(seeded())
    with pytest.raises(TypeError, match="secret"):
        SEED == SEED  # noqa: B015


# --- headers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("message", [seeded(), seeded_backward()], ids=["forward", "backward"])
def test_a_seed_comes_back_equal_and_is_written_the_usual_way(message):
    frame = codec.pack(codec.header_of(message))
    assert usual.task_frame(message) == frame
    header = codec.unpack(frame)
    codec.check_message(header)
    assert codec.has_seed(header)
    back = codec.message_from(header, seeds.shadow(torch.int32, SHAPE))
    assert (back.seed.key, back.seed.prime) == (KEY, PRIME)
    assert torch.equal(seeds.share_of(back), ROW)
    assert not codec.has_seed(codec.unpack(codec.pack(codec.header_of(replace(message, seed=None)))))


WRONG = {
    "nothing": None,
    "a text": KEY.hex(),
    "no key": {"prime": PRIME},
    "no prime": {"key": KEY.hex()},
    "more": {"key": KEY.hex(), "prime": PRIME, "code": "import os"},
    "a short key": {"key": KEY.hex()[:-2], "prime": PRIME},
    "a long key": {"key": KEY.hex() + "00", "prime": PRIME},
    "half a byte": {"key": KEY.hex()[:-1], "prime": PRIME},
    "capitals": {"key": KEY.hex().upper(), "prime": PRIME},
    "blanks": {"key": KEY.hex()[:-2] + "  ", "prime": PRIME},
    "no hexadecimal": {"key": "zz" * 32, "prime": PRIME},
    "a key that is a number": {"key": 7, "prime": PRIME},
    "a field of nothing": {"key": KEY.hex(), "prime": 0},
    "a field of zero": {"key": KEY.hex(), "prime": 1},
    "a negative prime": {"key": KEY.hex(), "prime": -PRIME},
    "a prime beyond int32": {"key": KEY.hex(), "prime": 2**31},
    "a prime that is a fraction": {"key": KEY.hex(), "prime": 97.0},
    "a prime that is true": {"key": KEY.hex(), "prime": True},
}


@pytest.mark.parametrize("seed", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("message", [seeded(), seeded_backward()], ids=["forward", "backward"])
def test_a_seed_that_is_none_is_refused(message, seed):
    header = {**codec.header_of(message), "seed": seed}
    with pytest.raises(BadFrame) as found:
        codec.check_message(header)
    assert KEY.hex()[:20] not in str(found.value).lower()


@pytest.mark.parametrize("dtype", ["int64", "float32", "float64"])
def test_a_seed_of_something_else_than_residues_is_refused(dtype):
    with pytest.raises(BadFrame, match="int32"):
        codec.check_message({**codec.header_of(seeded()), "dtype": dtype})


def test_a_seed_has_its_place_in_a_task_and_nowhere_else():
    with pytest.raises(BadFrame, match="in the clear"):
        codec.check_message(codec.header_of(seeded_backward(row=(1, 2))))
    for name in ("weights", "forget"):
        header = {"kind": name, **dict.fromkeys(codec._KEYS[name] - {"kind"}), "seed": WRONG["no key"]}
        with pytest.raises(BadFrame, match="other keys"):
            codec.check_message(header)


# --- the worker's reader ----------------------------------------------------------------------------------------------
def read(header, *, limit=1 << 20, at=None):
    """What a reader makes of the one frame, and what it asked for and allocated."""
    asked, made = [], []

    def admit(nbytes):
        asked.append(nbytes)
        if nbytes > limit:
            raise OpError("no room")

    def allocate(form):
        made.append(form)
        return torch.zeros(form[1], dtype=form[0])

    found = MessageReader(admit, allocate, at).feed(codec.pack({**header, "ticket": 1}))
    return found, asked, made


def test_room_is_asked_for_and_none_is_taken():
    found, asked, made = read(codec.header_of(seeded()))
    assert found.message.tensor.is_meta
    assert (asked, made) == ([ROW.nbytes], [])
    assert torch.equal(seeds.share_of(found.message), ROW)


@pytest.mark.parametrize("shape", [[2**20, 2**10], [2**40 - 1], [2**22, 2**22]], ids=str)
def test_a_giant_claim_is_refused_before_memory_is_taken(shape, monkeypatch):
    monkeypatch.setattr(seeds, "expanded", None)
    found, asked, made = read({**codec.header_of(seeded()), "shape": shape})
    assert isinstance(found.message, TooLarge)
    assert (asked, made) == ([4 * torch.Size(shape).numel()], [])


def test_one_beyond_every_limit_is_no_frame():
    with pytest.raises(BadFrame, match="bytes or more"):
        read({**codec.header_of(seeded()), "shape": [2**30, 2**30]})


def test_a_seed_with_a_place_is_refused_and_answers_need_shared_memory():
    def at(place, form):
        return torch.zeros(form[1], dtype=form[0])

    header = codec.header_of(seeded())
    found, *_ = read({**header, "answers": {"forward": [1, 64]}}, at=at)
    assert found.answers == {Pass.FORWARD: (1, 64)}
    for other, where in (({"place": [1, 0]}, at), ({"place": [1, 0]}, None), ({"answers": {}}, None)):
        with pytest.raises(BadFrame, match="a place in shared memory"):
            read({**header, **other}, at=where)


# --- links ------------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["stream", "shared memory"])
def both(request):
    with bench(shared_memory=DOOR if request.param == "shared memory" else None) as made:
        yield made


def test_a_worker_gets_the_seed_and_not_the_share(both, monkeypatch):
    put = []
    monkeypatch.setattr("darknight.wire.shared_memory.write", lambda *written: put.append(written))
    monkeypatch.setattr("darknight.wire.outbox.raw", put.append)
    link = both.connect()
    assert link.takes_seeds
    for call, message in enumerate((seeded(), seeded(2, keep=True), seeded_backward())):
        answer = ask(link, message).result(WAIT)
        assert all(torch.equal(tensor, ROW + 1) for tensor in answer.tensors.values())
        received = both.sessions[0].read[call]
        assert received.tensor.is_meta
        assert received.seed.key == KEY
    assert put == []


def test_shares_that_follow_are_what_they_were(both):
    link = both.connect()
    for message in (seeded(), task(2, ROW), seeded(3), task(4, ROW, keep=True)):
        assert torch.equal(ask(link, message).result(WAIT).tensors[Pass.FORWARD], ROW + 1)


def test_a_seed_too_large_for_the_worker_is_refused_in_words():
    with bench(lambda peer: EchoSession(peer, limit=10)) as small, pytest.raises(Refused, match="60 bytes needed"):
        ask(small.connect(), seeded()).result(WAIT)


def test_an_older_worker_is_sent_the_share_itself():
    """It knows no seeds, and says so in the only way it has: by its protocol. It is dialled again in that."""
    enclave, said, received = Identity.create(ENCLAVE), [], []

    def welcome():
        said.append(len(said))
        yield handshake.refusal("Upgrade this worker.", 1) if len(said) == 1 else handshake.welcome(ABOUT, None, 1)

    def talk(requests):
        if len(said) < 2:
            return
        received.extend([next(requests), next(requests)])
        answer = {**codec.unpack(received[0]), "kind": "answer", "seconds": 0.5}
        form = {"dtype": answer.pop("dtype"), "shape": answer.pop("shape")}
        kept = {name: answer[name] for name in ("kind", "layer", "call", "seconds", "ticket")}
        yield codec.pack({**kept, "tensors": {"forward": form}})
        yield received[1]

    with rogue_worker(enclave, talk, welcome=welcome) as (address, certificate):
        link = connect(address, certificate=certificate, identity=enclave)
        assert not link.takes_seeds
        assert torch.equal(ask(link, seeded()).result(WAIT).tensors[Pass.FORWARD], ROW)
        link.close()
    assert len(said) == 2
    assert json.loads(received[0]).keys() == codec.header_of(task()).keys() | {"ticket"}
    assert received[1] == ROW.numpy().tobytes()


ABOUT = {"operator": "acme", "device": "cpu", "memory": 1 << 30}


def test_an_older_enclave_is_answered_in_its_protocol():
    hello = handshake.read_hello(handshake.hello(None, 1))
    welcome = handshake.read_welcome(handshake.welcome(ABOUT, None, hello.protocol), 1)
    assert (hello.protocol, welcome.protocol) == (1, 1)
    with bench() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "PROTOCOL", 1)  # the enclave's; the server says what the hello says
        patch.setattr(handshake.hello, "__defaults__", (1, None))
        link = made.connect()
        assert link.welcome.protocol == 1
        assert torch.equal(ask(link, seeded()).result(WAIT).tensors[Pass.FORWARD], ROW + 1)
        assert not made.sessions[0].read[0].tensor.is_meta


def test_a_worker_may_not_answer_in_a_protocol_that_was_not_spoken():
    with pytest.raises(BadFrame, match="another protocol than was spoken"):
        handshake.read_welcome(handshake.welcome(ABOUT, None, 2), 1)


def test_within_a_process_too():
    transcript = Transcript()
    link, seat = in_process(transcript)
    link.ask(seeded(), Expected({Pass.FORWARD: SHAPE}, torch.int32, PRIME))
    _, message = seat.read()
    assert message.tensor.is_meta
    (record,) = transcript.records
    assert torch.equal(record.tensor, ROW)
    assert record.detail["seed"].key == KEY


# --- blocks, and what is recorded -------------------------------------------------------------------------------------
def test_a_seed_takes_no_block_for_its_share():
    memory, forms = FakeMemory(), Expected({Pass.FORWARD: SHAPE}, torch.int32, PRIME)
    lending = Lending(memory)
    for ticket, keep in enumerate((False, True), start=1):
        loan = lending.lend(seeded(ticket, keep=keep), forms)
        assert len(memory.live) == 1
        assert json.loads(b"{%b}" % loan.places()) == {"answers": {"forward": list(loan.answers[Pass.FORWARD][:2])}}
        lending.asked(ticket, loan)
        lending.answered(ticket, ticket + 1)
        assert not memory.live
    lending.withdrawn(3, lending.lend(seeded(3), forms), 4)
    assert not memory.live


def test_a_recording_has_the_share_that_the_worker_made():
    parent, child = recording_pair()
    made = Recording(parent)
    came = [replace(message, tensor=seeds.shadow(torch.int32, SHAPE)) for message in (seeded(), seeded_backward())]
    seat = RecordingSeat(Script(list(enumerate(came))), child)
    for message in came:
        assert seat.read()[1] is message
    child.close()
    with pytest.raises(TimeoutError):
        made.wait_for(1, timeout=WAIT)
    records = made.records
    made.close()
    assert [record.kind for record in records] == ["forward.share", "backward.share"]
    for record in records:
        assert torch.equal(record.tensor, ROW)
        assert record.detail["seed"].key == KEY
