"""Batches in chunks: the same results, noise of their own, two under way at most, cut by shapes alone."""

import weakref
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.runtime import chunks as cutting
from darknight.runtime.chunks import MOST, Room, chunks, overlapped
from darknight.runtime.masked_field import MaskedField
from darknight.runtime.unmasking import Unmasking
from darknight.types import Pass
from fleet.threads import thread_fleet
from runtime.arena import LAYERS
from runtime.cutting import EXAMPLES, cut  # noqa: F401 - a fixture
from runtime.liars import Liar, fleet_with, off_by_one
from runtime.scripts import forced, trained_alone, trained_by_fleet

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = dk.Scheme(inputs=2, colluders=1)
SCHEMES = {
    "freivalds": SCHEME,
    "a spare": dk.Scheme(inputs=2, colluders=1, spares=1),
    "parity": dk.Scheme(inputs=2, colluders=1, spares=1, mixing="dense", integrity="parity"),
    "both": dk.Scheme(inputs=2, colluders=1, integrity="both"),
    "off": dk.Scheme(inputs=2, colluders=1, integrity="off"),
    "clear gradients": dk.Scheme(inputs=2, colluders=1, mask_gradients=False),
    "two colluders": dk.Scheme(inputs=2, colluders=2),
    "dense": dk.Scheme(inputs=2, colluders=1, mixing="dense"),
}


def passes(scheme, fleet, name="conv2d", dtype=torch.float32, bound=None):
    """The three results of a layer, and the ledger."""
    make, features = LAYERS[name]
    torch.manual_seed(0)
    module = make().to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, *features, generator=generator, dtype=dtype).requires_grad_()
    with dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(module, runtime, where=lambda *_: True, bounds=bound)
        y = module(x)
        y.backward(torch.randn(y.shape, generator=generator, dtype=dtype))
        return {
            Pass.FORWARD: y.detach(),
            Pass.GRAD_INPUT: x.grad,
            Pass.GRAD_WEIGHT: module.weight.grad,
        }, runtime.ledger


def assert_equal(found, expected):
    for kind, result in expected.items():
        assert torch.equal(found[kind], result), kind


# --- the same results -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("label", SCHEMES)
def test_a_training_in_chunks_is_bit_for_bit_that_in_one_piece(label, cut):  # noqa: F811
    scheme = SCHEMES[label]
    assert torch.equal(trained_by_fleet(scheme, EXAMPLES), trained_alone(scheme, EXAMPLES))
    assert set(cut) == {3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_every_pass_of_every_layer_is_bit_for_bit_that_in_one_piece(name, dtype, cut):  # noqa: F811
    with thread_fleet(SCHEME) as fleet:
        found, ledger = passes(SCHEME, fleet, name, dtype)
    assert cut == [3, 3]
    assert ledger.passed == dict.fromkeys(Pass, 3)  # each chunk by itself
    assert ledger.maskings == 2
    with pytest.MonkeyPatch.context() as patch, thread_fleet(SCHEME) as fleet:
        patch.setattr(cutting, "MOST", 1)
        assert_equal(found, passes(SCHEME, fleet, name, dtype)[0])
    assert cut == [3, 3, 1, 1]
    assert_equal(found, passes(SCHEME, None, name, dtype)[0])


@pytest.mark.parametrize("label", ["freivalds", "both", "clear gradients"])
def test_what_leaves_the_range_in_a_chunk_is_repeated_as_if_in_one_piece(label, cut, monkeypatch):  # noqa: F811
    forced(monkeypatch, 3)
    scheme = SCHEMES[label]
    expected, alone = passes(scheme, None)
    with thread_fleet(scheme) as fleet:
        found, ledger = passes(scheme, fleet)
        assert all(map(fleet.ready, range(fleet.workers)))  # those whose answers nobody waited for are none the worse
    assert_equal(found, expected)
    assert ledger.overflows.total() == alone.overflows.total() > 0
    assert not ledger.failed
    assert not ledger.missed


def cancelling(runtime):
    """A weight gradient that leaves the range in each of two chunks, and is zero in their sum."""
    torch.manual_seed(0)
    module = nn.Conv2d(1, 2, 3, padding=1, bias=False)
    x = torch.ones(16, 1, 20, 18)
    x[8:] = -1.0
    dk.protect_(module, runtime, where=lambda *_: True)
    module(x).backward(torch.ones(16, 2, 20, 18))
    return module.weight.grad


@pytest.mark.parametrize("broken", [False, True])
def test_a_chunk_may_leave_the_range_if_the_whole_does_not(broken, cut, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cutting, "MOST", 2)
    wraps, summed = [], MaskedField._summed

    def noted(self, layer, weights, x, delta, parts, wrapped):
        wraps.append(wrapped)
        if broken and wrapped:  # as if each chunk had to be in range
            raise dk.errors.RangeError("grad_weight", kind=Pass.GRAD_WEIGHT.value, check="freivalds")
        return summed(self, layer, weights, x, delta, parts, wrapped)

    monkeypatch.setattr(MaskedField, "_summed", noted)
    with dk.Runtime(SCHEME, None) as runtime:
        expected = cancelling(runtime)
        assert not runtime.ledger.overflows
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        found = cancelling(runtime)
        assert wraps[0]
        assert bool(runtime.ledger.overflows) == broken
    assert torch.equal(found, expected)


def test_a_sum_of_chunks_that_leaves_the_range_is_noticed(cut, monkeypatch):  # noqa: F811
    """Every chunk is in range, and their sum is not: it is repeated at a smaller scale."""
    monkeypatch.setattr(cutting, "MOST", 2)
    summed = MaskedField._summed

    def grown(self, layer, weights, x, delta, parts, wrapped):
        assert not wrapped
        if not runtime.ledger.overflows:
            for part in parts:
                part.integers[0] = self._prime // 2  # of the field, as the chunk's check has seen; twice that is not
        return summed(self, layer, weights, x, delta, parts, wrapped)

    monkeypatch.setattr(MaskedField, "_summed", grown)
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        layer = nn.Linear(6, 4, bias=False)
        dk.protect_(layer, runtime, where=lambda *_: True)
        layer(torch.randn(EXAMPLES, 6)).sum().backward()
        assert runtime.ledger.overflows.total() == 1


@pytest.mark.parametrize("label", ["real", "paper", "parity"])
def test_real_arithmetic_in_chunks_is_that_in_one_piece_up_to_its_rounding(label, cut):  # noqa: F811
    scheme = {
        "real": dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(1e2)),
        "paper": replace(dk.Scheme.paper(), arithmetic=dk.Real(1e2, dtype=torch.float32)),
        "parity": dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(1e2), integrity="parity"),
    }[label]
    with thread_fleet(scheme) as fleet:
        found, ledger = passes(scheme, fleet, bound={"": 8.0})
    with pytest.MonkeyPatch.context() as patch, thread_fleet(scheme) as fleet:
        patch.setattr(cutting, "MOST", 1)
        whole, before = passes(scheme, fleet, bound={"": 8.0})
    assert cut == [3, 3, 1, 1]
    tolerance = 0.02 if label == "paper" else 1e-5
    for kind, result in whole.items():
        assert found[kind].dtype == result.dtype
        assert (found[kind] - result).norm() < tolerance * result.norm()
    assert not ledger.failed
    # An example is in one chunk, so it is masked once. (Dense coefficients are drawn, and so is their bound.)
    assert ledger.maskings == before.maskings
    assert ledger.leaked["nats"] == pytest.approx(before.leaked["nats"], rel=0.5 if label == "paper" else 1e-9)


