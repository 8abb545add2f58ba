"""Every attack on every pass, by worker processes that lie: no wrong result is used, and whoever is named is a liar.

The counts are in the summary of every run, and with --full all of them, for every op.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch

import darknight as dk
from darknight.coding import PRIME_25, Code, decoder
from darknight.integrity import real as checks
from darknight.runtime.trial import OTHER, STALE, WRONG
from darknight.types import Pass
from integrity.thresholds import Threshold, threshold
from runtime.arena import LAYERS, Arena, Outcome
from runtime.scripts import network, train, trained_alone

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMES = {
    "field": dk.Scheme(inputs=2, colluders=1),
    "field 2^25": dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Field(prime=PRIME_25)),
    "real": dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(1e3)),
    "paper": dk.Scheme.paper(),
    "field M=2": dk.Scheme(inputs=2, colluders=2, spares=1),
    "field dense": dk.Scheme(inputs=2, colluders=1, spares=1, mixing="dense"),
    "field parity": dk.Scheme(inputs=2, colluders=1, spares=1, integrity="parity"),
    "field both": dk.Scheme(inputs=2, colluders=1, spares=1, integrity="both"),
    "real parity": dk.Scheme(inputs=2, colluders=1, spares=1, arithmetic=dk.Real(1e3), integrity="parity"),
    "field off": dk.Scheme(inputs=2, colluders=1, integrity="off"),
    "real both": dk.Scheme(inputs=2, colluders=1, spares=1, arithmetic=dk.Real(1e3), integrity="both"),
    "real off": dk.Scheme(inputs=2, colluders=1, arithmetic=dk.Real(1e3), integrity="off"),
}
# Calls in a cell, with --full and without; some schemes face some attacks alone.
CALLS = {"field": (50, 15), "field 2^25": (10, 1), "real": (26, 3), "paper": (27, 2)}
CALLS_OF_SOME = {"field M=2": (10, 1), "field dense": (10, 1), "field both": (10, 1)}

SINGLE = ("one-element", "sign", "row", "noise", "scale", "zeros", "nan", "infinity")
EARLIER = ("another-call", "earlier-step")
TOGETHER = ("another-worker", "coordinated")
WEIGHTS = ("stale-weights", "altered-weights")
ATTACKS = (*SINGLE, *EARLIER, *TOGETHER, *WEIGHTS)
CELLS = [(name, attack) for name in CALLS for attack in ATTACKS] + [
    (name, attack) for name in CALLS_OF_SOME for attack in ("one-element", "coordinated", "altered-weights")
]


def passes_of(attack: str, name: str) -> tuple[Pass, ...]:
    """Weights enter two passes. With parity or a dense code the same workers are in both, and found in the first.

    That is, if not all are wrong together: to that parity is blind, and a test below shows it. And with the paper's
    flat noise and float32, one answer in place of another can differ by no more than rounding (SECURITY.md).
    """
    if name == "paper" and attack == "another-worker":
        return (Pass.GRAD_INPUT, Pass.GRAD_WEIGHT)
    if attack not in WEIGHTS:
        return tuple(Pass)
    scheme = SCHEMES[name]
    in_both = scheme.integrity in ("parity", "both") or scheme.mixing == "dense"
    return (Pass.FORWARD,) if in_both else (Pass.FORWARD, Pass.GRAD_INPUT)


@pytest.fixture(scope="module", autouse=True)
def insecure():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DARKNIGHT_INSECURE_HOSTILE", "1")
        yield


@pytest.fixture(scope="module")
def arenas(tmp_path_factory, one_thread, insecure):
    """By name, each started when it is first asked for."""
    started: dict[str, Arena] = {}
    logging.getLogger("darknight.fleet").setLevel(logging.ERROR)  # a line for each liar would be thousands

    def arena(name: str) -> Arena:
        if name not in started:
            started[name] = Arena(SCHEMES[name], tmp_path_factory.mktemp("plans"))
        return started[name]

    yield arena
    logging.getLogger("darknight.fleet").setLevel(logging.NOTSET)
    for one in started.values():
        one.close()


def along_the_code(code: Code, kind: Pass, honest: int) -> dict[int, Fraction]:
    """Factors for all workers but one that make their errors a codeword: of sources that miss the honest one's row."""
    mixing, prime = (code.A if kind is Pass.FORWARD else code.B), code.prime
    row = [Fraction(value) for value in mixing.rows[honest]]
    sources = [Fraction(number) for number in (2, 3, 5, 7, 11, 13, 17)[: len(row)]]
    pivot = next(place for place, value in enumerate(row) if value)
    met = sum(value * source for place, (value, source) in enumerate(zip(row, sources, strict=True)) if place != pivot)
    sources[pivot] = -met / row[pivot]
    if prime is not None:
        sources[pivot] = Fraction(sources[pivot].numerator * pow(sources[pivot].denominator, -1, prime) % prime)
    factors = {
        worker: sum(Fraction(value) * source for value, source in zip(mixing.rows[worker], sources, strict=True))
        for worker in range(mixing.workers)
        if worker != honest
    }
    return factors if prime is None else {worker: Fraction(int(value) % prime) for worker, value in factors.items()}


