"""Local workers are processes that never outlive the one that started them, however that ends."""

import gc
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from darknight.coding.scheme import Scheme
from darknight.errors import FleetError, UsageError
from darknight.fleet import local, local_fleet, nursery
from darknight.fleet.nursery import Berth, Nursery
from darknight.nn import protect_, unprotect_
from darknight.ops import Linear, field
from darknight.runtime import Runtime
from darknight.types import Expected, ForwardTask, Pass, Weights
from darknight.wire import LinkClosed
from darknight.wire.identity import ENCLAVE, Identity
from fleet.workers import alive, eventually

pytestmark = pytest.mark.usefixtures("cold_fleets")

SCHEME = Scheme(inputs=1, colluders=1)


def steps(fleet, count=3, between=lambda step: None):
    """The weights after a few steps of a tiny network."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Runtime(SCHEME, fleet, seed=3) as runtime:
        protect_(model, runtime)
        for step in range(count):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            between(step)
        unprotect_(model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def fleet():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_TOKEN", "very-secret")
        patch.setenv("DARKNIGHT_PASSWORD", "very-secret")
        patch.setenv("MKL_NUM_THREADS", "1")
        fleet = local_fleet(SCHEME, workers=4, record=True, patience=60)
    with fleet:
        yield fleet
        pids = [*fleet.processes.values(), fleet._nursery.pid]
    assert not [pid for pid in pids if alive(pid)]
    assert fleet.processes == {}
    assert fleet.transcript(0)
    with pytest.raises(FleetError, match="the fleet is closed"):
        fleet.restart(0)


def test_workers_are_processes_of_their_own(fleet):
    pids = list(fleet.processes.values())
    assert list(fleet.processes) == [0, 1, 2, 3]
    assert len({os.getpid(), *pids}) == 5
    assert all(alive(pid) for pid in pids)
    assert fleet.operators == ("simulated-0", "simulated-1", "simulated-2", "simulated-3")
    assert all(fleet.ready(worker) for worker in range(4))
    assert fleet.elsewhere == 0.0


def test_training_through_them_gives_the_bits_of_the_enclave_alone(fleet):
    assert torch.equal(steps(fleet), steps(None))


def test_a_transcript_has_every_answer_that_was_received(fleet):
    """Nothing waits in this test: the records travel on a socket of their own, and must be there in time."""
    before = [len(fleet.transcript(worker)) for worker in range(4)]
    for _ in range(5):
        steps(fleet, 1)
        seen = [fleet.transcript(worker)[start:] for worker, start in enumerate(before)]
        replies = [[record.kind for record in records if record.kind.endswith(".reply")] for records in seen]
        assert [kinds.count("grad_weight.reply") for kinds in replies] == [2, 2, 2, 0]
        before = [len(fleet.transcript(worker)) for worker in range(4)]
    with pytest.raises(FleetError, match="no worker 4"):
        fleet.transcript(4)


def test_a_transcript_that_was_taken_is_gone_and_the_next_goes_on_from_there(fleet):
    whole = fleet.transcript(0)
    assert [id(record) for record in fleet.transcript(0, take=True)] == [id(record) for record in whole]
    assert not fleet.transcript(0)
    steps(fleet, 1)
    later = fleet.transcript(0)
    assert [record.kind for record in later].count("grad_weight.reply") == 2
    assert not {id(record) for record in later} & {id(record) for record in whole}


def test_a_worker_that_was_killed_is_started_again(fleet):
    old = fleet.processes[1]

    def kill(step):
        if step == 0:
            os.kill(old, signal.SIGKILL)
            assert eventually(lambda: 1 not in fleet.processes)  # reported
        if step == 1:
            fleet.restart(1)
            assert eventually(lambda: fleet.ready(1))

    assert torch.equal(steps(fleet, 4, kill), steps(None, 4))
    assert fleet.processes[1] != old
    assert not alive(old)


def test_a_worker_that_hangs_is_started_again(fleet):
    old = fleet.processes[2]
    os.kill(old, signal.SIGSTOP)
    fleet.restart(2)
    assert eventually(lambda: 2 in fleet.processes and fleet.ready(2))
    assert not alive(old)
    assert torch.equal(steps(fleet), steps(None))


def test_only_workers_that_exist_are_started_again(fleet):
    with pytest.raises(FleetError, match="no worker 4; this fleet has workers 0 to 3"):
        fleet.restart(4)


def test_a_worker_gets_nothing_of_the_environment_that_could_be_secret(fleet):
    for pid in [*fleet.processes.values(), fleet._nursery.pid]:
        given = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"very-secret" not in given
        assert b"DARKNIGHT_" not in given
        assert b"MKL_NUM_THREADS=1" in given
        held = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        known = "/dev/", "/memfd:", f"/proc/{pid}/"  # the last: it looks how much memory it has
        assert not [name for name in held if name.startswith("/") and not name.startswith(known)]


def test_a_fleet_that_is_dropped_takes_its_workers_along():
    fleet = local_fleet(SCHEME)
    pids = [*fleet.processes.values(), fleet._nursery.pid]
    assert all(alive(pid) for pid in pids)
    del fleet
    gc.collect()
    assert eventually(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("workers", [2, 0, True, "three", 3.0])
def test_too_few_workers_are_refused(workers):
    with pytest.raises(UsageError, match="this scheme needs 3"):
        local_fleet(SCHEME, workers=workers)


def test_settings_that_are_refused_leave_no_process(monkeypatch):
    started = []

    class Watched(Nursery):
        def wait(self):
            super().wait()
            started.extend([self.pid, *self.processes.values()])

    monkeypatch.setattr(local, "Nursery", Watched)
    with pytest.raises(UsageError, match="patience"):
        local_fleet(SCHEME, patience=-1, record=True)
    assert eventually(lambda: not any(alive(pid) for pid in started))


def test_a_nursery_that_was_killed_has_no_workers():
    with local_fleet(SCHEME) as fleet:
        pids = list(fleet.processes.values())
        os.kill(fleet._nursery.pid, signal.SIGKILL)
        assert eventually(lambda: fleet.processes == {})
        assert eventually(lambda: not any(alive(pid) for pid in pids))
        with pytest.raises(FleetError, match="were stopped"):
            fleet.restart(0)
        with pytest.raises(LinkClosed, match="were stopped"):  # at once, and not when nobody answers there
            fleet._nursery.report(0, 10)


# --- workers that lie ------------------------------------------------------------------------------------------------
HOSTILE = {1: "altered-weights:seed=3", 2: "one-element:passes=forward,every=2"}


def forwards(fleet, call):
    """What each worker answers to the same share, in the field; and the truth."""
    prime, op = 2**28 - 57, Linear()
    w = torch.arange(-17, 18, dtype=torch.int32).reshape(7, 5)
    share = torch.arange(1, 16, dtype=torch.int32).reshape(3, 5)
    task = ForwardTask(layer="a", call=call, version=1, tensor=share, compute=True, keep=True)
    expected = Expected({Pass.FORWARD: (3, 7)}, torch.int32, prime)
    if call == 1:
        message = Weights(layer="a", version=1, op=op.spec(), prime=prime, tensor=w)  # in memory that all workers share
        for worker in (2, 1, 0):
            fleet.post(worker, message)
    answers = [fleet.ask(worker, task, expected).result(60).tensors[Pass.FORWARD] for worker in (1, 2, 0)]
    return [answers[2], *answers[:2]], field.forward(op, share, w, prime)


def test_some_of_the_workers_lie(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "darknight.worker")
    monkeypatch.setenv("DARKNIGHT_INSECURE_HOSTILE", "1")
    with local_fleet(SCHEME, hostile=HOSTILE, record=True) as fleet:
        told, true = forwards(fleet, 1)
        assert torch.equal(told[0], true)
        assert ((told[1] != true).sum(dim=0) == 3).sum() == 1  # one weight: one output of all three examples
        assert torch.equal(told[2], true)
        again, true = forwards(fleet, 2)
        assert torch.equal(again[0], true)
        assert torch.equal(again[1], told[1])
        assert (again[2] != true).sum() == 1
        sent = [[r.tensor for r in fleet.transcript(j) if r.kind == "forward.reply"][-1] for j in range(3)]
        assert all(torch.equal(seen, answer) for seen, answer in zip(sent, again, strict=True))
        assert eventually(lambda: caplog.text.count(" lied layer=a ") == 3)
        assert caplog.text.count("HOSTILE") == 2
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in fleet.processes.values()]
        assert all(b"DARKNIGHT_INSECURE_HOSTILE=1" in given for given in environments)


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        ({3: "noise"}, "no worker 3; this fleet has workers 0 to 2"),
        ({True: "noise"}, "no worker True"),
        ({0: "charm"}, 'no attack is called "charm"'),
        ({0: None}, "a NoneType for worker 0; needs a plan"),
    ],
)
def test_plans_that_make_no_sense_are_refused(hostile, words, monkeypatch):
    monkeypatch.setattr(local, "Nursery", None)  # nothing is started
    monkeypatch.setenv("DARKNIGHT_INSECURE_HOSTILE", "1")
    with pytest.raises(UsageError, match=words):
        local_fleet(SCHEME, hostile=hostile)
    monkeypatch.delenv("DARKNIGHT_INSECURE_HOSTILE")
    with pytest.raises(UsageError, match="never where data is real"):
        local_fleet(SCHEME, hostile=hostile)


def test_what_is_no_scheme_is_refused():
    with pytest.raises(FleetError, match="where a scheme belongs"):
        local_fleet(3)


# --- a nursery that does not start ------------------------------------------------------------------------------------
@contextmanager
def interpreter(tmp_path, monkeypatch, script):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    yield


def test_a_nursery_that_fails_is_quoted(tmp_path, monkeypatch):
    script = "echo 'no module named\tdarknight' >&2; exit 3"
    with (
        interpreter(tmp_path, monkeypatch, script),
        pytest.raises(FleetError, match="no module named darknight") as error,
    ):
        local_fleet(SCHEME, record=True)
    assert "local workers 0, 1, 2 did not start: the program that starts them ended" in str(error.value)


def test_a_nursery_that_says_nothing_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    enclave = Identity.create(ENCLAVE).certificate
    monkeypatch.setattr(nursery, "STOP_SECONDS", 0.2)
    with interpreter(tmp_path, monkeypatch, "echo busy >&2; sleep 600 & echo $! >&2; wait"):
        slow = Nursery([Berth(operator="a", threads=1)], enclave=enclave)
        with pytest.raises(FleetError, match=r"not all were ready in 1 s\. It wrote: busy (\d+)\.") as error:
            slow.wait(1)
    sleeper = int(str(error.value).split("busy ")[1].split(".")[0])
    assert not alive(slow.pid)
    assert eventually(lambda: not alive(sleeper))  # its child too


def test_an_interpreter_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(FleetError, match=r"cannot start workers: .*none: No such file or directory"):
        local_fleet(SCHEME)


# --- how the process that has a fleet can end -------------------------------------------------------------------------
SCRIPT = """
import json, os, sys, time
import torch
import darknight as dk
from torch.utils.data import DataLoader


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def run(ending):
    scheme = dk.Scheme(inputs=1, colluders=1)
    fleet = dk.local_fleet(scheme, patience=60)
    runtime = dk.Runtime(scheme, fleet)
    layer = torch.nn.Linear(4, 3)
    dk.protect_(layer, runtime)
    x = torch.ones(4, 4)
    layer(x).sum().backward()
    copy = forked(fleet, layer, x) if ending == "fork" else None
    workers = [*fleet.processes.values(), fleet._nursery.pid]
    segments = [line.split()[4] for line in open("/proc/self/maps") if "memfd:darknight" in line]
    say(ending=ending, pid=os.getpid(), workers=workers, copy=copy, segments=segments)
    if ending == "exception":
        sys.stderr = open(os.devnull, "w")
        raise RuntimeError("on purpose")
    while ending != "end":
        layer(x).sum().backward()
    globals()["kept"] = fleet, runtime, layer  # until the interpreter ends


