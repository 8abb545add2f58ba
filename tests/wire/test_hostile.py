"""A hostile worker lies exactly as it was told, and only then: the real executor behind a seat that lies."""

import logging
import math
import re
import threading
import time
from fractions import Fraction

import pytest
import torch

from darknight.errors import UsageError
from darknight.ops import Linear, field
from darknight.types import BackwardTask, Expected, Forget, ForwardTask, Pass, Refusal, Weights
from darknight.wire import LinkClosed, Misbehaved, Refused, Transcript, in_process
from darknight.wire.hostile import INSECURE_VARIABLE, HostileSeat, Plan, require_insecure
from darknight.wire.plan import ATTACKS, ON_WEIGHTS
from darknight.wire.tampering import TAMPERINGS
from darknight.worker import Executor

PRIME = 2**28 - 57
OP = Linear()
ROWS, IN, OUT = 4, 5, 7
DEEDS = {"mislabelled", "silent", "refuse", "hang-up", "slow"}
BORROWED = {"another-call", "earlier-step", "another-worker"}


def tensor(*shape, seed, prime):
    generator = torch.Generator().manual_seed(seed)
    if prime is None:
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.randint(1, prime, shape, generator=generator, dtype=torch.int32)


def weights(seed, prime):
    if prime is None:
        return tensor(OUT, IN, seed=seed, prime=None)
    return torch.randint(-500, 500, (OUT, IN), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


class Pair:
    """An enclave and a worker that lies, in one thread: nothing happens but what the test does."""

    def __init__(self, plan, prime=PRIME):
        self.prime = prime
        self.transcript = Transcript()
        self.link, seat = in_process(self.transcript)
        self.seat = HostileSeat(seat, Plan.parse(plan))
        self.executor = Executor()
        self.true = Executor()  # an honest worker that gets the same

    def turn(self):
        """The worker reads a message and writes its reply."""
        ticket, message = self.seat.read()
        reply = self.executor.handle(message)
        if reply is not None:
            self.seat.write(ticket, reply)

    def weights(self, version=1, layer="a", seed=None):
        value = weights(version if seed is None else seed, self.prime)
        message = Weights(layer=layer, version=version, op=OP.spec(), prime=self.prime, tensor=value)
        self.true.handle(message)
        self.link.post(message)
        self.turn()

    def ask(self, task, shapes):
        true = self.true.handle(task).tensors
        future = self.link.ask(task, Expected(shapes, torch.int32 if self.prime else torch.float64, self.prime))
        self.turn()
        return future, true

    def forward(self, call=1, version=1, layer="a", seed=None):
        """The future of what the enclave gets, and the truth."""
        share = tensor(ROWS, IN, seed=1000 + (call if seed is None else seed), prime=self.prime)
        task = ForwardTask(layer=layer, call=call, version=version, tensor=share, compute=True, keep=True)
        return self.ask(task, {Pass.FORWARD: (ROWS, OUT)})

    def backward(self, call=1, version=1, layer="a"):
        delta = tensor(ROWS, OUT, seed=2000 + call, prime=self.prime)
        passes = (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT)
        task = BackwardTask(layer=layer, call=call, version=version, tensor=delta, passes=passes, x_shape=(ROWS, IN))
        return self.ask(task, {Pass.GRAD_INPUT: (ROWS, IN), Pass.GRAD_WEIGHT: (OUT, IN)})

    def step(self, kind, call=1, version=1, layer="a"):
        """All passes of a call: what was told in `kind`, and the truth; every other pass must be true."""
        told, true = {}, {}
        for future, right in (self.forward(call, version, layer), self.backward(call, version, layer)):
            told |= future.result(0).tensors
            true |= right
        for other in set(Pass) - {kind}:
            assert torch.equal(told[other], true[other]), other
        return told[kind], true[kind]

    def wrong(self, call, version=1, layer="a"):
        """Was the forward pass of this call a lie?"""
        future, true = self.forward(call, version, layer)
        return not torch.equal(future.result(0).tensors[Pass.FORWARD], true[Pass.FORWARD])


# --- what each attack does to an answer -------------------------------------------------------------------------------
def only(told, true, prime):
    """The one element that differs: what it is, and what it should be."""
    places = ((told != true) | told.isnan()).nonzero()
    assert len(places) == 1
    return told[tuple(places[0])].item(), true[tuple(places[0])].item()


def judge_one_element(told, true, prime):
    found, right = only(told, true, prime)
    assert found == (math.nextafter(right, math.inf) if prime is None else (right + 1) % prime)


def judge_sized_element(told, true, prime):
    found, right = only(told, true, prime)
    assert found == (right + 0.25 if prime is None else (right + 1) % prime)


def judge_sign(told, true, prime):
    found, right = only(told, true, prime)
    assert found == (-right if prime is None else prime - right)


def judge_row(told, true, prime):
    differing = (told != true).sum(dim=1)
    assert sorted(differing.tolist()) == [0] * (len(true) - 1) + [true.shape[1]]
    in_range(told, true, prime)
    if prime is None:
        row = int(differing.argmax())
        assert 0.1 < told[row].square().mean() / true[row].square().mean() < 10


def judge_noise(told, true, prime):
    assert (told != true).all()
    in_range(told, true, prime)


def in_range(told, true, prime):
    if prime is None:
        assert 0.1 < (told - true).square().mean().sqrt() / true.square().mean().sqrt() < 3
    else:
        assert ((told >= 0) & (told < prime)).all()


def judge_small_noise(told, true, prime):
    if prime is None:
        assert 0.3e-3 < (told - true).square().mean().sqrt() < 3e-3
    else:
        judge_noise(told, true, prime)


def judge_times(factor):
    def judge(told, true, prime):
        if prime is None:
            assert torch.equal(told, true * float(factor))
        else:
            assert (told.long() * factor.denominator % prime == true.long() * factor.numerator % prime).all()
            assert ((told >= 0) & (told < prime)).all()

    return judge


def judge_zeros(told, true, prime):
    assert not told.any()


def judge_nan(told, true, prime):
    found, _ = only(told, true, prime)
    assert math.isnan(found) if prime is None else found == 2**31 - 1


def judge_infinity(told, true, prime):
    found, _ = only(told, true, prime)
    assert found == (math.inf if prime is None else -1)


JUDGES = {
    "one-element": judge_one_element,
    "one-element:size=0.25": judge_sized_element,
    "sign": judge_sign,
    "row": judge_row,
    "noise": judge_noise,
    "noise:size=0.001": judge_small_noise,
    "scale": judge_times(Fraction(2)),
    "scale:factor=-1": judge_times(Fraction(-1)),
    "scale:factor=1/3": judge_times(Fraction(1, 3)),
    "scale:factor=0.5": judge_times(Fraction(1, 2)),
    "zeros": judge_zeros,
    "nan": judge_nan,
    "infinity": judge_infinity,
    "coordinated": judge_noise,
}


@pytest.mark.parametrize("prime", [PRIME, None], ids=["field", "floats"])
@pytest.mark.parametrize("kind", Pass)
@pytest.mark.parametrize("attack", JUDGES)
def test_an_answer_is_altered_as_the_plan_says_and_nothing_else_is(attack, kind, prime):
    pair = Pair(f"{attack}{',' if ':' in attack else ':'}passes={kind.value},count=1", prime)
    pair.weights()
    JUDGES[attack](*pair.step(kind), prime)
    assert pair.seat.lies == 1
    told, true = pair.step(kind, call=2)  # once was enough; what the worker keeps was not touched
    assert torch.equal(told, true)
    assert pair.seat.lies == 1


def test_every_attack_is_tested_and_none_forgotten():
    assert {attack.partition(":")[0] for attack in JUDGES} == TAMPERINGS.keys()
    assert TAMPERINGS.keys() | ON_WEIGHTS | DEEDS | BORROWED == ATTACKS.keys()


def test_both_passes_of_a_task_are_one_lie():
    pair = Pair("scale:passes=grad_input+grad_weight")
    pair.weights()
    pair.forward()
    future, true = pair.backward()
    for kind, told in future.result(0).tensors.items():
        assert torch.equal(told.long(), true[kind].long() * 2 % PRIME)
    assert pair.seat.lies == 1


def test_zero_has_no_sign_and_what_changes_nothing_is_no_lie():
    for plan in ("sign", "zeros", "scale", "one-element:size=1e-300"):
        pair = Pair(plan, None)
        pair.true, pair.executor = Executor(), Executor()
        message = Weights(layer="a", version=1, op=OP.spec(), prime=None, tensor=torch.zeros(OUT, IN).double())
        if "size" in plan:
            message = Weights(layer="a", version=1, op=OP.spec(), prime=None, tensor=torch.ones(OUT, IN).double())
        pair.true.handle(message)
        pair.link.post(message)
        pair.turn()
        assert not pair.wrong(1), plan
        assert pair.seat.lies == 0
    sparse = torch.zeros(ROWS, IN, dtype=torch.int32)
    sparse[2, 3] = 5
    for seed in range(6):
        pair = Pair(f"sign:seed={seed}")
        pair.weights()
        task = ForwardTask(layer="a", call=1, version=1, tensor=sparse, compute=True, keep=True)
        future, true = pair.ask(task, {Pass.FORWARD: (ROWS, OUT)})
        judge_sign(future.result(0).tensors[Pass.FORWARD], true[Pass.FORWARD], PRIME)  # the other rows are zeros


@pytest.mark.parametrize("prime", [PRIME, None], ids=["field", "floats"])
def test_coordinated_lies_are_multiples_of_one_error(prime):
    def errors(plan, call=1):
        pair = Pair(plan, prime)
        pair.weights()
        future, true = pair.forward(call)
        error = future.result(0).tensors[Pass.FORWARD].long() if prime else future.result(0).tensors[Pass.FORWARD]
        return (error - true[Pass.FORWARD]) % prime if prime else error - true[Pass.FORWARD]

    one = errors("coordinated:seed=4")
    for factor in (3, -1):
        other = errors(f"coordinated:seed=4,factor={factor}")
        expected = one * factor % prime if prime else one * factor
        assert torch.equal(other, expected) if prime else torch.allclose(other, expected)
    assert not torch.allclose(errors("coordinated:seed=5").double(), one.double())
    assert not torch.allclose(errors("coordinated:seed=4", call=2).double(), one.double())
    assert (errors("coordinated:factor=0") == 0).all()
    if prime is None:
        assert torch.allclose(errors("coordinated:seed=4,size=100"), one * 100)
        assert 0.5 < one.std() < 2


# --- answers of others ------------------------------------------------------------------------------------------------
def test_another_calls_answer():
    pair = Pair("another-call:passes=forward")
    pair.weights()
    pair.weights(layer="b", seed=9)
    first, true = pair.step(Pass.FORWARD)
    assert torch.equal(first, true)  # there is no other yet
    pair.step(Pass.FORWARD, layer="b", call=2)  # of another layer
    assert pair.seat.lies == 0
    told, true = pair.step(Pass.FORWARD, call=3)
    assert torch.equal(told, first)
    assert not torch.equal(told, true)
    told, _ = pair.step(Pass.FORWARD, call=4)
    assert torch.equal(told, true)  # what call 3 should have been
    assert pair.seat.lies == 2


def test_the_same_call_asked_again_is_no_other():
    pair = Pair("another-call")
    pair.weights()
    pair.forward(seed=1)
    future, true = pair.forward(seed=2)
    assert torch.equal(future.result(0).tensors[Pass.FORWARD], true[Pass.FORWARD])


def test_an_earlier_steps_answer():
    pair = Pair("earlier-step")
    pair.weights(1)
    assert not pair.wrong(1)
    assert not pair.wrong(2)  # another call, the same step
    pair.weights(2)
    future, _ = pair.forward(3, version=2)
    _, old = pair.forward(2, version=1)
    assert torch.equal(future.result(0).tensors[Pass.FORWARD], old[Pass.FORWARD])
    assert pair.seat.lies == 2  # and the second question about version 1 got that of version 2


def test_another_workers_answer(tmp_path):
    plan = f"another-worker:meet={tmp_path},wait=20"
    pairs = [Pair(plan), Pair(plan)]
    for pair in pairs:
        pair.weights()
    found = {}
    threads = [
        threading.Thread(target=lambda j=j: found.__setitem__(j, pairs[j].forward(call=5, seed=j))) for j in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for j in (0, 1):
        told, other = found[j][0].result(0).tensors[Pass.FORWARD], found[1 - j][1][Pass.FORWARD]
        assert torch.equal(told, other)
    assert [pair.seat.lies for pair in pairs] == [1, 1]
    assert len(list(tmp_path.iterdir())) == 2
    for pair in pairs:
        pair.seat.close()
    assert not list(tmp_path.iterdir())


def test_who_meets_nobody_says_the_truth_after_a_while(tmp_path):
    pair = Pair(f"another-worker:meet={tmp_path},wait=0.05")
    pair.weights()
    partner = Pair(f"another-worker:meet={tmp_path},count=0")  # gives and does not take
    partner.weights()
    partner.forward(call=8)
    (file,) = tmp_path.iterdir()
    (tmp_path / f"{file.name.partition('.')[0]}.garbage").write_bytes(b'{"dtype": "torch.int32"}\n1234')
    begun = time.monotonic()
    assert not pair.wrong(7)
    assert time.monotonic() - begun >= 0.05
    assert not pair.wrong(8)  # the same share: the other's answer is the same, which is no lie
    assert (pair.seat.lies, partner.seat.lies) == (0, 0)
    partner.forward(call=9, seed=1)
    assert pair.wrong(9)


# --- weights ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prime", [PRIME, None], ids=["field", "floats"])
def test_stale_weights(prime):
    pair = Pair("stale-weights", prime)
    for version in (1, 2, 3):
        pair.weights(version)
        assert pair.wrong(version, version) == (version > 1)
    future, _ = pair.forward(4, version=3)
    _, old = pair.forward(4, version=1)
    assert torch.equal(future.result(0).tensors[Pass.FORWARD], old[Pass.FORWARD])
    future, true = pair.backward(4, version=3)
    told = future.result(0).tensors
    assert not torch.equal(told[Pass.GRAD_INPUT], true[Pass.GRAD_INPUT])
    assert torch.equal(told[Pass.GRAD_WEIGHT], true[Pass.GRAD_WEIGHT])  # it does not depend on weights
    assert pair.seat.lies == 4
    pair.link.post(Forget(everything=True))
    pair.turn()
    pair.weights(4, seed=1)  # the very weights of version 1
    assert not pair.wrong(5, 4)
    assert pair.seat.lies == 4
    pair.weights(1, seed=9)  # another training, which counts from the beginning
    assert pair.wrong(6, 1)


def test_weights_of_some_versions_ago():
    pair = Pair("stale-weights:back=2,layers=a")
    for version in (1, 2, 3, 4, 5):
        pair.weights(version)
        pair.weights(version, layer="b")
        future, _ = pair.forward(version, version)
        due = version - 2 if version > 2 else version
        _, old = pair.forward(version, due)
        assert torch.equal(future.result(0).tensors[Pass.FORWARD], old[Pass.FORWARD])
        assert not pair.wrong(version, version, layer="b")


def test_the_same_altered_weights_on_all_workers():
    found = []
    for seed in (3, 3, 4):
        pair = Pair(f"altered-weights:seed={seed}")
        pair.weights()
        future, true = pair.forward()
        told = future.result(0).tensors[Pass.FORWARD]
        assert ((told != true[Pass.FORWARD]).any(dim=0)).sum() == 1  # one element of W: one output of every example
        assert pair.seat.lies == 1
        found.append(told)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(("plan", "step"), [("altered-weights", None), ("altered-weights:size=3", 3.0)])
def test_altered_weights_differ_by_one_step_and_the_originals_stay(plan, step):
    for prime in (PRIME, None):
        transcript = Transcript()
        link, seat = in_process(transcript)
        hostile = HostileSeat(seat, Plan.parse(plan))
        original = weights(1, prime)
        link.post(Weights(layer="a", version=1, op=OP.spec(), prime=prime, tensor=original))
        _, altered = hostile.read()
        (came,) = transcript.records  # the very tensor, which may be memory that is shared
        assert torch.equal(came.tensor, original)
        found, right = only(altered.tensor, original, prime)
        due = 1 if prime else step or original.abs().max().item() / 10
        assert found - right == pytest.approx(due)


# --- deeds ------------------------------------------------------------------------------------------------------------
def test_a_mislabelled_answer_is_the_right_one_under_another_number():
    """Over gRPC it breaks the link: tests/worker/test_hostile.py."""
    pair = Pair("mislabelled:after=1")
    pair.weights()
    assert not pair.wrong(1)
    future, true = pair.forward(2)  # this transport does not look at numbers
    answer = future.result(0)
    assert answer.call == 3
    assert torch.equal(answer.tensors[Pass.FORWARD], true[Pass.FORWARD])
    assert pair.seat.lies == 1


def test_silent_refuse_slow_and_hang_up():
    pair = Pair("silent:count=1;refuse:after=0,count=1;slow:seconds=0.1,passes=grad_weight;hang-up:layers=last")
    pair.weights()
    pair.weights(layer="last")
    future, _ = pair.forward(1)
    assert not future.done()
    future, _ = pair.forward(2)
    with pytest.raises(Refused, match="hostile plan"):
        future.result(0)
    assert not pair.wrong(3)
    begun = time.monotonic()
    future, _ = pair.backward(3)
    assert future.done()
    assert time.monotonic() - begun >= 0.1
    with pytest.raises(LinkClosed, match="hung up"):
        pair.forward(4, layer="last")
    assert isinstance(pair.link.failure, LinkClosed)
    assert not isinstance(pair.link.failure, Misbehaved)
    assert pair.seat.lies == 4


def test_deeds_concern_tasks_without_an_answers_tensor_too():
    pair = Pair("noise;silent:passes=forward,after=1")
    pair.weights()
    for call in (1, 2):
        share = tensor(ROWS, IN, seed=call, prime=PRIME)
        task = ForwardTask(layer="a", call=call, version=1, tensor=share, compute=False, keep=True)
        future, _ = pair.ask(task, {})
        assert future.done() == (call == 1)
    assert pair.seat.lies == 1


# --- when -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "liars"),
    [
        ("", range(1, 13)),
        ("every=3", [3, 6, 9, 12]),
        ("after=4", range(5, 13)),
        ("after=4,every=3", [7, 10]),
        ("after=2,count=3", [3, 4, 5]),
        ("every=5,count=1", [5]),
        ("count=0", []),
        ("passes=grad_weight", []),
        ("layers=[b-z]*", []),
        ("layers=a*,every=4", [4, 8, 12]),
    ],
)
def test_lies_come_when_the_plan_says(options, liars):
    pair = Pair(f"one-element:{options}" if options else "one-element")
    pair.weights()
    assert [call for call in range(1, 13) if pair.wrong(call)] == list(liars)
    assert pair.seat.lies == len(liars)


def test_attacks_of_one_plan_are_independent():
    pair = Pair("zeros:layers=a ; scale:layers=b\nnan:layers=nobody;")
    pair.weights()
    pair.weights(layer="b")
    future, _ = pair.forward(1)
    judge_zeros(future.result(0).tensors[Pass.FORWARD], None, PRIME)
    future, true = pair.forward(2, layer="b")
    judge_times(Fraction(2))(future.result(0).tensors[Pass.FORWARD], true[Pass.FORWARD], PRIME)


def test_a_seed_chooses_the_place_and_repeats_it():
    def told(seed):
        pair = Pair(f"one-element:seed={seed}")
        pair.weights()
        return pair.forward()[0].result(0).tensors[Pass.FORWARD]

    assert torch.equal(told(1), told(1))
    assert len({tuple(told(seed).flatten().tolist()) for seed in range(8)}) > 3


def test_a_refusal_and_an_unknown_field_pass():
    pair = Pair("nan")
    future = pair.link.ask(
        ForwardTask(layer="x", call=1, version=1, tensor=torch.ones(1, 1), compute=True, keep=False),
        Expected({Pass.FORWARD: (1, 1)}, torch.float32, None),
    )
    ticket, message = pair.seat.read()
    with pytest.raises(Exception, match="never arrived") as error:
        pair.executor.handle(message)
    pair.seat.write(ticket, Refusal(message=str(error.value)))
    with pytest.raises(Refused, match="never arrived"):
        future.result(0)
    assert pair.seat.lies == 0


# --- what is known of it ----------------------------------------------------------------------------------------------
def test_a_transcript_next_to_the_wire_has_the_lie():
    pair = Pair("zeros")
    pair.weights()
    pair.forward()
    (reply,) = [record.tensor for record in pair.transcript.records if record.kind == "forward.reply"]
    assert not reply.any()


def test_every_lie_is_in_the_log_without_values(caplog):
    caplog.set_level(logging.INFO, "darknight.worker")
    pair = Pair("one-element:every=2;stale-weights")
    pair.weights(1)
    pair.weights(2)
    futures = [pair.forward(1)[0], pair.forward(2, version=2)[0], pair.backward(2, version=2)[0]]
    assert [record.getMessage() for record in caplog.records] == ["lied"] * pair.seat.lies
    assert [record.fields for record in caplog.records] == [
        {"layer": "a", "call": 2, "pass": "forward", "attack": "stale-weights"},
        {"layer": "a", "call": 2, "pass": "forward", "attack": "one-element"},
        {"layer": "a", "call": 2, "pass": "grad_input", "attack": "stale-weights"},
    ]
    assert all(future.done() for future in futures)


# --- the plan ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "an empty hostile plan. Name an attack: one-element, sign"),
        (" ; ", "an empty hostile plan"),
        ("charm", 'no attack is called "charm". There are one-element, .*slow'),
        ("noise:loud", 'noise has no "loud". It takes size=, passes='),
        ("noise:factor=2", 'noise has no "factor=2"'),
        ("noise:size=1,size=2", "size= is there twice"),
        ("noise:size=-1", 'size="-1" is not a positive number'),
        ("noise:size=nan", "is not a positive number"),
        ("noise:every=0", "is not a whole number from 1"),
        ("noise:count=-1", "is not a whole number from 0"),
        ("noise:seed=1.5", "is not a whole number from 0"),
        ("noise:passes=sideways", "there are forward, grad_input, grad_weight"),
        ("noise:layers=", "is not a pattern of layer names"),
        ("scale:factor=two", "is not a number or a fraction"),
        ("scale:factor=1/0", "is not a number or a fraction"),
        ("scale:factor=1e9", "is not a number or a fraction"),
        ("slow:seconds=1e9", "from 0 to 3600"),
        ("stale-weights:back=0", "from 1"),
        ("stale-weights:passes=forward", 'stale-weights has no "passes=forward". It takes back=, layers='),
        ("another-worker", "needs a folder to exchange answers in: meet=FOLDER"),
        ("another-worker:meet=/no/such/folder", "is not a folder that exists"),
        ("zeros;@file", 'no attack is called "@file"'),
        ("@/no/such/file", "cannot be read .No such file"),
    ],
)
def test_what_is_no_plan_is_refused_in_words(text, words):
    with pytest.raises(UsageError, match=words) as error:
        Plan.parse(text)
    assert re.match(r"hostile plan|an empty hostile plan", str(error.value))


