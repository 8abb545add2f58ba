"""Whoever waits for answers hears them, or a thread does: each door by one at a time, and nothing is missed."""

import os
import socket
import threading
import time
from concurrent.futures import Future

import pytest

from darknight.types import Answer, Refusal
from darknight.wire import Refused, switchboard
from darknight.wire.bell import OVER, Bell
from darknight.wire.grpc_link import _Stream
from darknight.wire.lending import Lending
from darknight.wire.segments import Kind
from darknight.wire.switchboard import Awaited, Switchboard, attended, came_at, claimed
from wire.peers import EchoSession, ask, bench, task

DOOR = f"@darknight-switchboard-{os.getpid()}"
NAME = "darknight-bells"


def answer(call):
    return Answer(layer="net.0", call=call, tensors={}, seconds=0.5)


class Interrupting:
    """A lock that is not had: once."""

    def __init__(self, lock):
        self.lock, self.once = lock, [KeyboardInterrupt()]

    def __enter__(self):
        if self.once:
            raise self.once.pop()
        return self.lock.__enter__()

    def __exit__(self, *reason):
        return self.lock.__exit__(*reason)


class Worker:
    """The other side of a door: every packet is the answer to the next of `futures`, in the order they were asked."""

    def __init__(self, board):
        mine, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.bell, self.heard_by, self.taken = Bell(mine), [], []
        self.board, self.futures = board, []
        board.listen(self.bell, self.hear)

    def asked(self):
        self.futures.append(Awaited(self.board))
        return self.futures[-1]

    def hear(self):
        frame = self.bell.read()
        if frame is not None and frame is not OVER:
            self.heard_by.append(threading.current_thread())
            self.taken.append(frame)
            self.futures.pop(0).set_result(answer(int(frame)))
        return frame is not OVER

    def say(self, call=1):
        self.theirs.send(bytes([Kind.FRAME]) + b"%d" % call)

    def close(self):
        self.theirs.close()


@pytest.fixture
def board():
    return Switchboard()


@pytest.fixture
def workers(board):
    made = [Worker(board) for _ in range(3)]
    yield made
    for worker in made:
        worker.close()


def the_thread():
    return {thread for thread in threading.enumerate() if thread.name == NAME}


def descriptors():
    return set(os.listdir("/proc/self/fd"))


def eventually(true, seconds=10):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.005)
    return true()


def test_who_waits_hears_for_himself(workers):
    futures = [worker.asked() for worker in workers]
    with attended(futures) as first_done:
        for worker in workers:
            worker.say()
        done = first_done(futures, 10, 1)
        while len(done) < 3:
            done += first_done([future for future in futures if future not in done], 10, 1)
    assert {thread for worker in workers for thread in worker.heard_by} == {threading.current_thread()}


def test_while_nobody_waits_a_thread_hears(workers):
    futures = [worker.asked() for worker in workers]
    for worker in workers:
        worker.say()
    assert all(future.result(10).call == 1 for future in futures)
    assert {thread.name for worker in workers for thread in worker.heard_by} == {NAME}


def test_what_comes_when_somebody_has_stopped_waiting_is_heard_as_it_comes(workers):
    late = workers[0].asked()
    with attended([late]) as first_done:
        assert first_done([late], 0.05, 1) == []
    workers[0].say(7)
    assert late.result(10).call == 7
    assert workers[0].heard_by[0].name == NAME


def test_what_came_while_somebody_had_claimed_and_did_not_listen_is_heard_after(workers):
    future = workers[0].asked()
    with attended([future]):
        workers[0].say(3)
        time.sleep(0.05)
        assert not future.done()  # the thread is still
    assert future.result(10).call == 3


def test_waiting_ends_in_time(workers):
    future, begun = workers[0].asked(), time.monotonic()
    with attended([future]) as first_done:
        assert first_done([future], 0.2, 1) == []
        assert 0.19 < time.monotonic() - begun < 5
        assert first_done([future], -1.0, 1) == []


def test_what_others_end_wakes_who_waits(board, workers):
    future = workers[0].asked()

    def end():
        time.sleep(0.1)
        future.set_exception(RuntimeError())
        board.wake()

    threading.Thread(target=end).start()
    with attended([future]) as first_done:
        assert first_done([future], 30, 1) == [future]


def test_two_may_wait_and_the_second_is_served_by_whoever_hears(workers):
    one, two = workers[0].asked(), workers[1].asked()
    with attended([one]) as first, attended([two]) as second:
        answers = threading.Thread(target=lambda: (time.sleep(0.05), workers[1].say(2), workers[0].say(1)))
        answers.start()
        assert first([one], 10, 1) == [one]
        assert second([two], 10, 1) == [two]
        answers.join()
    assert two.result().call == 2


