"""The fleet: transcripts, closing, and no thread left behind. Wrong answers: tests/runtime/test_integrity.py."""

import gc
import subprocess
import sys
import threading
import time

import pytest
import torch

import darknight as dk
from darknight.fleet import Fleet
from darknight.wire import in_process

SCHEME = dk.Scheme(inputs=2, colluders=1)


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("darknight-worker")]


def test_a_local_fleet_has_the_schemes_workers_and_leaves_none_behind():
    before = len(workers())
    with dk.local_fleet(SCHEME) as fleet:
        assert fleet.workers == SCHEME.workers == len(workers()) - before
        assert len(set(fleet.operators)) == fleet.workers
    assert len(workers()) == before
    fleet.close()  # a second time does nothing


def test_a_fleet_without_transcripts_says_how_to_get_them():
    with dk.local_fleet(SCHEME) as fleet, pytest.raises(dk.errors.FleetError, match="record=True"):
        fleet.transcript(0)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_worker_that_is_not_there_has_no_transcript(number):
    with dk.local_fleet(SCHEME, record=True) as fleet, pytest.raises(dk.errors.FleetError, match="workers 0 to 3"):
        fleet.transcript(number)


def test_every_worker_has_an_operator():
    with pytest.raises(dk.errors.FleetError, match="one for each"):
        Fleet([in_process()[0]], operators=[])


def test_a_fleet_that_is_dropped_takes_its_workers_with_it():
    before = len(workers())
    fleet = dk.local_fleet(SCHEME)
    assert len(workers()) == before + 4
    del fleet
    gc.collect()
    deadline = time.monotonic() + 10
    while len(workers()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(workers()) == before


def test_a_fleet_works_for_one_runtime_at_a_time():
    """Two would give their calls and layers the same names."""
    with dk.local_fleet(SCHEME) as fleet:
        with dk.Runtime(SCHEME, fleet), pytest.raises(dk.errors.FleetError, match="another runtime"):
            dk.Runtime(SCHEME, fleet)
        with dk.Runtime(SCHEME, fleet):
            pass  # the first is closed


def test_workers_forget_everything_when_the_runtime_is_closed():
    from darknight.types import Forget

    with dk.local_fleet(SCHEME) as fleet:
        runtime = dk.Runtime(SCHEME, fleet)
        sent = []
        fleet._send = lambda worker, message: sent.append((worker, message))
        runtime.close()
    assert sent == [(worker, Forget(everything=True)) for worker in range(4)]


def test_a_program_that_ends_while_workers_compute_ends_cleanly():
    """Threads that are cut off inside torch would abort the process."""
    script = """
import torch, darknight as dk
scheme = dk.Scheme(inputs=2, colluders=1)
fleet = dk.local_fleet(scheme)
runtime = dk.Runtime(scheme, fleet)
model = torch.nn.Linear(2000, 2000)
dk.protect_(model, runtime)
fleet._links[0].receive = lambda *_: exit(3)
model(torch.randn(800, 2000))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert not done.stderr


def test_something_else_than_a_scheme_is_named():
    with pytest.raises(dk.errors.FleetError, match="a str where a scheme belongs"):
        dk.local_fleet("field")


def test_closing_waits_for_a_call_of_another_thread():
    """Otherwise the next runtime on this fleet would get, and lose, what the first one's call still sends."""
    with dk.local_fleet(SCHEME) as fleet:
        runtime = dk.Runtime(SCHEME, fleet)
        model = torch.nn.Linear(3, 2)
        dk.protect_(model, runtime)
        dispatch, waiting, go, found = fleet.dispatch, threading.Event(), threading.Event(), []

        def slow(*arguments):
            waiting.set()
            go.wait(10)
            return dispatch(*arguments)

        fleet.dispatch = slow
        caller = threading.Thread(target=lambda: found.append(model(torch.ones(4, 3))))
        caller.start()
        waiting.wait(10)
        closer = threading.Thread(target=runtime.close)
        closer.start()
        closer.join(0.1)
        assert closer.is_alive()
        go.set()
        caller.join(10)
        closer.join(10)
        assert found[0].shape == (4, 2)
        with dk.Runtime(SCHEME, fleet):
            pass
