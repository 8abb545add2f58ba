"""Ctrl-C: the step that runs is finished; a second one ends at once, but never inside an update of the weights."""

import os
import signal
import threading
import time

import pytest
import torch

from darknight.models import build_model
from darknight.train import Interrupts, fit
from train.test_loop import recipe, toy

pytestmark = pytest.mark.usefixtures("one_thread")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # a bytecode later the handler has run


def reached(block) -> tuple[list[str], str]:
    """The marks that a block set before KeyboardInterrupt ended it, and the text of that."""
    marks: list[str] = []
    try:
        with Interrupts() as interrupts:
            block(interrupts, marks.append)
    except KeyboardInterrupt as stop:
        return marks, str(stop)
    raise AssertionError("nothing was interrupted")


def test_the_first_signal_only_asks():
    def block(interrupts, mark):
        interrupts.stop_if_asked("before")
        interrupt()
        mark("goes on")
        interrupts.stop_if_asked("after step 3")

    assert reached(block) == (["goes on"], "after step 3")


def test_the_second_signal_breaks_off():
    def block(interrupts, mark):
        interrupt()
        mark("goes on")
        interrupt()
        mark("goes on again")

    assert reached(block) == (["goes on"], "at once")


def test_nothing_breaks_off_what_is_held():
    def block(interrupts, mark):
        interrupt()
        with interrupts.held():
            interrupt()
            interrupt()
            mark("held")
        mark("after it")

    assert reached(block) == (["held"], "at once")


def test_one_signal_in_what_is_held_waits_for_the_end_of_the_step():
    def block(interrupts, mark):
        with interrupts.held():
            interrupt()
        mark("after it")
        interrupts.stop_if_asked("later")

    assert reached(block) == (["after it"], "later")


def test_a_signal_at_the_very_end_is_not_lost():
    with pytest.raises(KeyboardInterrupt), Interrupts():
        interrupt()


def test_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_job_that_ignores_the_signal_goes_on_ignoring_it():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupt()
            interrupts.stop_if_asked("never")
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_can_train():
    failures = []

    def work():
        try:
            fit(build_model("mlp", shape=(1, 4, 6), classes=3, seed=0), toy(), recipe())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


class Interrupting:
    """Sends the signal in the middle of the model's second forward pass, and again as often as asked."""

    def __init__(self, model, times):
        self.calls = 0
        self.times = times
        model.register_forward_pre_hook(self)

    def __call__(self, module, inputs):
        self.calls += 1
        if self.calls == 2:
            for _ in range(self.times):
                interrupt()


class Steps:
    def __init__(self):
        self.done = 0

    def started(self, **_):
        pass

    def step(self, **_):
        self.done += 1


@pytest.mark.parametrize(("times", "steps"), [(1, 2), (2, 1)])
def test_training_ends_after_the_step_or_at_once_and_the_weights_are_those_of_whole_steps(times, steps):
    model, twin = (build_model("small-cnn", shape=(1, 4, 6), classes=3, seed=0) for _ in range(2))
    Interrupting(model, times)
    progress = Steps()
    with pytest.raises(KeyboardInterrupt, match="after step 2 of 8" if times == 1 else "at once"):
        fit(model, toy(), recipe(), progress=[progress])
    assert progress.done == steps

    class Enough(Steps):
        def step(self, **_):
            super().step()
            if self.done == steps:
                raise StopIteration

    with pytest.raises(StopIteration):
        fit(twin, toy(), recipe(), progress=[Enough()])
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