def test_a_plan_in_a_file_is_read_anew_for_each_session(tmp_path):
    file = tmp_path / "plan"
    file.write_text("")
    plan = Plan.parse(f"@{file}")
    assert plan.lies() == ()
    link, seat = in_process()
    honest = HostileSeat(seat, plan)
    file.write_text("zeros:passes=forward;\nslow:seconds=0\n")
    assert [lie.attack for lie in plan.lies()] == ["zeros", "slow"]
    pair = Pair(f"@{file}")
    file.write_text("")
    pair.weights()
    assert pair.wrong(1)  # this session began before
    link.post(Weights(layer="a", version=1, op=OP.spec(), prime=PRIME, tensor=weights(1, PRIME)))
    assert honest.read() is not None
    assert honest._tellers == []
    file.write_text("charm")
    with pytest.raises(UsageError, match="no attack"):
        HostileSeat(seat, plan)
    file.write_text("@other")
    with pytest.raises(UsageError, match="names another file"):
        Plan.parse(f"@{file}")
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        Plan.parse(f"@{file}")


@pytest.mark.parametrize("value", [None, "", "0", "yes", "true"])
def test_nobody_lies_by_accident(value):
    environment = {} if value is None else {INSECURE_VARIABLE: value}
    with pytest.raises(UsageError, match=r"never where data is real.*DARKNIGHT_INSECURE_HOSTILE=1"):
        require_insecure(environment)
    require_insecure({INSECURE_VARIABLE: "1"})


def test_the_truth_of_these_tests_is_the_truth():
    pair = Pair("silent:count=0")
    pair.weights()
    future, true = pair.forward()
    share = tensor(ROWS, IN, seed=1001, prime=PRIME)
    assert torch.equal(true[Pass.FORWARD], field.forward(OP, share, weights(1, PRIME), PRIME))
    assert torch.equal(future.result(0).tensors[Pass.FORWARD], true[Pass.FORWARD])
