"""`python -m darknight.worker --hostile`: a real worker, in a process of its own, that lies over TLS as it is told."""

import os
from functools import partial

import pytest
import torch

from darknight.ops import field
from darknight.types import Pass
from darknight.wire import LinkClosed, Misbehaved
from darknight.wire.hostile import INSECURE_VARIABLE, Plan
from darknight.wire.identity import ENCLAVE, Identity
from darknight.wire.recording import Recording, RecordingSeat, recording_pair
from worker.stations import OP, PRIME, Program, new_enclave, residues, running

TIME = 60
W, SHARE, DELTA = residues(7, 5, seed=1) % 1000, residues(3, 5, seed=2), residues(3, 7, seed=3)
FORWARD = field.forward(OP, SHARE, W, PRIME)
GRAD_WEIGHT = field.grad_weight(OP, SHARE, DELTA, (7, 5), PRIME)


def environment(**more):
    return {name: value for name, value in os.environ.items() if not name.startswith("DARKNIGHT_")} | more


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """It reads its plan from a file."""
    folder = tmp_path_factory.mktemp("hostile")
    enclave = Identity.load_or_create(folder / "enclave", ENCLAVE)
    (folder / "plan").write_text("one-element:passes=grad_weight")
    arguments = ("--allow-enclave", folder / "enclave" / "certificate.pem", "--state", folder / "state")
    with (folder / "log").open("w") as log:
        program = Program(
            *(*arguments, "--threads", "1", "--hostile", f"@{folder / 'plan'}"),
            environment=environment(**{INSECURE_VARIABLE: "1"}),
            stderr=log,
        )
    yield program, enclave, folder
    program.end()


def asked(enclave):
    """What the worker answers in two passes."""
    enclave.weights(W)
    forward = enclave.forward(SHARE, 7).result(TIME).tensors[Pass.FORWARD]
    return forward, enclave.grad_weight(DELTA, (3, 5)).result(TIME).tensors[Pass.GRAD_WEIGHT]


def test_it_says_loudly_what_it_is(worker):
    program, _, folder = worker
    assert program.printed.splitlines()[1] == f"  HOSTILE       it lies on purpose: @{folder / 'plan'}"
    assert "warning HOSTILE: this worker lies on purpose" in (folder / "log").read_text()


def test_it_lies_in_the_planned_pass_and_nowhere_else(worker):
    program, enclave, folder = worker
    with program.connect(enclave) as one:
        forward, grad_weight = asked(one)
    assert torch.equal(forward, FORWARD)
    (place,) = (grad_weight != GRAD_WEIGHT).nonzero().tolist()
    assert grad_weight[tuple(place)] == (GRAD_WEIGHT[tuple(place)] + 1) % PRIME
    said = (folder / "log").read_text()
    assert "info lied layer=a call=1 pass=grad_weight attack=one-element\n" in said
    assert said.count("lied ") == 1
    assert str(int(grad_weight[tuple(place)])) not in said


def test_its_next_session_reads_the_plan_anew(worker):
    program, enclave, folder = worker
    plan = folder / "plan"
    plan.write_text("")
    with program.connect(enclave) as one:
        forward, grad_weight = asked(one)
        assert torch.equal(forward, FORWARD)
        assert torch.equal(grad_weight, GRAD_WEIGHT)
    plan.write_text("zeros:passes=forward")
    with program.connect(enclave) as one:
        forward, grad_weight = asked(one)
        assert not forward.any()
        assert torch.equal(grad_weight, GRAD_WEIGHT)
    plan.write_text("mislabelled")
    with program.connect(enclave) as one, pytest.raises(Misbehaved):
        asked(one)
    plan.write_text("hang-up")
    with program.connect(enclave) as one, pytest.raises(LinkClosed, match="ended the link"):
        asked(one)
    plan.write_text("charm")
    with program.connect(enclave) as one, pytest.raises(LinkClosed):
        asked(one)
    assert 'no attack is called \\"charm\\"' in (folder / "log").read_text()
    plan.write_text("")
    with program.connect(enclave) as one:  # it is still there
        assert torch.equal(asked(one)[0], FORWARD)
    assert program.stop() == 0


def test_a_recording_has_what_was_really_sent():
    enclave = new_enclave()
    ours, theirs = recording_pair()
    recording = Recording(ours)
    with running(enclave, recording=partial(RecordingSeat, sock=theirs), hostile=Plan.parse("zeros")) as station:
        with station.connect(enclave) as one:
            assert not asked(one)[0].any()
        recording.wait_for(2, TIME)
    replies = [record.tensor for record in recording.records if record.kind.endswith(".reply")]
    recording.close()
    theirs.close()
    assert len(replies) == 2
    assert not any(reply.any() for reply in replies)