def forked(fleet, layer, x):
    for rows in DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
        layer(rows).sum().backward()
    # A copy that ends as any program does, with its finalizers, must leave our workers alone.
    if (copy := os.fork()) == 0:
        sys.exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    layer(x).sum().backward()
    assert all(fleet.ready(worker) for worker in range(3))
    # And one that stays must not keep them alive.
    if (copy := os.fork()) == 0:
        time.sleep(300)
        os._exit(0)
    return copy


def say(**words):
    os.write(1, (json.dumps(words) + "\\n").encode())


# Loaded once for all, also what a first use loads: each ending is tried in a copy of this process, made before there is
# a fleet.
import torch._dynamo
dk.Scheme, dk.local_fleet, dk.Runtime, dk.protect_
running = {}
for ending in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        run(ending)
        sys.exit(0)
    running[pid] = ending
while running:
    pid, status = os.wait()
    say(ending=running.pop(pid), code=os.waitstatus_to_exitcode(status))
"""
SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL, "fork": signal.SIGKILL}


def every_process():
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def segments_held_by(pids):
    """Shared memory that these processes map or have open: the numbers of its files, as it has no names."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it is gone, or somebody else's
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(line.split()[4] for line in maps.splitlines() if "memfd:darknight" in line)
            for link in Path(f"/proc/{pid}/fd").iterdir():
                if "memfd:darknight" in os.readlink(link):
                    found.add(str(link.stat().st_ino))
    return found