@dataclass
class Lies:
    """Makes the plans of one attack after another, from a number that says which liar and which element."""

    arena: Arena
    meet: object
    sizes: dict[Pass, float]

    def tell(self, attack: str, layer: str, kind: Pass, number: int) -> tuple[Outcome, frozenset[int]]:
        """One call in which workers lie, after as many honest ones as the attack needs; and who the liars are."""
        arena, seats = self.arena, self.arena.seats(kind)
        liar, options = seats[number % len(seats)], f"passes={kind.value},seed={number}"
        if attack == "one-element" and kind in self.sizes:
            options += f",size={self.sizes[kind] / self.factor(kind, liar):.6g}"
        if attack in SINGLE:
            plans = {liar: f"{attack}:{options}"}
        elif attack in EARLIER:
            plans = {liar: f"{attack}:{options},after=1"}
        elif attack == "another-worker":
            words = f"another-worker:{options},meet={self.meet},wait=60"
            accomplice = seats[(number + 1) % len(seats)]
            arena.arm(
                {liar: f"{words},count=1", accomplice: f"{words},count=0"}
            )  # who shows its answer, and tells the truth
            return arena.call(layer), frozenset({liar})
        elif attack == "coordinated":
            size = f",size={100 * self.sizes[kind]:.6g}" if kind in self.sizes else ""
            plans = {j: f"coordinated:{options},factor={factor}{size}" for j, factor in self._agreed(kind, number)}
        else:
            size = f",size={100 * max(self.sizes.values()):.6g}" if self.sizes else ""
            words = "stale-weights" if attack == "stale-weights" else f"altered-weights:seed={number}{size}"
            if kind is Pass.GRAD_INPUT:  # who computes in the forward pass is found there
                liars = [seat for seat in seats if seat not in arena.seats(Pass.FORWARD)]
            else:
                everyone = range(arena.scheme.workers)
                liars = list(everyone) if attack == "altered-weights" and arena.scheme.integrity != "parity" else [liar]
            plans = dict.fromkeys(liars, words)
        arena.arm(plans)
        if attack in EARLIER or attack == "stale-weights":
            before = arena.call(layer)
            assert not before.named
            if attack != "another-call":
                arena.new_weights(layer)
        return arena.call(layer), frozenset(plans)

    def _agreed(self, kind: Pass, number: int) -> list[tuple[int, Fraction]]:
        """Who lies together, and by what multiple of the same error: all but one, along the code if they know it."""
        scheme = self.arena.scheme
        if kind is Pass.GRAD_WEIGHT or scheme.mixing == "dense":  # no code, or one that they do not know
            return [(j, Fraction(j + 1)) for j in range(scheme.workers - 1)]
        factors = along_the_code(self.arena.code, kind, number % scheme.workers)
        assert all(factors.values())  # none that would change nothing
        return list(factors.items())

    def factor(self, kind: Pass, seat: int) -> float:
        """By how much an error in this worker's answer grows on its way into the result."""
        if kind is Pass.GRAD_WEIGHT:
            return 1.0
        code = self.arena.code
        rows, matrix = decoder(code.A if kind is Pass.FORWARD else code.B, None, None)
        return max(abs(float(row[rows.index(seat)])) for row in matrix) if seat in rows else 1.0


@pytest.fixture(scope="module")
def sizes(arenas):
    """What `certain_sizes` finds for a scheme, again whenever weights have changed."""
    found: dict[tuple[str, int], dict[Pass, float]] = {}

    def of(name: str) -> dict[Pass, float]:
        if name.startswith("field"):
            return {}
        if name == "real off":
            return dict.fromkeys(Pass, 1.0)
        key = (name, arenas(name).changes)
        if key not in found:
            found[key] = certain_sizes(arenas(name))
        return found[key]

    return of


