"""A process that is killed, or a disk that is full, leaves the last good checkpoint as it was."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from darknight.errors import DarKnightError
from darknight.train import Store, read_model
from train.saved import network, same, train, weights
from train.test_loop import recipe

pytestmark = pytest.mark.usefixtures("one_thread")

# What changes something on a disk, or waits for it.
BOUNDARIES = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")


def crash_at(number, monkeypatch, *, fail):
    """Let the operation `number` on the disk, counted from 0, `fail`. Returns the count so far."""
    count = [0]
    for name in BOUNDARIES:
        real = getattr(os, name)

        def counted(*arguments, _real=real, **options):
            count[0] += 1
            if count[0] == number + 1:
                fail()
            return _real(*arguments, **options)

        monkeypatch.setattr(os, name, counted)
    return count


def saves(folder, steps):
    """A short training that saves after every step."""
    train(folder, network(), recipe(epochs=1, batch_size=30 // steps), every=0.0)


def states(folder):
    """What a reader finds: the step of the newest checkpoint, after looking at every one of them."""
    with Store(folder) as store:
        found = [store.latest()] if store.checkpoints() else []
        assert not list(folder.glob(".unfinished-*"))
        return found[-1].step if found else 0


def in_a_child(work):
    """Run it in a process of its own that ends by os._exit. Returns the exit code."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_crash_at_every_boundary_leaves_the_last_good_one(tmp_path, monkeypatch, full, tally):
    """The process ends, without any cleaning up, just before each operation on the disk in turn."""
    expected = network()
    train(tmp_path / "expected", expected, recipe(epochs=1, batch_size=10), every=0.0)
    reached, number, crashes = [], 0, 0
    while True:
        folder = tmp_path / "crashed"
        shutil.rmtree(folder, ignore_errors=True)
        with monkeypatch.context() as patch:
            crash_at(number, patch, fail=lambda: os._exit(77))
            code = in_a_child(lambda: saves(folder, 3))  # noqa: B023 - called at once
        if code == 0:
            break
        assert code == 77
        reached.append(states(folder))
        if reached[-1] and (full or number % 5 == 0):
            model = network()
            train(folder, model, recipe(epochs=1, batch_size=10), resume=True)
            assert same(weights(model), weights(expected))
        crashes += 1
        number += 1 if full else 2
    assert reached == sorted(reached)  # what was there once stays there
    assert set(reached) >= {0, 1, 2, 3}
    tally("crashes, at a boundary", {"crashes": crashes})


def complaint_of(work) -> str:
    """Empty if it succeeds."""
    try:
        work()
    except DarKnightError as error:
        return str(error)
    return ""


def test_a_full_disk_at_every_boundary_is_told_and_the_last_good_one_stays(tmp_path, monkeypatch):
    def full_disk():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reached, number = [], 0
    while True:
        folder = tmp_path / f"full-{number}"
        with monkeypatch.context() as patch:
            crash_at(number, patch, fail=full_disk)
            complaint = complaint_of(lambda: saves(folder, 3))  # noqa: B023 - called at once
        if not complaint:
            break
        assert "No space left on device" in complaint
        assert "what was saved before is still there" in complaint
        reached.append(states(folder) if folder.exists() else 0)
        number += 3
    assert set(reached) >= {0, 1, 2}
    assert reached == sorted(reached)


def test_a_file_that_cannot_be_written_to_its_end(tmp_path):
    """For real, by a limit on the size of files: safetensors writes without asking Python."""

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(24, 3)
            self.register_buffer("ballast", torch.zeros(100_000))

        def forward(self, x):
            return self.layer(x.flatten(1))

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            train(tmp_path / "run", Wide(), recipe(epochs=2), resume=True)
        except DarKnightError as error:
            os._exit(42 if "cannot write to" in str(error) else 1)

    train(tmp_path / "run", Wide(), recipe(epochs=1))
    assert in_a_child(work) == 42
    assert states(tmp_path / "run") == 4
    assert read_model(tmp_path / "run")[1].model == "net"


SCRIPT = """
import sys, pathlib, torch
torch.set_num_threads(1)
from train.saved import network, train
from train.test_loop import recipe
print("ready", flush=True)
train(pathlib.Path(sys.argv[1]), network(), recipe(epochs=int(sys.argv[2])), every=0.0, resume=True)
print("done", flush=True)
"""


def test_killed_at_random_moments_it_still_ends_with_the_same_weights(tmp_path, full, tally):
    """kill -9 again and again, resumed each time, until the training is over."""
    epochs, most = (40, 40) if full else (10, 2)
    expected = network()
    train(tmp_path / "whole", expected, recipe(epochs=epochs))
    rng, folder, kills, steps = random.Random(5), tmp_path / "killed", 0, []
    tests = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])}
    while True:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), str(epochs)], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout.readline() == "ready\n"
        if kills < most:
            time.sleep(rng.uniform(0.05, 0.5))  # not to wait for anything: the moment is meant to be any
            process.kill()
            kills += 1
        said, _ = process.communicate(timeout=120)
        if folder.exists():
            steps.append(states(folder))
        if said == "done\n":
            break
        assert process.returncode == -signal.SIGKILL
    assert steps == sorted(steps)
    model = network()
    train(folder, model, recipe(epochs=epochs), resume=True)
    assert same(weights(model), weights(expected))
    tally("crashes, kill -9", {"crashes": kills})