# --- noise ------------------------------------------------------------------------------------------------------------
def seen(scheme):
    """By worker, every share of a layer's input and gradient, of a batch whose examples are all alike."""
    module = nn.Conv1d(2, 2, 3, padding=1, bias=False)
    x = torch.ones(12, 2, 5, requires_grad=True)
    with thread_fleet(scheme, record=True) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(module, runtime, where=lambda *_: True)
        module(x).backward(torch.ones(12, 2, 5))
        records = [fleet.transcript(worker) for worker in range(fleet.workers)]
    return [[each.tensor for each in some if each.kind.endswith(".share")] for some in records]


def repeated(shares):
    """Pairs of equal shares at one worker, or equal groups within them."""
    groups = [group for share in shares for group in share]
    return sum(torch.equal(a, b) for place, a in enumerate(groups) for b in groups[:place])


@pytest.mark.parametrize("scheme", [SCHEME, SCHEMES["two colluders"]], ids=["field", "two colluders"])
def test_every_chunk_has_noise_of_its_own(scheme, cut):  # noqa: F811
    found = seen(scheme)
    assert cut == [3, 3]
    assert all(len(shares) == 6 for shares in found)
    assert not any(map(repeated, found))


def test_noise_that_is_used_for_two_chunks_is_noticed(cut, monkeypatch):  # noqa: F811
    shares = MaskedField._shares
    numbers = []

    def same(self, mixing, batch, noise, rooms):
        numbers.append(noise.number)
        return shares(self, mixing, batch, self._randomness.replay(numbers[0]), rooms)

    monkeypatch.setattr(MaskedField, "_shares", same)
    assert all(map(repeated, seen(SCHEME)))


# --- checks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("liars", [0, 1])
def test_once_a_lie_is_found_every_check_of_the_call_has_a_repetition_more(liars, cut, monkeypatch):  # noqa: F811
    """So chunks give a lie no more chances than a call in one piece does."""
    checks, verify = [], Unmasking.verify_forward

    def noted(self, op, y, x, w, further):
        checks.append(further and y.weighed is None)
        return verify(self, op, y, x, w, further)

    monkeypatch.setattr(Unmasking, "verify_forward", noted)
    with fleet_with(SCHEME, {0: Liar(Pass.FORWARD, off_by_one)} if liars else {}) as fleet:
        _, ledger = passes(SCHEME, fleet, "linear")
    assert len(ledger.blamed) == liars
    assert checks == ([False, True, True, True] if liars else [False] * 3)