@pytest.fixture
def lies(arenas, sizes, tmp_path):
    return lambda name: Lies(arenas(name), tmp_path, sizes(name))


@contextmanager
def thresholds() -> Iterator[list[tuple[Pass, Threshold]]]:
    """Of every check of real arithmetic that is made meanwhile, from which error on it is certain."""
    seen: list[tuple[Pass, Threshold]] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in Pass:
            verify = getattr(checks, f"verified_{kind.value}")

            def watch(op, result, *rest, spread, kind=kind, verify=verify):
                if kind is Pass.GRAD_INPUT:
                    x_shape, w_shape = tuple(result.shape), tuple(rest[1].shape)
                elif kind is Pass.GRAD_WEIGHT:
                    x_shape, w_shape = tuple(rest[0].shape), tuple(result.shape)
                else:
                    x_shape, w_shape = (tuple(operand.shape) for operand in rest[:2])
                seen.append((kind, threshold(op, kind, x_shape, w_shape, spread)))
                return verify(op, result, *rest, spread=spread)

            patch.setattr(checks, f"verified_{kind.value}", watch)
        yield seen


def certain_sizes(arena: Arena) -> dict[Pass, float]:
    """In real arithmetic: an error of one element of a result that is certain to be noticed, whatever the layer."""
    arena.arm({})
    with thresholds() as seen:
        for layer in LAYERS:
            for _ in range(3):
                arena.call(layer)
    sizes = {kind: max((certain.element for each, certain in seen if each is kind), default=0.0) for kind in Pass}
    largest = max(sizes.values())
    return {kind: 2 * (size or largest) for kind, size in sizes.items()}  # twice: bounds may grow with the data to come


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    ("name", "kind"), [*(("real", kind) for kind in Pass), ("paper", Pass.GRAD_WEIGHT)], ids=lambda value: str(value)
)
def test_of_real_thresholds_an_element_just_above_its_own_is_found(name, kind, layer, lies, full, tally):
    """The matrix is far above the threshold for most layers; here every call is at 1.05 times its own."""
    found, calls = lies(name), Counter()
    arena, seats = found.arena, found.arena.seats(kind)
    for number in range(10 if full else 1):
        arena.arm({})
        with thresholds() as before:
            arena.call(layer)
        certain = next(certain for each, certain in before if each is kind)
        liar = seats[number % len(seats)]
        size = 1.05 * certain.element / found.factor(kind, liar)
        arena.arm({liar: f"one-element:passes={kind.value},seed={number},size={size:.9g}"})
        with thresholds() as now:
            outcome = arena.call(layer)
        if next(each for pass_, each in now if pass_ is kind).element > certain.element:
            continue  # its bound grew with the data: this lie is below
        calls["at 1.05 times the threshold"] += 1
        assert kind in outcome.failed
        assert outcome.named == {liar}
        assert not outcome.wrong
    tally(f"{name}, {kind.value}, {layer}", calls)
    assert calls.total() > 0 or not full


def test_of_real_thresholds_the_smallest_step_is_not_one(lies):
    """What the matrix must not promise: in floats, one bit of one element is rounding."""
    found = lies("real")
    found.arena.arm({0: "one-element"})
    outcome = found.arena.call("linear")
    assert not outcome.named
    assert not outcome.wrong


# --- the matrix -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tampered():
    """By scheme and attack, how many calls of the matrix were tampered with; what is found by its range is not counted.

    The promise is about lies that a check has to find.
    """
    return {}


