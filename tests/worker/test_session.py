"""Several enclaves at one worker, over real connections: none of them can read, evict, refuse or delay another."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
import torch

from darknight.ops import field
from darknight.types import Forget, Pass
from darknight.wire import LinkClosed, Refused
from darknight.wire.shared_memory import Host
from darknight.worker import session
from darknight.worker.engine import LocalEngine
from worker.stations import MIB, OP, PRIME, new_enclave, residues, running

TIME = 20  # seconds that no answer here takes


class Gated(LocalEngine):
    """An engine that says what it computes, in order, and can be held up."""

    def __init__(self):
        super().__init__()
        self.computed = []
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, weights, op, x):
        self.computed.append(weights.layer)
        self.begun.set()
        assert self.gate.wait(TIME)
        return super().forward(weights, op, x)


def wait_until(true):
    deadline = time.monotonic() + TIME
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def enclaves():
    return new_enclave(), new_enclave()


def small(seed):
    return torch.randint(-500, 500, (7, 5), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@contextmanager
def two_sessions(enclaves, door=None, **settings):
    """Both enclaves at one worker; with `door` through shared memory, each with segments of its own."""
    with ExitStack() as stack:
        worker = stack.enter_context(running(*enclaves, shared_memory=door, **settings))
        sessions = []
        for enclave in enclaves:
            shared = {"host": Host(), "shared_memory": door} if door is not None else {}
            if door is not None:
                stack.callback(shared["host"].close)
            sessions.append(stack.enter_context(worker.connect(enclave, **shared)))
        yield sessions


BOTH_WAYS = pytest.mark.parametrize("door", [None, f"@darknight-test-{os.getpid()}"], ids=["stream", "shared memory"])


@BOTH_WAYS
def test_the_same_names_and_numbers_are_different_things_in_different_sessions(enclaves, door):
    with two_sessions(enclaves, door) as (one, two):
        shares = residues(3, 5, seed=1), residues(3, 5, seed=2)
        deltas = residues(3, 7, seed=3), residues(3, 7, seed=4)
        for enclave, seed in ((one, 1), (two, 2)):
            enclave.weights(small(seed))
        for enclave, share, seed in ((one, shares[0], 1), (two, shares[1], 2)):
            answer = enclave.forward(share, 7).result(TIME)
            assert torch.equal(answer.tensors[Pass.FORWARD], field.forward(OP, share, small(seed), PRIME))
        one.forward(shares[0], 7, call=2).result(TIME)
        with pytest.raises(Refused, match="no input share is kept for call 2"):  # only the other enclave has one
            two.grad_weight(deltas[1], (3, 5), call=2).result(TIME)
        two.link.post(Forget(everything=True))
        with pytest.raises(Refused, match="never arrived"):
            two.forward(shares[1], 7).result(TIME)
        for call in (1, 2):
            answer = one.grad_weight(deltas[0], (3, 5), call=call).result(TIME)
            assert torch.equal(
                answer.tensors[Pass.GRAD_WEIGHT], field.grad_weight(OP, shares[0], deltas[0], (7, 5), PRIME)
            )


def test_a_place_in_the_memory_of_another_enclave_is_no_place(enclaves):
    """Both come through one door. A segment is looked up in its own session, whatever its number."""
    with two_sessions(enclaves, f"@darknight-test-{os.getpid()}") as (one, two):
        own = one.link._stream._lending._memory
        own._host._numbers = 40
        one.weights(small(1))
        share, delta = residues(3, 5, seed=1), residues(3, 7, seed=3)
        one.forward(share, 7).result(TIME)
        places = {number for arena in (own._arena, own._host._arena) for number in arena._segments}
        assert min(places) > 40
        two.weights(small(2))
        two.forward(residues(3, 5, seed=2), 7).result(TIME)
        lend = two.link._stream._lending.lend

        def elsewhere(task, expected):
            loan = lend(task, expected)
            return replace(loan, share=loan.share._replace(segment=max(places)))

        two.link._stream._lending.lend = elsewhere
        with pytest.raises(LinkClosed, match="did not understand"):
            two.forward(residues(3, 5, seed=2), 7, call=2).result(TIME)
        answer = one.grad_weight(delta, (3, 5)).result(TIME)  # it has lost nothing
        assert torch.equal(answer.tensors[Pass.GRAD_WEIGHT], field.grad_weight(OP, share, delta, (7, 5), PRIME))


def fill(enclave, share):
    """Keeps shares until the worker refuses one; how many it kept, and the words of the refusal."""
    for call in range(1, 1000):
        try:
            enclave.forward(share, 7, call=call, compute=False).result(TIME)
        except Refused as refusal:
            return call - 1, str(refusal)
    raise AssertionError("nothing was ever refused")


@BOTH_WAYS
def test_an_enclave_that_fills_its_memory_is_refused_and_takes_nothing_from_another(enclaves, door):
    big = residues(MIB // 20 + 1, 5)  # 1 MiB
    with two_sessions(enclaves, door, limit=48 * MIB) as (one, two):
        one.weights(small(1))
        kept, words = fill(one, big)
        assert 16 <= kept <= 24  # half of the limit is this enclave's
        assert "needs 1.0 MiB" in words
        assert "of this enclave's 24.0 MiB are free" in words
        assert "--memory-limit" in words
        two.weights(small(2))
        answer = two.forward(residues(3, 5), 7).result(TIME)
        assert torch.equal(answer.tensors[Pass.FORWARD], field.forward(OP, residues(3, 5), small(2), PRIME))
        assert fill(two, big)[0] == kept
        one.link.post(Forget(calls=(1, 2)))
        one.forward(big, 7, call=2000, compute=False).result(TIME)


def test_what_is_too_large_is_refused_with_the_reason_and_the_link_lives_on(enclaves):
    with running(enclaves[0], limit=8 * MIB) as worker, worker.connect(enclaves[0]) as one:
        one.weights(residues(MIB, 5), layer="wide")  # 20 MiB
        for _ in range(2):
            with pytest.raises(Refused, match=r"weights of version 1 were refused: no room: this message needs 20"):
                one.forward(residues(3, 5), MIB, layer="wide").result(TIME)
        one.weights(small(1))
        with pytest.raises(Refused, match=r"no room: this message needs 20"):
            one.forward(residues(MIB, 5), 7).result(TIME)
        with pytest.raises(Refused, match=r"no room: the computation and its results needs"):  # 5 MiB, as floats 10
            one.forward(residues(MIB // 4, 5), 7).result(TIME)
        with pytest.raises(Refused, match="no input share"):  # what was refused was not kept
            one.grad_weight(residues(MIB // 4, 7)[:3], (3, 5)).result(TIME)
        assert one.forward(residues(3, 5), 7).result(TIME)


def test_a_long_queue_delays_another_enclaves_task_by_one_task(enclaves):
    engine = Gated()
    with running(*enclaves, engine=engine) as worker:
        turns = worker.station._sessions._turns
        with worker.connect(enclaves[0]) as many, worker.connect(enclaves[1]) as single:
            many.weights(small(1), layer="many")
            single.weights(small(2), layer="single")
            single.forward(residues(3, 5), 7, layer="single").result(TIME)
            engine.computed.clear()
            engine.begun.clear()
            engine.gate.clear()
            queue = [many.forward(residues(3, 5), 7, layer="many", keep=False) for _ in range(300)]
            assert engine.begun.wait(TIME)  # the first of 300 is being computed
            answer = single.forward(residues(3, 5), 7, layer="single")
            wait_until(lambda: turns.waiting == 1)
            engine.gate.set()
            answer.result(TIME)
            assert engine.computed[:2] == ["many", "single"]
            for future in queue:
                future.result(TIME)
            assert engine.computed.count("many") == 300


def test_one_certificate_gets_its_part_of_the_places_and_no_more(enclaves):
    with running(*enclaves, places=5) as worker:
        with worker.connect(enclaves[0]), worker.connect(enclaves[0]):
            with pytest.raises(LinkClosed, match=r"already serves 2 of this enclave's connections.*--enclaves"):
                worker.connect(enclaves[0])
            with worker.connect(enclaves[1]), worker.connect(enclaves[1]) as two:
                two.weights(small(1))
                assert two.forward(residues(3, 5), 7).result(TIME)
        with worker.connect(enclaves[0]), worker.connect(enclaves[0]):  # the places are free again
            pass


def test_two_of_three_certificates_cannot_take_the_place_of_the_third(enclaves):
    third = new_enclave()
    with running(*enclaves, third, places=4) as worker, worker.connect(enclaves[0]), worker.connect(enclaves[1]):
        for enclave in enclaves:
            with pytest.raises(LinkClosed, match="already serves 1 of this enclave's"):
                worker.connect(enclave)
        with worker.connect(third):
            pass


def test_more_certificates_than_places_are_served_as_they_come(enclaves):
    with (
        running(*enclaves, places=1) as worker,
        worker.connect(enclaves[0]),
        pytest.raises(LinkClosed, match="already serves 1 enclaves"),
    ):
        worker.connect(enclaves[1])


def test_who_is_refused_again_and_again_fills_no_log(enclaves, caplog, monkeypatch):
    with running(enclaves[0], patience=0.0) as worker, worker.connect(enclaves[0]):
        for _ in range(5):
            with pytest.raises(LinkClosed):
                worker.connect(enclaves[0])
        lines = [record for record in caplog.records if record.getMessage() == "session refused"]
        assert len(lines) == 1
        monkeypatch.setattr(session, "_QUIET", 0.0)
        with pytest.raises(LinkClosed):
            worker.connect(enclaves[0])
        lines = [record for record in caplog.records if record.getMessage() == "session refused"]
        assert [line.fields["more_before"] for line in lines] == [0, 4]


def test_shared_memory_is_granted_beside_the_limit_and_not_without_one(enclaves):
    with running(*enclaves, limit=256 * MIB, places=2) as worker:
        assert worker.station._server._shared_bytes == (128 + 32 + 128) * MIB


def test_only_one_connection_of_an_enclave_waits_for_a_place(enclaves):
    """Who waits holds up a thread of the server; hundreds would hold up everybody."""
    with running(enclaves[0], patience=TIME) as worker, ThreadPoolExecutor() as pool:
        first = worker.connect(enclaves[0])
        waiting = pool.submit(worker.connect, enclaves[0], timeout=TIME)
        wait_until(lambda: worker.station._sessions._waiting)
        begun = time.monotonic()
        with pytest.raises(LinkClosed, match="already serves 1 of this enclave's connections"):
            worker.connect(enclaves[0])
        assert time.monotonic() - begun < TIME / 2
        first.link.close()
        with waiting.result(TIME) as second:
            second.weights(small(1))
            assert second.forward(residues(3, 5), 7).result(TIME)


def test_a_restarted_enclave_gets_its_place_back_though_its_old_task_still_runs(enclaves):
    engine = Gated()
    with running(enclaves[0], engine=engine, patience=TIME) as worker:
        old = worker.connect(enclaves[0])
        old.weights(small(1))
        engine.gate.clear()
        old.forward(residues(3, 5), 7)
        assert engine.begun.wait(TIME)
        old.link.close()  # as when its process dies
        threading.Timer(0.3, engine.gate.set).start()
        with worker.connect(enclaves[0]) as new:
            with pytest.raises(Refused, match="never arrived"):  # nothing of the old session is left
                new.forward(residues(3, 5), 7).result(TIME)
            new.weights(small(2))
            assert new.forward(residues(3, 5), 7).result(TIME)
            assert new.link.welcome.memory == 256 * MIB


def test_a_worker_that_stops_answers_the_task_that_runs_and_takes_no_new_ones(enclaves):
    engine = Gated()
    with (
        running(*enclaves, engine=engine) as worker,
        worker.connect(enclaves[0]) as one,
        worker.connect(enclaves[1]) as idle,
    ):
        one.weights(small(1))
        engine.gate.clear()
        first, second = (one.forward(residues(3, 5), 7, call=call) for call in (1, 2))
        assert engine.begun.wait(TIME)
        stopping = threading.Thread(target=worker.station.stop, args=(TIME,))
        stopping.start()
        wait_until(lambda: not worker.station.healthy)
        wait_until(lambda: idle.link.failure is not None)  # it has nothing to wait for
        with pytest.raises(LinkClosed):
            worker.connect(enclaves[1])
        engine.gate.set()
        assert torch.equal(first.result(TIME).tensors[Pass.FORWARD], field.forward(OP, residues(3, 5), small(1), PRIME))
        with pytest.raises(LinkClosed):
            second.result(TIME)
        stopping.join(TIME)
        assert not stopping.is_alive()


def test_a_task_that_outlasts_the_grace_does_not_hold_up_the_stop(enclaves):
    engine = Gated()
    with running(enclaves[0], engine=engine) as worker, worker.connect(enclaves[0]) as one:
        one.weights(small(1))
        engine.gate.clear()
        answer = one.forward(residues(3, 5), 7)
        assert engine.begun.wait(TIME)
        begun = time.monotonic()
        worker.station.stop(grace=0.2)
        assert time.monotonic() - begun < 5
        with pytest.raises(LinkClosed):
            answer.result(TIME)
        engine.gate.set()
