"""Shares that were encoded straight into a worker's memory: sent from there once, and never read back."""

import os

import pytest
import torch

import darknight as dk
from darknight.runtime.shares import PlacedShares
from darknight.wire.link import LinkClosed
from darknight.wire.shared_memory import Memory
from runtime.scripts import network, train, trained_alone
from wire.peers import ask, bench, task

pytestmark = pytest.mark.usefixtures("one_thread")
OWN, ANEW = torch.zeros(2, 3), torch.ones(2, 3)


def shares(placed):
    return PlacedShares([OWN.clone(), OWN.clone()], placed, lambda seat: ANEW)


def test_a_share_leaves_its_memory_once_and_only_to_the_worker_that_sees_it():
    made = shares({0: (7, 1)})
    assert torch.equal(made.outgoing(0, (8, 1)), ANEW)  # a standby
    assert torch.equal(made.outgoing(0, (7, 2)), ANEW)  # the same worker, after it lost its memory
    assert torch.equal(made.outgoing(0, (7, 1)), OWN)
    assert torch.equal(made.outgoing(0, (7, 1)), ANEW)  # other shares may lie there by now


def test_what_the_enclave_reads_is_never_what_a_worker_could_have_written():
    made = shares({0: (7, 1)})
    assert torch.equal(made[0], ANEW)
    assert torch.equal(made[1], OWN)
    assert [torch.equal(share, ANEW) for share in made] == [True, False]
    assert (len(made), made.shape) == (2, (2, 3))


def test_what_was_not_sent_is_given_back_when_the_pass_is_over():
    made = shares({0: (7, 1)})
    made.release()
    assert torch.equal(made.outgoing(0, (7, 1)), ANEW)
    assert torch.equal(made.outgoing(1, (7, 1)), OWN)


@pytest.fixture
def link():
    with bench(shared_memory=f"@darknight-shares-{os.getpid()}") as made:
        yield made.connect()


def blocks(link) -> int:
    return sum(len(segment.live) for segment in link._stream._lending._memory._arena._segments.values())


def test_a_tensor_in_its_place_is_sent_without_a_copy_and_freed_afterwards(link, monkeypatch):
    monkeypatch.setattr("darknight.wire.shared_memory.write", lambda *_: pytest.fail("it was copied"))
    tensor = link.place((2, 3), torch.float32).copy_(torch.arange(6.0).view(2, 3))
    answer = ask(link, task(1, tensor)).result(10)
    assert torch.equal(next(iter(answer.tensors.values())), torch.arange(6.0).view(2, 3) + 1)
    ask(link, task(2, link.place((2, 3), torch.float32))).result(10)  # the answer to this shows that all is freed
    assert blocks(link) == 0


def test_a_place_that_is_never_used_is_free_again(link):
    place = link.place((2, 3), torch.float32)
    assert blocks(link) == 1
    del place
    ask(link, task(1)).result(10)
    ask(link, task(2)).result(10)  # the answer to this shows that all before is freed
    assert blocks(link) == 0


def test_a_tensor_of_another_memory_is_not_sent_for_its_own(link):
    """A worker that was away has written there what it liked, or nobody has."""
    first, second = link.place((2, 3), torch.float32), link.place((2, 3), torch.float32)
    ask(link, task(1, first)).result(10)
    with pytest.raises(LinkClosed, match="given back"):
        ask(link, task(2, first))
    del second


def test_training_with_worker_processes_places_its_shares_and_gives_the_same_weights(monkeypatch):
    placed, place = [], Memory.place
    monkeypatch.setattr(Memory, "place", lambda self, *form: placed.append(form) or place(self, *form))
    scheme = dk.Scheme(inputs=3, colluders=1)
    model = network()
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        found = train(model)
    assert torch.equal(found, trained_alone(scheme))
    assert len(placed) == 2 * 2 * 3 * scheme.workers  # steps, directions, layers