def test_who_asks_may_claim_before_he_waits_and_hears_everything_then(board, workers):
    futures = [worker.asked() for worker in workers]
    with claimed(board):
        for worker in workers:
            worker.say()
        time.sleep(0.05)
        assert not any(future.done() for future in futures)
        with attended(futures) as first_done:
            assert first_done(futures, 10, 1) == futures
        late = workers[0].asked()
        workers[0].say()
        time.sleep(0.05)
        assert not late.done()  # the inner one has released, and the outer one not yet
    assert late.result(10).call == 1
    assert [len({*worker.heard_by}) for worker in workers] == [2, 1, 1]


def test_answers_are_taken_together_and_known_by_when_they_came(workers):
    futures = [worker.asked() for worker in workers]
    times = []

    def say():
        for worker in workers:
            time.sleep(0.15)
            times.append(time.monotonic())
            worker.say()

    saying = threading.Thread(target=say)
    with attended(futures) as first_done:
        saying.start()
        assert first_done(futures, 10, 2) == futures[:2]
        assert first_done(futures[2:], 10, 1) == futures[2:]
        saying.join()
    for future, said in zip(futures, times, strict=True):
        assert said <= came_at(future) < said + 0.1


def test_what_came_in_time_is_taken_when_the_time_is_over_although_more_were_wanted(workers):
    futures = [worker.asked() for worker in workers]
    with attended(futures) as first_done:
        workers[1].say(5)
        assert first_done(futures, 0.1, 3) == futures[1:2]


def test_what_was_fetched_and_not_taken_is_heard_by_the_thread(workers, monkeypatch):
    """Who is interrupted between the two leaves answers behind that no door shows any more."""
    futures = [worker.asked() for worker in workers]

    def interrupted(board, wires, events):
        raise KeyboardInterrupt

    with attended(futures) as first_done:
        workers[0].say(4)  # now: before, the thread could have heard it
        with monkeypatch.context() as patched:
            patched.setattr(Switchboard, "_hear", interrupted)
            with pytest.raises(KeyboardInterrupt):
                first_done(futures, 10, 1)
        assert not futures[0].done()
    assert futures[0].result(10).call == 4
    assert workers[0].heard_by[0].name == NAME


def test_who_is_interrupted_while_he_fetches_loses_the_link(workers, monkeypatch):
    def interrupted(bell):
        bell.read()
        raise KeyboardInterrupt

    monkeypatch.setattr(Bell, "fetch", interrupted)
    future = workers[0].asked()
    with attended([future]) as first_done:
        workers[0].say()
        with pytest.raises(KeyboardInterrupt):
            first_done([future], 10, 1)
    assert eventually(lambda: workers[0].bell.fileno() == -1)


def test_answers_of_other_transports_are_waited_for_as_well(workers):
    other: Future[Answer] = Future()
    futures = [workers[0].asked(), other]
    with attended(futures) as first_done:
        workers[0].say()
        assert first_done(futures, 10, 1) == futures[:1]
        other.set_result(answer(2))
        assert first_done(futures[1:], 10, 1) == [other]


def test_nothing_is_missed_and_the_order_kept_when_listeners_change_all_the_time(workers):
    """Answers arrive at every moment of a claim and a release; a wake-up that is lost would hang here."""
    rounds = 400

    def say(worker, go):
        for call in range(rounds):
            go[call].wait(30)
            worker.say(call)

    go = [threading.Event() for _ in range(rounds)]
    threads = [threading.Thread(target=say, args=(worker, go)) for worker in workers]
    for thread in threads:
        thread.start()
    for call in range(rounds):
        futures = [worker.asked() for worker in workers]
        go[call].set()
        waiting = list(futures)
        with attended(waiting) as first_done:
            while waiting:
                done = first_done(waiting, 20, 1)
                assert done, "an answer was heard and nobody told"
                waiting = [future for future in waiting if future not in done]
    for thread in threads:
        thread.join()
    assert all(worker.taken == [b"%d" % call for call in range(rounds)] for worker in workers)


def test_the_thread_and_its_descriptors_go_with_the_last_door():
    others, before = the_thread(), descriptors()  # of tests before
    board = Switchboard()
    for _ in range(2):  # and come back with the next
        worker = Worker(board)
        assert len(the_thread() - others) == 1
        worker.close()
        assert eventually(lambda: the_thread() <= others and descriptors() <= before)


