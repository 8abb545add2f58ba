"""The echo through a worker: what it measures, and that a worker cannot flatter its link."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from darknight.bench import Echo
from darknight.types import ForwardTask, Pass, Weights
from darknight.wire import LinkClosed, Misbehaved, in_process
from darknight.worker import Executor, serve


@contextmanager
def worker(change=lambda answer: answer):
    """A link to a worker of this process; `change` what it answers."""

    class Changed(Executor):
        def handle(self, message):
            answer = super().handle(message)
            return answer and change(answer)

    link, seat = in_process()
    thread = threading.Thread(target=serve, args=(seat, Changed()), daemon=True)
    thread.start()
    try:
        yield link
    finally:
        link.close()
        thread.join(10)


def test_it_sends_as_many_bytes_as_were_asked_for_and_gets_them_back():
    sent = []
    with worker() as link:
        post, ask = link.post, link.ask
        link.post = lambda message: sent.append(message) or post(message)
        link.ask = lambda task, expected: sent.append(task) or ask(task, expected)
        echo = Echo(link, 4000)
        trip = echo.best(3)
        echo.close()
    assert trip.seconds > 0
    assert trip.computing > 0
    assert [type(message) for message in sent[:4]] == [Weights, ForwardTask, ForwardTask, ForwardTask]
    assert sent[1].tensor.nbytes == 4000
    assert sent[-1].weights == ((sent[0].layer, sent[0].version),)


def test_another_tensor_is_noticed():
    def lie(answer):
        return replace(answer, tensors={Pass.FORWARD: answer.tensors[Pass.FORWARD] + 1})

    with worker(lie) as link, pytest.raises(Misbehaved, match="another tensor came back"):
        Echo(link, 400).run()


def test_seconds_of_computing_cannot_make_a_trip_shorter_than_nothing():
    with worker(lambda answer: replace(answer, seconds=1e9)) as link:
        trip = Echo(link, 400).run()
    assert trip.seconds == 0
    assert 0 < trip.computing < 60


def test_a_worker_that_does_not_answer_is_given_up():
    free = threading.Event()
    with worker(lambda answer: free.wait(30) and answer) as link:
        with pytest.raises(LinkClosed, match=r"no answer in 0 s"):
            Echo(link, 400, patience=0.1).run()
        free.set()