@pytest.mark.parametrize(("name", "attack"), CELLS)
def test_no_lie_is_used_and_whoever_is_named_lied(name, attack, lies, full, tally, tampered):
    """With --full: each op is a cell of its own; otherwise the ops take turns in one."""
    found, counts, calls = lies(name), Counter(), (CALLS | CALLS_OF_SOME)[name][0 if full else 1]
    if attack in ("nan", "infinity"):  # found by their range, before any check
        calls = min(calls, 10)
    ledger = found.arena.runtime.ledger
    before, blamed = sum(ledger.passed.values()), len(ledger.blamed)
    for place, kind in enumerate(passes_of(attack, name)):
        cells = [[layer] for layer in LAYERS] if full else [list(LAYERS)[place:] + list(LAYERS)[:place]]
        for cell in cells:
            counts["cells"] += 1
            for number in range(calls):
                outcome, liars = found.tell(attack, cell[number % len(cell)], kind, number)
                counts["tampered calls"] += 1
                counts["wrong results used"] += bool(outcome.wrong)
                counts["liars not named"] += len(liars - outcome.named)
                counts["honest ones named"] += len(outcome.named - liars)
                counts["false alarms"] += not set(outcome.failed) <= {kind}
                assert attack in ("nan", "infinity") or kind in outcome.failed
    findings = Counter(event.finding for event in ledger.blamed[blamed:])
    counts["checks passed"] = sum(ledger.passed.values()) - before
    tally(f"{name}, {attack}", counts)
    assert [
        counts[what] for what in ("wrong results used", "liars not named", "honest ones named", "false alarms")
    ] == [
        0,
        0,
        0,
        0,
    ]
    tampered[name, attack] = 0 if attack in ("nan", "infinity") else counts["tampered calls"]
    if attack in ("nan", "infinity"):
        assert {event.check for event in ledger.blamed[blamed:]} == {"range"}
    if attack in WEIGHTS:
        assert set(findings) == {STALE if attack == "stale-weights" else OTHER}
    if attack in ("one-element", "sign", "row", "noise", *EARLIER, "another-worker"):
        assert set(findings) == {WRONG}


def test_the_counts_are_those_that_were_promised(full, tampered):
    """At least 10,000 tampered calls in the field and in real arithmetic with --full, and 500 in the field without."""
    if tampered.keys() != set(CELLS):
        pytest.skip("not all of the matrix ran, or a part of it failed")
    counts = Counter()
    for (name, _), count in tampered.items():
        counts["field" if name.startswith("field") else "real"] += count
        counts[name, "alone"] += count
    assert counts["field", "alone"] >= (10_000 if full else 500)
    assert counts["real"] >= (10_000 if full else 100)


def test_workers_that_exchange_answers_are_not_taken_for_ones_with_other_weights(arenas, tmp_path, full):
    """They exchange them also when they are asked what was wrong; but each is asked something else, and waits."""
    arena, wait = arenas("field"), 20 if full else 5
    for kind in (Pass.FORWARD, Pass.GRAD_INPUT):
        pair = arena.seats(kind)[:2]
        arena.arm(dict.fromkeys(pair, f"another-worker:passes={kind.value},meet={tmp_path},wait={wait}"))
        outcome = arena.call("conv2d")
        assert outcome.named == set(pair)
        assert {event.finding for event in arena.runtime.ledger.blamed[-2:]} == {WRONG}


def test_mislabelled_answers_name_their_worker_too(arenas):
    arena = arenas("field")
    for kind in Pass:
        arena.arm({1: f"mislabelled:passes={kind.value}"})
        outcome = arena.call("conv2d")
        assert outcome.named == {1}
        assert not outcome.wrong
        evidence = arena.runtime.ledger.blamed[-1]
        assert (evidence.worker, evidence.check) == (arena.fleet.names[1], "form")


def test_a_lie_once_in_a_thousand_calls_is_found_and_nothing_else_is(arenas, full, tally):
    """The clean calls in between are the measurement of false alarms: all ops, and with --full all passes."""
    arena, counts = arenas("field"), Counter()
    ledger = arena.runtime.ledger
    before = len(ledger.failed)
    for number in range(11 if full else 1):
        kind = list(Pass)[number % 3]
        liar = arena.seats(kind)[0]
        arena.arm({liar: f"one-element:every=1000,seed={number},passes={kind.value}"})
        for call in range(1000):
            outcome = arena.call(list(LAYERS)[call % len(LAYERS)], backward=kind is not Pass.FORWARD)
            assert not outcome.wrong
            assert outcome.named == ({liar} if call == 999 else set())
            counts["lies found" if call == 999 else "clean calls"] += 1
    counts["alarms"] = len(ledger.failed) - before - counts["lies found"]
    tally("field, once in a thousand", counts)
    assert counts["alarms"] == 0
    assert not full or counts["clean calls"] >= 10_000