def test_they_go_also_if_the_last_door_is_closed_while_somebody_waits():
    others, before = the_thread(), descriptors()  # of tests before
    board = Switchboard()
    worker = Worker(board)
    future = worker.asked()
    with attended([future]) as first_done:
        worker.close()
        assert first_done([future], 0.1, 1) == []
    assert eventually(lambda: the_thread() <= others and descriptors() <= before)
    with attended([future]) as first_done:  # there is nothing to listen to any more
        assert first_done([future], 0.1, 1) == []


def test_a_worker_that_ends_while_somebody_waits_for_it_wakes_him():
    with bench(shared_memory=DOOR) as made:
        link = made.connect()
        made.sessions[0].gate.clear()
        future = ask(link, task())
        threading.Timer(0.2, lambda: made.server.stop(0.0)).start()
        begun = time.monotonic()
        with attended([future]) as first_done:
            assert first_done([future], 30, 1) == [future]
        assert time.monotonic() - begun < 10
        assert future.exception() is not None
        made.sessions[0].gate.set()


def test_who_waits_in_another_way_is_woken_at_once(board):
    """A condition is made for him, and whoever hands the answer over has to see it."""
    for _ in range(200):
        future, woken, called = Awaited(board), [], []
        future.add_done_callback(called.append)
        waiting = threading.Thread(target=lambda future=future, woken=woken: woken.append(future.result(60).call))
        waiting.start()
        assert future.set_running_or_notify_cancel()
        future.set_result(answer(5))
        waiting.join(5)
        assert (woken, called) == ([5], [future])


def test_who_waits_is_woken_also_if_he_began_before_anybody_else_looked(board):
    future, woken = Awaited(board), []
    waiting = threading.Thread(target=lambda: woken.append(future.result(60).call))
    waiting.start()
    time.sleep(0.1)  # he has made the condition, and waits
    assert future.set_running_or_notify_cancel()
    future.set_result(answer(5))
    waiting.join(5)
    assert woken == [5]


def test_a_copy_of_the_process_takes_answers_also_if_somebody_was_at_it(board):
    with switchboard._CHANGING:
        child = os.fork()
        if not child:
            threading.Thread(target=_taken_in_a_copy, args=(board,)).start()
            time.sleep(5)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def _taken_in_a_copy(board):
    future = Awaited(board)
    future.set_running_or_notify_cancel()
    future.set_result(answer(5))
    os._exit(0)


class Refusing(EchoSession):
    def reply(self, message):
        return Refusal(message="no")


def test_who_is_interrupted_while_he_takes_a_refusal_leaves_no_future_open(monkeypatch):
    with bench(shared_memory=DOOR, make=Refusing) as made:
        link = made.connect()
        with pytest.raises(Refused):
            ask(link, task(1)).result(10)
        made.sessions[0].gate.clear()
        futures = ask(link, task(2)), ask(link, task(3))

        def interrupted(*_):
            raise KeyboardInterrupt

        with attended(futures[:1]) as first_done:
            monkeypatch.setattr(Lending, "answered", interrupted)
            made.sessions[0].gate.set()
            with pytest.raises(KeyboardInterrupt):
                first_done(futures[:1], 10, 1)
        monkeypatch.undo()
        assert all("interrupted" in str(future.exception(10)) for future in futures)


@pytest.mark.parametrize("where", [(_Stream, "_usual"), (Lending, "taken"), (Awaited, "set_result"), None])
def test_who_is_interrupted_while_he_takes_an_answer_loses_that_link_and_no_future_stays_open(where, monkeypatch):
    """Ctrl-C reaches the thread that waits, and now that one takes answers: at any point of it."""
    with bench(shared_memory=DOOR) as made:
        link = made.connect()
        assert ask(link, task(1)).result(10).call == 1
        made.sessions[0].gate.clear()
        first, second = ask(link, task(2)), ask(link, task(3))

        def interrupted(*_):
            raise KeyboardInterrupt

        with attended([first]) as first_done:
            if where is None:  # where he waits for others, before he took it from what waits
                monkeypatch.setattr(link._stream, "_lock", Interrupting(link._stream._lock))
            else:
                monkeypatch.setattr(*where, interrupted)
            made.sessions[0].gate.set()
            with pytest.raises(KeyboardInterrupt):
                first_done([first], 10, 1)
        monkeypatch.undo()
        for future in (first, second):
            assert "interrupted" in str(future.exception(10))
        assert link.failure is not None
        assert ask(made.connect(), task(4)).result(10).call == 4
