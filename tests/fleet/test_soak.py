"""Training while workers are killed and stopped at random: no bit changes, nothing hangs, nothing is left behind."""

import gc
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import darknight as dk
from fleet.workers import alive, announced, eventually, free_port, launch
from runtime.scripts import batch, network

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = dk.Scheme(inputs=2, colluders=1)  # four seats
WORKERS = 5  # and a standby


class Operator:
    """Somebody who runs one worker, and starts it again whenever it dies."""

    def __init__(self, folder, name, **flags):
        self._folder, self._name, self._flags = folder, name, flags
        self._address = f"127.0.0.1:{free_port()}"
        self.process = launch(folder, name, listen=self._address, cold=True, **flags)
        self.pids = [self.process.pid]
        self.entry = announced(self.process).entry

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        # It takes seconds: so long the seat is somebody else's.
        self.process = launch(self._folder, self._name, listen=self._address, cold=True, **self._flags)
        self.pids.append(self.process.pid)

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def train(fleet, steps, before=lambda step: None):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with dk.Runtime(SCHEME, fleet, seed=5) as runtime:
        dk.protect_(model, runtime)
        for step in range(steps):
            before(step)
            x, target = batch(6, seed=step)
            x.requires_grad_()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), target).backward()
            optimizer.step()
        dk.unprotect_(model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), runtime.ledger


def processes_in(folder):
    """Of the whole machine: those that run in this folder, or were given it. Nobody else has it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone, or somebody else's
            named = str(folder).encode() in (entry / "cmdline").read_bytes()
            if int(entry.name) != os.getpid() and (named or os.readlink(entry / "cwd") == str(folder)):
                found.append(int(entry.name))
    return found


def resources():
    """Memory in MB, descriptors, threads and shared mappings of this process."""
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) / 1000
    mappings = Path("/proc/self/maps").read_text().count("memfd:")
    return resident, len(os.listdir("/proc/self/fd")), threading.active_count(), mappings


def test_weights_are_the_same_bits_whatever_happens_to_workers(tmp_path, full, capsys):
    steps = 300 if full else 12
    gc.collect()
    mapped = resources()[3]  # by tests before this one, whose workers were in this process
    chance = random.Random(7)
    door = {"shared_memory": f"@darknight-soak-{os.getpid()}"}  # the first is on this host, and says so
    operators = [Operator(tmp_path, f"operator-{j}", **(door if j == 0 else {})) for j in range(WORKERS)]
    file = tmp_path / "fleet.toml"
    file.write_text("\n".join(operator.entry for operator in operators))
    stopped, done, timers = [], [], []

    def disturb(step):
        while stopped and stopped[0][0] <= step:
            for timer in timers:
                timer.join()  # steps may be so short that it was not stopped yet, and nobody would let it go on then
            stopped.pop(0)[1].go_on()
        if step % 4 == 2:
            for timer in timers:
                timer.join()
            assert eventually(lambda: sum(map(fleet.ready, range(WORKERS))) >= 4, 120)  # there is somebody to disturb
            victim = operators[chance.choice([worker for worker in range(WORKERS) if fleet.ready(worker)])]
            how = chance.choice(["kill", "stop"]) if len(done) > 1 else ["kill", "stop"][len(done)]
            timers[:] = [threading.Timer(chance.uniform(0.0, 0.2), victim.kill if how == "kill" else victim.stop)]
            timers[0].start()  # in the middle of this step, or of the next
            if how == "stop":
                stopped.append((step + 3, victim))
            done.append(how)

    try:
        with dk.connect(file) as fleet:
            train(fleet, 12)  # what is loaded and opened once is there now, and memory that is used again and again
            before = resources()
            begun = time.monotonic()
            found, ledger = train(fleet, steps, disturb)
            seconds = time.monotonic() - begun
            for timer in timers:
                timer.join()
            while stopped:
                stopped.pop(0)[1].go_on()
            assert eventually(lambda: all(fleet.ready(worker) for worker in range(WORKERS)), 120)  # all came back
            after = resources()
            assert len(processes_in(tmp_path)) >= WORKERS  # the control
    finally:
        for operator in operators:
            operator.end()
    assert torch.equal(found, train(None, steps)[0])
    assert {"kill", "stop"} <= set(done)
    assert sum(change.worker is None for change in ledger.reseated) >= len(done) // 2
    assert not ledger.failed
    assert after[0] - before[0] < 40
    assert after[1] - before[1] < 10
    assert after[2] - before[2] < 10
    assert after[3] <= before[3] + 2  # segments of the links that were lost are gone
    gc.collect()
    assert resources()[3] <= mapped
    assert eventually(lambda: not any(alive(pid) for operator in operators for pid in operator.pids))
    assert eventually(lambda: not processes_in(tmp_path)), "workers, or what they started, are left"
    with capsys.disabled():
        print(
            f"\n{steps} steps in {seconds:.0f} s with {done.count('kill')} kills and {done.count('stop')} stops: "
            f"{sum(ledger.missed.values())} answers missed, {len(ledger.reseated)} seats changed hands, "
            f"{ledger.resent} shares resent, "
            f"{ledger.done_in_enclave.total()} parts in the enclave; memory {before[0]:.0f} -> {after[0]:.0f} MB, "
            f"descriptors {before[1]} -> {after[1]}, threads {before[2]} -> {after[2]}"
        )
