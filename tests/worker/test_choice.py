"""Which strategy a worker takes: the fastest, every answer on the way is right, and what is wrong is never used."""

import logging

import pytest
import torch
from torch import Tensor

from darknight.errors import OpError, UsageError
from darknight.ops import Conv, Linear, field
from darknight.ops.strategy import DOUBLES, STRATEGIES, Doubles, Strategy, Work
from darknight.types import Pass
from darknight.worker import choice
from darknight.worker.choice import Choice, proven, strategy_names
from darknight.worker.engine import LocalEngine

PRIME = 2**28 - 57
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def layer() -> tuple[Conv, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randint(PRIME, (2, 3, 6, 5), generator=generator, dtype=torch.int32)
    w = torch.randint(-1000, 1000, (4, 3, 3, 3), generator=generator, dtype=torch.int32)
    delta = torch.randint(PRIME, (2, 4, 6, 5), generator=generator, dtype=torch.int32)
    return Conv.make((3, 3), padding=1), x, w, delta


class Slow(Doubles):
    """Right, and as slow as the clock below says."""

    def __init__(self, name: str, seconds: float, clock: list[float]) -> None:
        self.name, self.calls = name, 0
        self._seconds, self._clock = seconds, clock

    def compute(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        self._clock[0] += self._seconds
        self.calls += 1
        return super().compute(work, first, second)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch):
    """A choice between strategies that take 3, 1, 2 (and 100) seconds by a clock of its own."""

    def make(*seconds: float) -> tuple[Choice, list[Slow]]:
        clock = [0.0]
        slow = [Slow(f"takes {each:g} s", each, clock) for each in seconds]
        for each in slow:
            monkeypatch.setitem(STRATEGIES, each.name, each)
        found = Choice(CPU, "float64")
        found.strategies = list(slow)
        monkeypatch.setattr(found, "_now", lambda: clock[0])
        return found, slow

    return make


def test_the_fastest_keeps_the_shape_and_every_answer_is_right(timed, caplog: pytest.LogCaptureFixture):
    op, x, w, _ = layer()
    found, slow = timed(1.2, 1.0, 1.1)
    expected = field.forward(op, x, w, PRIME)
    with caplog.at_level(logging.INFO, logger="darknight.worker"):
        for _ in range(20):
            assert torch.equal(found.forward(op, x, w, PRIME), expected)
    assert [each.calls for each in slow] == [2, 16, 2]
    (record,) = caplog.records
    assert record.fields["strategy"] == "takes 1 s"
    assert record.fields["pass"] == "forward"
    assert record.fields["input"] == "x".join(map(str, x.shape))
    assert all(isinstance(value, str) for value in record.fields.values())  # a log line has words and numbers alone


def test_what_is_clearly_slower_gets_one_try_only(timed):
    op, x, w, _ = layer()
    found, slow = timed(1.0, 100.0)
    for _ in range(10):
        found.forward(op, x, w, PRIME)
    assert [each.calls for each in slow] == [9, 1]


def test_what_takes_little_time_gets_a_second_try(timed):
    op, x, w, _ = layer()
    found, slow = timed(0.002, 0.001)
    slow[0]._seconds = 0.025  # its first call has to fetch memory
    found.forward(op, x, w, PRIME)
    slow[0]._seconds = 0.0005
    for _ in range(9):
        found.forward(op, x, w, PRIME)
    assert [each.calls for each in slow] == [8, 2]


def test_passes_and_shapes_are_measured_for_themselves_and_weights_of_a_size_together(timed):
    op, x, w, delta = layer()
    found, slow = timed(1.0, 1.2)
    for _ in range(4):
        found.forward(op, x, w, PRIME)
    assert slow[1].calls == 2
    found.forward(op, x, torch.clamp(w, -600, 600), PRIME)  # ten bits still: it is known
    assert slow[1].calls == 2
    for _ in range(4):
        found.grad_input(op, delta, w, tuple(x.shape), PRIME)
        found.grad_weight(op, x, delta, tuple(w.shape), PRIME)
        found.forward(op, x[:1], w, PRIME)
    assert slow[1].calls == 8


def test_shapes_are_forgotten_before_they_fill_memory(timed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "_MOST_SHAPES", 3)
    found, _ = timed(1.0, 2.0)
    for rows in range(1, 10):
        found.forward(Linear(), torch.ones(rows, 2, dtype=torch.int32), torch.ones(3, 2, dtype=torch.int32), PRIME)
    assert len(found._trials) == 3


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_can_be_fixed_and_gives_the_same(name: str):
    op, x, w, delta = layer()
    found = Choice(CPU, name)
    assert found.words == (name if name != "float32-unfolded" else "float64")  # on a processor it takes nothing
    assert torch.equal(found.forward(op, x, w, PRIME), field.forward(op, x, w, PRIME))
    gx = found.grad_input(op, delta, w, tuple(x.shape), PRIME)
    assert torch.equal(gx, field.grad_input(op, delta, w, tuple(x.shape), PRIME))
    gw = found.grad_weight(op, x, delta, tuple(w.shape), PRIME)
    assert torch.equal(gw, field.grad_weight(op, x, delta, tuple(w.shape), PRIME))


def test_an_unknown_strategy_is_refused_with_those_that_there_are():
    with pytest.raises(UsageError, match=r'"fast" is none of measured, float64, .*int8-unfolded'):
        LocalEngine(strategy="fast")
    assert strategy_names() == ("measured", *STRATEGIES)


def test_operands_that_do_not_fit_are_refused_before_they_are_measured():
    op, x, w, delta = layer()
    found = Choice(CPU)
    with pytest.raises(OpError, match="conv: input"):
        found.forward(op, x[:, :2], w, PRIME)
    with pytest.raises(OpError, match="does not belong"):
        found.grad_input(op, delta[:, :, :-1], w, tuple(x.shape), PRIME)
    with pytest.raises(OpError, match="does not belong"):
        found.grad_weight(op, x, delta[:1], tuple(w.shape), PRIME)
    assert not found._trials


# --- the proof --------------------------------------------------------------------------------------------------------
class Rounding(Strategy):
    """As a GPU would with TF32: right for small numbers."""

    name = "rounding"

    def takes(self, work: Work, device: torch.device) -> bool:
        return work.kind is Pass.FORWARD

    def compute(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        exact = DOUBLES.compute(work, first, second)
        return exact - exact % 2 if work.prime == PRIME else exact


class Absent(Rounding):
    name = "absent"

    def compute(self, work: Work, first: Tensor, second: Tensor) -> Tensor:
        raise RuntimeError("not implemented for this device")


def test_every_strategy_that_takes_anything_is_proven_on_this_processor():
    names = [name for name, each in STRATEGIES.items() if proven(each, CPU)]
    assert names == ["float64", "float64-unfolded", "float32", "int8-unfolded"]


def test_a_device_proves_it_to_a_program_once(monkeypatch: pytest.MonkeyPatch):
    """Another engine on the same device asks nothing; a strategy that nobody has asked about is asked about."""
    first, second = (Slow("new", 0.0, [0.0]) for _ in range(2))
    monkeypatch.setitem(STRATEGIES, "new", first)
    assert "new" in Choice(CPU).words
    once = first.calls
    assert once > 0
    assert "new" in Choice(CPU).words
    assert first.calls == once
    monkeypatch.setitem(STRATEGIES, "new", second)
    assert "new" in Choice(CPU).words
    assert second.calls == once


@pytest.mark.parametrize(("broken", "says"), [(Rounding(), "is wrong"), (Absent(), "fails")])
def test_a_strategy_that_is_wrong_or_absent_is_never_used(
    broken: Strategy, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(STRATEGIES, broken.name, broken)
    found = Choice(CPU)
    assert broken.name not in found.words
    assert any(says in record.message and record.fields["strategy"] == broken.name for record in caplog.records)
    fixed = Choice(CPU, broken.name)
    op, x, w, _ = layer()
    assert torch.equal(fixed.forward(op, x, w, PRIME), field.forward(op, x, w, PRIME))  # by float64
