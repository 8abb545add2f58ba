"""Vectors of a check are drawn after the answers it is about, used once, and from streams that mask nothing.

A worker that knew them would get any lie through: the carrier of r, say, if they came from the stream of that noise.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import log2

import pytest

import darknight as dk
from darknight.fleet import Fleet
from darknight.integrity import blame
from darknight.integrity import real as real_checks
from darknight.integrity.vectors import PLAN, Vectors, soundness
from darknight.randomness import Randomness, Stream
from darknight.runtime import masked_field, masked_real, unmasking
from darknight.types import Pass
from runtime.liars import Liar, fleet_with, off_by_one, step
from runtime.scripts import forced, network

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = {
    "field": dk.Scheme(inputs=3, colluders=1, spares=1),
    "field-dense": dk.Scheme(inputs=2, colluders=1, spares=1, mixing="dense", integrity="both"),
    "real": dk.Scheme(inputs=3, colluders=1, arithmetic=dk.Real(1e3)),
    "paper": dk.Scheme.paper(),
}
Broken = Callable[[Randomness, "Watch"], Callable[[Stream], Stream]]
CHECKS = ("verified_forward", "verified_grad_input", "verified_grad_weight")
WEIGHED = {name.replace("verified", "agree"): name for name in CHECKS}  # results that were weighed when decoded
DRAWN = ("weighing_for", "weighing_for_gradient")  # by these


@dataclass
class Watch:
    """What was done with which stream, in order; and every time that workers were asked, or had answered."""

    log: list[tuple[str, int]] = field(default_factory=list)

    def violations(self) -> set[str]:
        """What makes vectors of a check known, or predictable, to a worker."""
        checks = [(place, number) for place, (what, number) in enumerate(self.log) if what == "check"]
        numbers = [number for _, number in checks]
        found = set()
        if len(set(numbers)) < len(numbers):
            found.add("used twice")
        if set(numbers) & {number for what, number in self.log if what == "replay"}:
            found.add("replayed")
        if set(numbers) & {number for what, number in self.log if what == "mask"}:
            found.add("of a masking")
        for place, number in checks:
            drawn = self.log.index(("fresh", number))
            if any(what == "workers" for what, _ in self.log[drawn:place]):
                found.add("older than an answer")
        return found

    def count(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.log)


@contextmanager
def watched() -> Iterator[Watch]:
    """Every stream of the runtime, every check that the enclave makes, and every exchange with workers."""
    watch = Watch()

    def noting(what: str, holder: object, name: str, stream_of: Callable[..., Stream | None]) -> None:
        original = getattr(holder, name)

        def noted(*arguments, **options):
            stream = stream_of(*arguments, **options)
            if stream is not None:
                watch.log.append((what, stream.number))
            return original(*arguments, **options)

        patch.setattr(holder, name, noted)

    def among(*arguments, **options) -> Stream | None:
        return next((each for each in (*arguments, *options.values()) if isinstance(each, Stream)), None)

    def drawing(what: str) -> None:
        original = getattr(Randomness, what)

        def noted(*arguments):
            stream = original(*arguments)
            watch.log.append((what, stream.number))
            return stream

        patch.setattr(Randomness, what, noted)

    def exchanging(name: str) -> None:
        original = getattr(Fleet, name)

        def noted(*arguments, **options):
            found = original(*arguments, **options)
            watch.log.append(("workers", -1))
            return found

        patch.setattr(Fleet, name, noted)

    with pytest.MonkeyPatch.context() as patch:
        for what in ("fresh", "replay"):
            drawing(what)
        for name in ("ask", "post", "gather"):
            exchanging(name)
        for runtime in (masked_field, masked_real):
            noting("mask", runtime, "draw_code", among)
        for coding in (masked_field.field, masked_real.real):
            noting("mask", coding, "encode", among)
        for name in CHECKS:
            noting("check", unmasking, name, among)
            noting("check", real_checks, name, among)  # which blame makes use of too
        for name in DRAWN:
            noting("check", unmasking, name, among)
        noting("check", blame, "right_in_field", among)
        yield watch


def lied_to(label: str, kind: Pass, monkeypatch, broken: Broken | None = None) -> Watch:
    """A step with a liar and, in the field, results that leave its range."""
    scheme = SCHEMES[label]
    if isinstance(scheme.arithmetic, dk.Field):
        forced(monkeypatch, 3)
    with (
        watched() as watch,
        pytest.MonkeyPatch.context() as patch,
        fleet_with(scheme, {0: Liar(kind, off_by_one)}) as fleet,
        dk.Runtime(scheme, fleet) as runtime,
    ):
        if broken is not None:
            replace_streams(patch, broken(runtime._calls._products._randomness, watch))
        model = network()
        dk.protect_(model, runtime)
        step(model)
        ledger = runtime.ledger
    assert [event.worker for event in ledger.blamed] == ["w0"]
    assert bool(ledger.overflows) == isinstance(scheme.arithmetic, dk.Field)
    assert watch.count("check") > ledger.passed[Pass.GRAD_WEIGHT]
    return watch


@pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
@pytest.mark.parametrize("label", SCHEMES)
def test_no_worker_can_know_the_vectors_of_a_check(label, kind, monkeypatch):
    watch = lied_to(label, kind, monkeypatch)
    assert watch.violations() == set()
    assert watch.count("mask") > 0
    assert kind is not Pass.GRAD_WEIGHT or watch.count("replay") > 0


# --- and the test can fail --------------------------------------------------------------------------------------------
def replace_streams(patch: pytest.MonkeyPatch, another: Callable[[Stream], Stream]) -> None:
    """The runtime hands over `another` stream than it should."""
    for runtime, name in [(unmasking, name) for name in (*CHECKS, *DRAWN)] + [
        (masked_real.checks, name) for name in CHECKS
    ]:
        noted = getattr(runtime, name)

        def wrong(*arguments, noted=noted, **options):
            given = [another(each) if isinstance(each, Stream) else each for each in arguments]
            return noted(*given, **options)

        patch.setattr(runtime, name, wrong)


def of_a_masking(randomness: Randomness, watch: Watch) -> Callable[[Stream], Stream]:
    """The noise of the share that the carrier of r was just sent."""
    return lambda _: randomness.replay(next(number for what, number in reversed(watch.log) if what == "mask"))


def always_the_same(randomness: Randomness, watch: Watch) -> Callable[[Stream], Stream]:
    number = randomness.fresh().number
    return lambda _: randomness.replay(number)


def drawn_before(randomness: Randomness, watch: Watch) -> Callable[[Stream], Stream]:
    early = iter([randomness.fresh() for _ in range(500)])
    return lambda _: next(early)


@pytest.mark.parametrize("label", ["field", "real"])
@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (of_a_masking, {"of a masking", "replayed", "older than an answer"}),
        (always_the_same, {"used twice", "replayed", "older than an answer"}),
        (drawn_before, {"older than an answer"}),
    ],
)
def test_vectors_that_a_worker_could_know_are_noticed(label, broken, what, monkeypatch):
    assert lied_to(label, Pass.FORWARD, monkeypatch, broken).violations() >= what


# --- and how many of them ---------------------------------------------------------------------------------------------
@contextmanager
def counted() -> Iterator[dict[object, list[int]]]:
    """How many repetitions each check had: those of results by pass and op, those of single answers as "blame"."""
    drawn: list[int] = []
    checks: dict[object, list[int]] = defaultdict(list)
    draw = Vectors.drawn

    def noted(*arguments):
        vectors = draw(*arguments)
        drawn.append(len(vectors.u))
        return vectors

    def counting(holder: object, name: str, key: Callable[..., object]) -> None:
        original = getattr(holder, name)

        def wrapped(*arguments, **options):
            before = len(drawn)
            try:
                return original(*arguments, **options)
            finally:
                checks[key(*arguments)] += drawn[before:]

        patch.setattr(holder, name, wrapped)

    def agreeing(name: str, as_if: str) -> None:
        original = getattr(unmasking, name)

        def wrapped(op, weighed, *arguments):
            checks[as_if, op].append(len(weighed.vectors.u))
            return original(op, weighed, *arguments)

        patch.setattr(unmasking, name, wrapped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Vectors, "drawn", noted)
        for name, as_if in WEIGHED.items():
            agreeing(name, as_if)
        for name in CHECKS:
            counting(unmasking, name, lambda op, *_, name=name: (name, op))
        counting(blame, "right_in_field", lambda *_: "blame")
        yield checks


@pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
def test_every_check_after_the_first_of_a_pass_has_a_repetition_more(kind, monkeypatch):
    """So 40 bits are those of a layer call, however many liars are found in it and however often it is repeated."""
    scheme = SCHEMES["field"]
    forced(monkeypatch, 3)
    with (
        counted() as checks,
        fleet_with(scheme, {number: Liar(kind, off_by_one) for number in (0, 2)}) as fleet,
        dk.Runtime(scheme, fleet) as runtime,
    ):
        model = network()
        dk.protect_(model, runtime)
        step(model)
        assert len(runtime.ledger.blamed) == 2
        assert runtime.ledger.overflows.total() > 0
    single = checks.pop("blame")
    assert len(checks) == 9  # three passes of three layers, each called once
    for (name, _), (first, *others) in checks.items():
        # (A weight gradient may be looked at for the first time when the pass beside it had left the range.)
        assert first == 2 or (first == 3 and name == "verified_grad_weight")
        assert set(others) <= {3}
    assert set(single) == {3}
    further = sum(map(len, checks.values())) - len(checks)
    assert further > 2
    assert soundness(further + len(single)) >= 40
    assert -log2((3 + further) * PLAN.error) < 40  # which two repetitions each time would not give


def test_honest_workers_cost_no_further_check():
    scheme = SCHEMES["field"]
    with counted() as checks, fleet_with(scheme, {}) as fleet, dk.Runtime(scheme, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        step(model)
    assert list(checks.values()) == [[2]] * 9