@pytest.mark.parametrize(("name", "precision"), [("real", 1e-6), ("paper", 0.02)])
def test_honest_workers_are_never_suspected_in_real_arithmetic(name, precision, arenas, full, tally):
    """precision: the part of the largest element that hardly any pass exceeds, one in a thousand."""
    arena, rough = arenas(name), 0
    arena.arm({})
    ledger = arena.runtime.ledger
    before, failed = sum(ledger.passed.values()), len(ledger.failed)
    off = {kind: [] for kind in Pass}
    for number in range(3400 if full else 12):
        outcome = arena.call(list(LAYERS)[number % len(LAYERS)])
        assert not outcome.named
        assert not outcome.wrong
        for kind, errors in off.items():
            errors.append(outcome.spreads_off(kind))
            rough += outcome.part_off(kind) > precision
    counts = {"clean checks": sum(ledger.passed.values()) - before, "alarms": len(ledger.failed) - failed}
    mean = {kind: math.hypot(*errors) / math.sqrt(len(errors)) for kind, errors in off.items()}
    parts = {f"thousandths of the stated error in {kind.value}": round(1000 * part) for kind, part in mean.items()}
    tally(f"{name}, honest", counts | parts | {f"passes off by more than {precision:g} of the largest element": rough})
    assert counts["alarms"] == 0
    assert rough <= max(1, 3 * len(off[Pass.FORWARD]) // 1000)
    # The spread is the standard deviation that is stated. If errors were larger, what is called rounding would be more.
    assert max(mean.values()) <= 1
    assert not full or counts["clean checks"] >= 10_000


# --- what the absence of a check lets through -------------------------------------------------------------------------
@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack not in ("nan", "infinity")])
@pytest.mark.parametrize("name", ["field off", "real off"])
def test_without_checks_every_attack_succeeds(name, attack, lies):
    """So the matrix above can fail. What is no number of the arithmetic at all is refused even then."""
    found = lies(name)
    for number, kind in enumerate(passes_of(attack, name)):
        outcome, _ = found.tell(attack, "conv2d", kind, number)
        assert kind in outcome.wrong
        assert not outcome.named


@pytest.mark.parametrize("kind", [Pass.FORWARD, Pass.GRAD_INPUT], ids=lambda kind: kind.value)
@pytest.mark.parametrize(
    ("name", "blind"), [("field parity", True), ("field both", False), ("real parity", True), ("real both", False)]
)
def test_parity_is_blind_to_all_but_one_together_and_freivalds_is_not(name, blind, kind, arenas):
    arena = arenas(name)
    honest = 0
    plans = {
        worker: f"coordinated:passes={kind.value},factor={factor}"
        for worker, factor in along_the_code(arena.code, kind, honest).items()
    }
    arena.arm(plans)
    outcome = arena.call("conv2d")
    assert outcome.wrong == ({kind} if blind else set())
    assert bool(outcome.named) == (not blind)
    assert honest not in outcome.named


@pytest.mark.parametrize(
    ("name", "blind"), [("field parity", True), ("paper", True), ("field both", False), ("real both", False)]
)
def test_parity_is_blind_to_the_same_wrong_weights_everywhere_and_freivalds_is_not(name, blind, arenas):
    arena = arenas(name)
    arena.arm(dict.fromkeys(range(arena.scheme.workers), "altered-weights:size=1"))
    outcome = arena.call("conv2d")
    assert outcome.wrong == ({Pass.FORWARD, Pass.GRAD_INPUT} if blind else set())
    assert bool(outcome.named) == (not blind)


def test_parity_finds_a_single_liar_and_freivalds_a_lying_weight_gradient(arenas):
    arena = arenas("field parity")
    for kind, check in ((Pass.FORWARD, "parity"), (Pass.GRAD_INPUT, "parity"), (Pass.GRAD_WEIGHT, "freivalds")):
        arena.arm({1: f"one-element:passes={kind.value}"})
        outcome = arena.call("grouped")
        assert outcome.named == {1}
        assert not outcome.wrong
        assert arena.runtime.ledger.blamed[-1].check == check


# --- a whole training -------------------------------------------------------------------------------------------------
def test_a_training_with_two_hostile_workers_ends_with_the_bits_of_a_clean_one():
    scheme = dk.Scheme(inputs=2, colluders=1)
    plans = {1: "noise:after=9", 2: "one-element:passes=grad_weight,after=4"}
    with dk.local_fleet(scheme, hostile=plans) as fleet, dk.Runtime(scheme, fleet) as runtime:
        model = network()
        dk.protect_(model, runtime)
        found = train(model, steps=4)
        blamed = {event.worker for event in runtime.ledger.blamed}
        assert set(fleet.quarantined) == {1, 2}
    assert blamed == {"local 1", "local 2"}
    assert torch.equal(found, trained_alone(scheme, steps=4))