# --- how many are under way -------------------------------------------------------------------------------------------
def chunk(log, number, *, fails=False):
    try:
        log.append(f"begin {number}")
        yield
        if fails:
            raise ValueError(number)
        log.append(f"end {number}")
        return number * number
    except GeneratorExit:
        log.append(f"drop {number}")
        raise


def test_two_are_under_way_and_each_is_made_when_its_turn_comes():
    log = []
    assert overlapped(chunk(log, number) for number in range(4)) == [0, 1, 4, 9]
    assert log == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "begin 3", "end 2", "end 3"]


def test_if_one_fails_nobody_waits_for_the_others():
    log = []
    with pytest.raises(ValueError, match="1"):
        overlapped(chunk(log, number, fails=number == 1) for number in range(4))
    assert log == ["begin 0", "begin 1", "end 0", "begin 2", "drop 2"]


def messages(beyond, monkeypatch):
    """What a worker sees of a call, when the result of one of its chunks leaves the field's range at first."""
    looked, verify = [], Unmasking.verify_forward

    def refused(self, op, y, x, w, further):
        looked.append(None)
        if len(looked) == beyond:
            raise dk.errors.RangeError("forward", kind=Pass.FORWARD.value, check="freivalds")
        return verify(self, op, y, x, w, further)

    with monkeypatch.context() as patch, thread_fleet(SCHEME, record=True) as fleet:
        patch.setattr(Unmasking, "verify_forward", refused)
        _, ledger = passes(SCHEME, fleet)
        assert ledger.overflows.total() == 1
        return [(each.kind, each.call, each.tensor.shape) for each in fleet.transcript(0)]


@pytest.mark.parametrize("broken", [False, True])
def test_no_worker_sees_which_chunk_left_the_range(broken, cut, monkeypatch):  # noqa: F811
    if broken:  # it ends the call at once
        monkeypatch.setattr(cutting, "RangeError", KeyError)
    seen = [messages(beyond, monkeypatch) for beyond in (1, 2, 3)]
    assert (seen[0] == seen[1] == seen[2]) == (not broken)


@pytest.mark.parametrize("ahead", [2, 3])
def test_shares_of_two_chunks_are_in_memory_at_most(ahead, cut, monkeypatch):  # noqa: F811
    """And the test can fail: with more under way, there are more."""
    monkeypatch.setattr(cutting, "AHEAD", ahead)
    alive, most, shares = [], [], MaskedField._shares

    def noted(self, mixing, batch, noise, rooms):
        made = shares(self, mixing, batch, noise, rooms)
        alive.append(weakref.ref(made[0]))
        most.append(sum(each() is not None for each in alive))
        return made

    monkeypatch.setattr(MaskedField, "_shares", noted)
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime, torch.no_grad():
        layer = nn.Linear(6, 4)
        dk.protect_(layer, runtime, where=lambda *_: True)
        layer(torch.randn(20, 6))
    assert len(alive) == 5
    assert max(most) == ahead


# --- how a batch is cut -----------------------------------------------------------------------------------------------
def test_what_is_small_goes_in_one_piece():
    x, y, w = (32, 16, 28, 28), (32, 32, 28, 28), (32, 16, 3, 3)
    assert chunks(SCHEME, x, y, w, 4) == [slice(0, 32)]


def test_large_weights_go_in_one_piece():
    x, y = (32, 512, 28, 28), (32, 512, 28, 28)
    assert len(chunks(SCHEME, x, y, (512, 512, 1, 1), 4)) > 1
    assert chunks(SCHEME, x, y, (512, 512, 3, 3), 4) == [slice(0, 32)]


@pytest.mark.parametrize("inputs", [1, 3, 4])
@pytest.mark.parametrize("examples", [16, 33, 100, 1000, 20_000])
def test_chunks_are_of_whole_groups_and_few_however_large_the_batch_is(examples, inputs):
    scheme = dk.Scheme(inputs=inputs, colluders=1)
    found = chunks(scheme, (examples, 64, 112, 110), (examples, 64, 112, 110), (64, 64, 3, 3), 4)
    assert 1 < len(found) <= MOST
    assert [0, *(each.stop for each in found)] == [*(each.start for each in found), examples]
    assert all(each.start % inputs == 0 for each in found)
    assert all(each.stop - each.start > inputs for each in found)  # two groups
    sizes = [each.stop - each.start for each in found]
    assert max(sizes) - min(sizes) <= 2 * inputs


def test_a_result_is_no_view_and_has_no_padding():
    room = Room((7, 3), 2)
    for begin, count in ((0, 4), (4, 4)):
        room.place(begin)(torch.float32, count).copy_(torch.arange(begin, begin + count).unsqueeze(1))
    whole = room.whole(torch.float32)
    assert not whole._is_view()
    assert torch.equal(whole, torch.arange(7.0).unsqueeze(1).expand(7, 3))
    assert prod(whole.shape) == 21
