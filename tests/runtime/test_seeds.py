"""Whose share goes out as a seed in a real training, to whom, and that nothing else changes."""

from functools import cache

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.coding import draw_code
from darknight.fleet import Fleet
from darknight.types import ForwardTask
from darknight.wire.seeds import expanded, share_of
from fleet.faults import Plan
from fleet.threads import thread_fleet, thread_member
from randomness.streams import generator
from runtime.test_faults import disturbed, undisturbed

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = {
    "one colluder": dk.Scheme(inputs=3, colluders=1),
    "a spare": dk.Scheme(inputs=3, colluders=1, spares=1),
    "two colluders": dk.Scheme(inputs=3, colluders=2),
    "parity": dk.Scheme(inputs=3, colluders=1, integrity="both"),
    "gradients in the clear": dk.Scheme(inputs=3, colluders=1, mask_gradients=False),
    "dense": dk.Scheme(inputs=3, colluders=1, mixing="dense"),
    "real": dk.Scheme(inputs=3, colluders=1, arithmetic=dk.Real(noise_std=1e2)),
}
STEPS = 2


def train(scheme, fleet, steps=STEPS):
    """The weights after some steps on batches that do not fill their groups, and the ledger."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 30, 3))
    data = torch.randn(7, 1, 7, 8, requires_grad=True)
    with dk.Runtime(scheme, fleet, seed=1) as runtime:
        dk.protect_(model, runtime)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), torch.arange(7) % 3).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()], runtime.ledger


@cache
def recorded(name):
    scheme = SCHEMES[name]
    with thread_fleet(scheme, record=True) as fleet:
        train(scheme, fleet)
        return [fleet.transcript(worker) for worker in range(scheme.workers)]


def seeds_of(records, kind):
    return [record.detail["seed"] for record in records if record.kind == kind]


@pytest.mark.parametrize("name", SCHEMES)
def test_carriers_get_seeds_and_nobody_else(name):
    scheme = SCHEMES[name]
    code = draw_code(scheme, generator("carriers").fresh())
    for kind, mixing in (("forward.share", code.A), ("backward.share", code.B)):
        carriers = mixing.carriers if scheme.arithmetic == dk.Field() else {}
        for worker, records in enumerate(recorded(name)):
            found = seeds_of(records, kind)
            assert found
            assert all((seed is not None) == (worker in carriers) for seed in found)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_masking_has_seeds_of_its_own_and_they_are_what_the_worker_used(name):
    keys = []
    for records in recorded(name):
        for record in records:
            seed = record.detail.get("seed")
            if seed is not None:
                keys.append(seed.key)
                assert torch.equal(record.tensor, expanded(seed, tuple(record.tensor.shape)))
    assert len(set(keys)) == len(keys)
    maskings = STEPS * 2 * (2 if SCHEMES[name].sends_masked_gradients else 1)
    seeded = name not in ("dense", "real")
    assert len(keys) == (maskings * SCHEMES[name].colluders if seeded else 0)


@pytest.mark.parametrize("name", sorted(SCHEMES.keys() - {"real"}))  # real arithmetic has noise in its results
def test_results_are_bit_for_bit_those_of_the_enclave_alone(name):
    scheme = SCHEMES[name]
    with thread_fleet(scheme) as fleet:
        found, _ = train(scheme, fleet)
    wanted, _ = train(scheme, None)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


# --- bytes ------------------------------------------------------------------------------------------------------------
def full_shares(number):
    """A worker that takes no seeds, as one of an earlier version."""
    member = thread_member(number)

    def dial():
        link = member.dial()
        asked = link.ask
        link.takes_seeds = False
        link.ask = lambda task, expected: asked(without_seed(task), expected)
        return link

    return type(member)(member.name, member.operator, dial)


def without_seed(task):
    return type(task)(**{**vars(task), "seed": None})


@pytest.mark.parametrize("name", ["one colluder", "two colluders", "gradients in the clear"])
def test_the_ledger_counts_what_goes_out_and_older_workers_change_nothing(name):
    scheme = SCHEMES[name]
    with thread_fleet(scheme) as fleet:
        found, ledger = train(scheme, fleet)
    with Fleet([full_shares(number) for number in range(scheme.workers)]) as fleet:
        older, full = train(scheme, fleet)
    assert all(torch.equal(one, other) for one, other in zip(found, older, strict=True))
    groups, M = 3, scheme.colluders  # seven examples, three to a group
    inputs, outputs = 7 * 8 + 4 * 30, 4 * 30 + 3  # of both layers
    spared = inputs + (outputs if scheme.sends_masked_gradients else 0)
    assert full.sent_bytes - ledger.sent_bytes == STEPS * M * groups * spared * 4
    assert full.received_bytes == ledger.received_bytes


# --- who stands in ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reply", [1, 3], ids=["while it is asked", "between the passes"])
def test_a_standby_gets_the_row_that_the_carrier_had_a_seed_of(reply):
    """As the same seed while the pass goes on; later as the share, made once more from the same key."""
    scheme = dk.Scheme(inputs=2, colluders=1)
    carrier, standby = 3, 4
    plans = {carrier: Plan({reply: "die"})}
    weights, _ = disturbed(scheme, plans, standbys=1)
    assert all(torch.equal(one, other) for one, other in zip(weights, undisturbed(scheme), strict=True))
    lost = {task.call: task for task in plans[carrier].seen if isinstance(task, ForwardTask)}
    assert len(lost) == reply
    assert all(task.seed is not None for task in lost.values())
    taken = [task for task in plans[standby].seen if isinstance(task, ForwardTask) and task.call in lost]
    assert taken
    for task in taken:
        assert torch.equal(share_of(task), share_of(lost[task.call]))
        assert task.seed is None or task.seed.key == lost[task.call].seed.key
    keys = {task.seed.key for task in lost.values()}
    for number, plan in plans.items():
        if number not in (carrier, standby):
            assert not keys & {task.seed.key for task in plan.seen if task.seed is not None}