def test_nothing_is_left_however_the_process_ends(full):
    endings = ["end", "interrupt", "fork", *(["exception", "terminate", "kill"] if full else [])]
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *endings], stdout=subprocess.PIPE, text=True)
    started, codes = {}, {}
    try:
        while len(codes) < len(endings):
            line = process.stdout.readline()
            assert line, "a process with a fleet did not start; its words are above"
            words = json.loads(line)
            if "code" in words:
                codes[words["ending"]] = words["code"]
                continue
            started[words["ending"]] = words
            if number := SIGNALS.get(words["ending"]):
                assert all(alive(pid) for pid in words["workers"])
                assert set(words["segments"]) <= segments_held_by(every_process())  # the control
                os.kill(words["pid"], number)
        wanted = {"end": 0, "exception": 1, **{ending: -number for ending, number in SIGNALS.items()}}
        assert codes == {ending: wanted[ending] for ending in endings}
        left = [pid for words in started.values() for pid in words["workers"]]
        assert len(left) == 4 * len(endings)
        assert eventually(lambda: not any(alive(pid) for pid in left), 60)
        assert alive(started["fork"]["copy"])
        os.kill(started["fork"]["copy"], signal.SIGKILL)  # what it has, it has as a copy of its parent
        segments = {segment for words in started.values() for segment in words["segments"]}
        assert len(segments) >= 4 * len(endings)  # one for each worker, and the weights
        assert eventually(lambda: not segments & segments_held_by(every_process()), 60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        for words in started.values():
            for pid in filter(alive, filter(None, (words["pid"], words["copy"]))):
                os.kill(pid, signal.SIGKILL)
