"""Training through worker processes of this machine: what is written, what is forgotten, what a lost worker costs."""

import gc
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.wire import shared_memory
from darknight.wire.segments import Kind
from fleet.workers import alive, eventually
from runtime.scripts import batch, network

SCHEME = dk.Scheme(inputs=2, colluders=1)


def steps(model, count, before=lambda step: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(count):
        before(step)
        x, target = batch(6, seed=step)
        x.requires_grad_()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.fixture(scope="module")
def fleet():
    with dk.local_fleet(SCHEME, record=True, patience=60) as fleet:
        yield fleet


def test_weights_are_written_once_a_step_for_all_workers(fleet, monkeypatch):
    held, written, write, hold = [], [], shared_memory.write, shared_memory.Host.hold

    def counted_hold(host, message):
        held.append((message.layer, message.version))
        return hold(host, message)

    def counted_write(segment, block, tensor):
        if segment.kind is Kind.WEIGHTS:
            written.append(block)
        write(segment, block, tensor)

    monkeypatch.setattr(shared_memory.Host, "hold", counted_hold)
    monkeypatch.setattr(shared_memory, "write", counted_write)
    with dk.Runtime(SCHEME, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        steps(model, 3)
    layers = 3
    assert len(set(held)) == 3 * layers
    assert len(held) == 3 * layers * SCHEME.workers  # every worker has them,
    assert len(written) == 3 * layers  # and shares the one copy


def test_a_worker_has_forgotten_the_shares_when_the_step_is_over(fleet):
    """Nothing else is asked of it: the fleet tells it by itself."""
    with dk.Runtime(SCHEME, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        told, post = [], fleet.post

        def watched(worker, message):
            if worker == 0:
                told.extend(getattr(message, "calls", ()))
            post(worker, message)

        fleet.post = watched
        try:
            steps(model, 1)
            calls = {record.call for record in fleet.transcript(0) if record.kind == "forward.share"}
            assert eventually(lambda: len(told) == 3)
        finally:
            del fleet.post
    assert set(told) <= calls


def test_weights_are_the_same_bits_and_nothing_is_left_while_workers_are_killed_and_stopped(full, capsys):
    """The soak of test_soak.py, over shared memory."""
    count = 100 if full else 8
    chance = random.Random(3)
    mappings = "/proc/self/maps"
    before = Path(mappings).read_text().count("memfd:")
    with dk.local_fleet(SCHEME, workers=5) as fleet:
        pids, stopped, done = set(fleet.processes.values()), {}, []

        def go_on():
            for victim, pid in stopped.items():
                if fleet.processes.get(victim) == pid:
                    os.kill(pid, signal.SIGCONT)
            stopped.clear()

        def disturb(step):
            if step % 3 == 1:
                go_on()
                victim = chance.choice(sorted(fleet.processes))
                done.append(
                    chance.choice(["kill", "stop", "restart"]) if len(done) > 1 else ["kill", "stop"][len(done)]
                )
                if done[-1] == "stop":
                    stopped[victim] = fleet.processes[victim]
                    os.kill(stopped[victim], signal.SIGSTOP)
                    return
                if done[-1] == "kill":
                    os.kill(fleet.processes[victim], signal.SIGKILL)
                fleet.restart(victim)
            pids.update(fleet.processes.values())

        with dk.Runtime(SCHEME, fleet, seed=2) as runtime:
            model = network()
            dk.protect_(model, runtime)
            found = steps(model, count, disturb)
            dk.unprotect_(model)
        go_on()
        assert eventually(lambda: all(fleet.ready(worker) for worker in range(5)), 120)
        lent = Path(mappings).read_text().count("memfd:")
        pids.update(fleet.processes.values())
    assert eventually(lambda: not any(alive(pid) for pid in pids))
    gc.collect()  # what a pass that failed was reading goes with its exception, which refers to its own frames
    assert Path(mappings).read_text().count("memfd:") == before
    assert lent < 40  # no segment for every worker that ever was
    assert len(pids) > 5
    with dk.Runtime(SCHEME, None, seed=2) as runtime:
        model = network()
        dk.protect_(model, runtime)
        assert torch.equal(found, steps(model, count))
    with capsys.disabled():
        print(
            f"\n{count} steps over shared memory, {len(pids) - 5} workers replaced, {done.count('stop')} times one "
            f"stopped, {lent - before} segments at the end"
        )


# --- faults, and who ever held which share ----------------------------------------------------------------------------
PATIENCE = 5.0
FAULTS = {
    "silent": "silent:after=2,count=1",
    "silent at once": "silent:count=1",
    "slow": f"slow:seconds={PATIENCE + 2},after=4,count=1",
    "refuses": "refuse:after=1,every=2",
    "refuses gradients": "refuse:passes=grad_weight,after=1",
    "hangs up": "hang-up:after=3,count=1",
    "breaks the protocol": "mislabelled:after=5,count=1",
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A fleet with a standby, and the file with the plan of worker 0, which it reads whenever a session begins."""
    plan = tmp_path_factory.mktemp("faults") / "plan"
    plan.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DARKNIGHT_INSECURE_HOSTILE", "1")
        hostile = {0: f"@{plan}"}
        with dk.local_fleet(SCHEME, workers=5, record=True, hostile=hostile, patience=PATIENCE) as fleet:
            yield fleet, plan


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_processes_change_no_bit_and_bring_nobody_a_second_share(faulty, fault):
    """While others are killed and started again. Every share that a worker received is in its transcript."""
    fleet, plan = faulty
    plan.write_text(FAULTS[fault])
    fleet.expel(0, "it begins anew, with another plan")
    fleet.readmit(0)
    assert eventually(lambda: all(map(fleet.ready, range(5))), 120)
    before = [len(fleet.transcript(worker)) for worker in range(5)]

    def disturb(step):
        if step == 1:
            fleet.restart(1)
        if step == 2:
            os.kill(fleet.processes[2], signal.SIGKILL)

    with dk.Runtime(SCHEME, fleet, seed=4) as runtime:
        model = network()
        dk.protect_(model, runtime)
        found = steps(model, 4, disturb)
        dk.unprotect_(model)
    fleet.restart(2)
    with dk.Runtime(SCHEME, None, seed=4) as alone:
        model = network()
        dk.protect_(model, alone)
        assert torch.equal(found, steps(model, 4))
    assert not runtime.ledger.failed
    assert fleet.names[0] in runtime.ledger.missed
    seen = [fleet.transcript(worker)[start:] for worker, start in enumerate(before)]
    assert max(map(len, held(seen, operators="abcde").values())) == 1
    assert max(map(len, held(seen, operators="aacde").values())) == 2  # the control: two of them with one operator
    assert seen[4]  # the standby had work to do


def held(seen, operators):
    """What each operator ever received: distinct shares of each masking, by call and direction."""
    shares = defaultdict(set)
    for operator, records in zip(operators, seen, strict=True):
        for record in records:
            if record.kind in ("forward.share", "backward.share"):
                key = (operator, record.layer, record.call, record.kind)
                shares[key].add(record.tensor.numpy().tobytes())
    return shares


@pytest.mark.full
@pytest.mark.parametrize("worker", [0, 4, 5], ids=["data worker", "carrier of s", "carrier of r"])
def test_one_stopped_worker_costs_at_most_a_third(worker, capsys):
    """Of the step time, after the one deadline in which it is noticed. With and without it in turn, as other work of
    the machine comes and goes; medians of all."""
    scheme = dk.Scheme(inputs=4, colluders=1)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)
    )
    model(images)
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)

        def step():
            begun = time.perf_counter()
            nn.functional.cross_entropy(model(images), labels).backward()
            return time.perf_counter() - begun

        usual, noticing, without = [], [], []
        for _ in range(7):
            step()  # it gets the weights
            usual += [step() for _ in range(4)]
            os.kill(fleet.processes[worker], signal.SIGSTOP)
            try:
                noticing.append(step())
                assert not fleet.ready(worker)
                without += [step() for _ in range(4)]
            finally:
                os.kill(fleet.processes[worker], signal.SIGCONT)
            fleet.expel(worker, "it begins anew, and does not rest")
            fleet.readmit(worker)
            assert eventually(lambda: all(map(fleet.ready, range(scheme.workers))), 120)
    ratio = statistics.median(without) / statistics.median(usual)
    with capsys.disabled():
        print(
            f"\nworker {worker} stopped: {ratio:.2f}x of the step time of {statistics.median(usual):.3f} s; the step "
            f"in which that is noticed takes {statistics.median(noticing):.2f} s, {max(noticing):.2f} s at most"
        )
    assert ratio <= 1.3
