"""The pool behind the kernels: every part is done once, at the same time, after a fork too, and nothing is lost."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from darknight.kernels import threads


@pytest.fixture
def several(monkeypatch):
    """Any operand is worth a thread, of which torch has as many as the test says."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_EACH", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def pair(first: int, last: int) -> tuple[int, int]:
    return first, last


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_parts_are_whole_in_order_and_begin_where_they_may(several, count):
    several(count)
    for length in (0, 1, 2, 5, 6, 7, 100, 4099):
        for step in (1, 3, 16, 1024):
            parts = threads.split(pair, length, 10**6, step)
            assert len(parts) == max(1, min(count, -(-length // step)))
            assert parts[0][0] == 0
            assert parts[-1][1] == length
            assert all(before[1] == after[0] for before, after in pairwise(parts))
            assert all(first % step == 0 for first, _ in parts)
            assert len(parts) == 1 or all(first < last for first, last in parts)


def test_small_operands_and_one_thread_never_meet_the_pool(several, monkeypatch):
    monkeypatch.setattr(threads, "_pool", None)
    several(1)
    assert threads.split(pair, 100, 10**9) == [(0, 100)]
    several(4)
    monkeypatch.setattr(threads, "_EACH", 1000)
    assert threads.split(pair, 100, 1999) == [(0, 100)]
    with pytest.raises(AttributeError):  # the pool that is not there: one number more, and it is asked
        threads.split(pair, 100, 2000)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_parts_run_at_the_same_time(several, count):
    several(count)
    all_here = threading.Barrier(count)

    def meet(first: int, last: int) -> int:
        all_here.wait(60)
        return threading.get_ident()

    for _ in range(5):
        assert len(set(threads.split(meet, count, 100))) == count


def test_callers_at_the_same_time_share_the_pool(several):
    several(3)

    def caller(number: int) -> bool:
        return all(
            sum(threads.split(lambda first, last: sum(range(first, last)), number + each, 10**6))
            == sum(range(number + each))
            for each in range(200)
        )

    with ThreadPoolExecutor(6) as callers:
        assert all(callers.map(caller, range(6)))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_a_part_raises_is_raised_and_the_pool_goes_on(several, place):
    several(3)

    def fails(first: int, last: int) -> None:
        if first == place:
            raise ZeroDivisionError

    for _ in range(20):
        with pytest.raises(ZeroDivisionError):
            threads.split(fails, 3, 100)
    assert threads.split(pair, 3, 100) == [(0, 1), (1, 2), (2, 3)]


def test_an_interruption_waits_for_parts_that_are_running(several):
    """Else memory would be freed that another thread writes to."""
    several(2)
    begun, written = threading.Event(), []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    caller = threading.get_ident()

    def slow(first: int, last: int) -> None:
        if threading.get_ident() == caller:
            assert begun.wait(60)  # the other part is somebody else's
            return
        begun.set()
        time.sleep(0.5)
        written.append(last)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            threads.split(slow, 2, 100)
        assert len(written) == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_without_another_thread_the_caller_does_everything(several, monkeypatch):
    """As in an enclave whose number of threads is fixed."""
    several(4)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_pool", threads._Pool())
    monkeypatch.setattr(threading.Thread, "start", start)
    assert threads.split(lambda first, last: threading.get_ident(), 4, 100) == [threading.get_ident()] * 4


def test_a_pool_that_ended_leaves_everything_to_the_caller(several, monkeypatch):
    several(3)
    pool = threads._Pool()
    monkeypatch.setattr(threads, "_pool", pool)
    barrier = threading.Barrier(3)
    threads.split(lambda first, last: barrier.wait(60), 3, 100)
    helpers = list(pool._threads)
    assert len(helpers) == 2
    pool.end()
    assert not any(helper.is_alive() for helper in helpers)
    assert threads.split(lambda first, last: threading.get_ident(), 3, 100) == [threading.get_ident()] * 3


def test_threads_that_sleep_hold_no_operands(several):
    several(2)
    operand = threading.Event()  # anything that can be watched
    barrier = threading.Barrier(2)

    def does(first: int, last: int, operand: threading.Event = operand) -> None:
        barrier.wait(60)

    threads.split(does, 2, 100)
    gone = weakref.ref(operand)
    del does, operand
    until = time.monotonic() + 60
    while gone() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None


# --- whole processes --------------------------------------------------------------------------------------------------
FORKED = """
import os, signal, sys, threading
import torch
from darknight.kernels import compiled_field, largest_magnitude, threads

threads._EACH = 1 << 10
torch.set_num_threads(3)


def alive():
    return sum(thread.name == "darknight-kernels" and thread.is_alive() for thread in threading.enumerate())


def works():
    barrier = threading.Barrier(3)  # three threads, or it breaks
    threads.split(lambda first, last: barrier.wait(60), 3, 1 << 20)
    return largest_magnitude(torch.full((20_000,), 2.5)) == 2.5 and alive() == 2  # few: torch's own would hang


assert compiled_field.chosen() is not None and works()
lock = threads._pool._lock
if sys.argv[1] == "held":
    lock.acquire()  # as by a thread that a fork does not have
    if sys.argv[2] == "broken":
        os.register_at_fork(after_in_child=lambda pool=threads._pool: setattr(threads, "_pool", pool))
child = os.fork()
if child == 0:
    signal.alarm(2 if sys.argv[2] == "broken" else 60)  # which ends it, if it hangs
    assert alive() == 0
    os._exit(0 if works() else 1)
_, status = os.waitpid(child, 0)
if sys.argv[1] == "held":
    lock.release()
assert works()
print("child", os.waitstatus_to_exitcode(status))
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("lock", ["free", "held"])
def test_a_fork_has_a_pool_of_its_own_whoever_held_the_lock(lock):
    done = run(FORKED, lock, "whole")
    assert (done.returncode, done.stdout.strip()) == (0, "child 0"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_with_the_old_pool_would_hang():
    """So the test above can fail."""
    done = run(FORKED, "held", "broken")
    assert (done.returncode, done.stdout.strip()) == (0, f"child {-signal.SIGALRM}"), done.stderr


ENDING = """
import atexit, threading
atexit.register(lambda: print("left", sum(each.name == "darknight-kernels" for each in threading.enumerate())))
import torch
from darknight.kernels import threads
threads._EACH = 1
torch.set_num_threads(4)
barrier = threading.Barrier(4)
threads.split(lambda first, last: barrier.wait(60), 4, 100)
print("had", sum(each.name == "darknight-kernels" for each in threading.enumerate()))
"""


def test_threads_end_with_the_process():
    done = run(ENDING)
    assert (done.returncode, done.stdout.split("\n"), done.stderr) == (0, ["had 3", "left 0", ""], "")
