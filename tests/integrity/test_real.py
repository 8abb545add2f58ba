"""The contract of Freivalds' check in Real arithmetic: honest rounding passes, what is clearly more does not.

The figures are in the summary of every run; for each layer and pass: pytest -s tests/integrity/test_real.py
"""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import darknight as dk
from darknight.errors import EncodingError, OpError
from darknight.integrity import real as checks
from darknight.ops import BilinearOp, Conv, Linear
from darknight.randomness import Randomness
from darknight.types import Pass
from integrity.masked import Call
from integrity.thresholds import Threshold, threshold
from ops.cases import CASES, Case, conv, linear

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),  # torch about its own speed
]


def real(inputs: int, colluders: int, noise: float, spares: int = 0, mean: float = 0.0, **settings) -> dk.Scheme:
    return dk.Scheme(
        inputs=inputs, colluders=colluders, spares=spares, arithmetic=dk.Real(noise, noise_mean=mean), **settings
    )


def float32(inputs: int, noise: float, **settings) -> dk.Scheme:
    arithmetic = dk.Real(noise, dtype=torch.float32)
    return dk.Scheme(inputs=inputs, colluders=1, mask_gradients=False, arithmetic=arithmetic, **settings)


SCHEMES = {
    "K=1 M=1, 1e2": real(1, 1, 1e2),
    "K=2 M=1, 2e4": real(2, 1, 2e4),
    "K=3 M=1 E=1, 1e2": real(3, 1, 1e2, spares=1),
    "K=4 M=1, 1e3": real(4, 1, 1e3),
    "K=8 M=1, 2e4": real(8, 1, 2e4),
    "K=2 M=2, 2e4": real(2, 2, 2e4),
    "K=3 M=1, 1e2, mean 1e3": real(3, 1, 1e2, mean=1e3),
    "K=4 M=1 dense, 2e4": real(4, 1, 2e4, spares=1, mixing="dense"),
    "K=3 M=1 clear, 1e3": real(3, 1, 1e3, mask_gradients=False),
    "float32 K=3 E=1, 1.5e3": float32(3, 1.5e3, spares=1),
    "float32 K=1, 1e2": float32(1, 1e2),
    "float32 dense K=4, 2e4": float32(4, 2e4, mixing="dense"),
    "paper": dk.Scheme.paper(),
}
each_scheme = pytest.mark.parametrize("name", SCHEMES)
each_pass = pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
some_schemes = pytest.mark.parametrize("name", ["K=3 M=1 E=1, 1e2", "K=2 M=2, 2e4", "K=4 M=1 dense, 2e4", "paper"])


@pytest.fixture
def randomness() -> Randomness:
    return Randomness(bytes(range(32)))


def gaussian(case: Case, dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = case.generator(seed)
    shapes = (case.x_shape, case.w_shape, case.y_shape)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def coherent(case: Case, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Nothing cancels and all rounding errors agree: constants whose every product is inexact."""
    sizes = (1 / 3 + seed, 0.7, 1 / 7)
    shapes = (case.x_shape, case.w_shape, case.y_shape)
    return [torch.full(shape, size, dtype=torch.float64).to(dtype) for shape, size in zip(shapes, sizes, strict=True)]


def sparse(case: Case, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One loud example, the others nearly silent; rectified inputs; weights of rank one."""
    x, w, delta = gaussian(case, dtype, seed)
    x, delta = x.relu(), delta * 1e-4
    delta[0] *= 1e4
    return [x, (w[:1] + w * 1e-3).expand_as(w).contiguous(), delta]


def call_of(name: str, case: Case, randomness: Randomness, make=gaussian, seed: int = 0) -> Call:
    scheme = SCHEMES[name]
    return Call(scheme, case.op, *make(case, scheme.arithmetic.dtype, seed), randomness)


# --- honest results pass --------------------------------------------------------------------------------------------
@each_scheme
def test_an_honest_result_is_accepted_and_given_back(name: str, randomness: Randomness, full: bool, tally):
    calls = alarms = 0
    largest = 0.0
    seeds = 8 if full else 1
    for make in (gaussian, coherent, sparse):
        for seed in range(seeds):
            for case in CASES[:: 1 if full else 4]:
                call = call_of(name, case, randomness, make, seed)
                for kind in Pass:
                    result = call.decoded(kind, call.answers(kind))
                    spread = call.spread(kind)
                    calls, alarms = calls + 1, alarms + (not call.passes(kind, result, spread))
                    largest = max(largest, float((result - call.truth(kind)).abs().max()) / spread)
    print(f"{name}: {alarms} false alarms in {calls} calls; largest error of an element {largest:.2f} spreads")
    tally(f"Real's check, honest, {name}", {"honest results": calls, "false alarms": alarms})
    assert alarms == 0
    assert call.verified(kind, result) is result


LAYERS: dict[str, tuple[BilinearOp, tuple[int, ...], tuple[int, ...]]] = {
    "conv 32": (Conv.make((3, 3), padding=1), (8, 32, 10, 10), (48, 32, 3, 3)),
    "linear 512": (Linear(), (16, 512), (256, 512)),
}


@pytest.mark.parametrize("layer", LAYERS)
@some_schemes
def test_the_spread_is_close_to_the_errors_of_a_real_layer(name: str, layer: str, randomness: Randomness):
    """Not too small, or honest workers would be blamed; not so large that the tolerance swallows the result."""
    torch.manual_seed(0)
    op, x_shape, w_shape = LAYERS[layer]
    dtype = SCHEMES[name].arithmetic.dtype
    x, w = torch.randn(x_shape).relu(), torch.randn(w_shape) / 30
    delta = torch.randn(op.output_shape(x_shape, w_shape)) * 1e-3
    call = Call(SCHEMES[name], op, *(tensor.to(dtype) for tensor in (x, w, delta)), randomness)
    for kind in Pass:
        truth = call.truth(kind)
        error = rms(call.decoded(kind, call.answers(kind)) - truth)
        spread = call.spread(kind)
        figures = f"error {error / spread:.1e} spreads; spread {spread / rms(truth):.1e} of the result's rms"
        print(f"{name}, {layer}, {kind.value}: {figures}")
        assert error < 0.5 * spread
        assert spread < 0.05 * rms(truth)
        assert not call.passes(kind, torch.zeros_like(truth), spread)


FIGURES = {
    "conv": (Conv.make((3, 3), padding=1, groups=2), (6, 8, 6, 6), (12, 4, 3, 3)),
    "conv 64": (Conv.make((3, 3), padding=1), (6, 64, 3, 3), (72, 64, 3, 3)),
    "linear": (Linear(), (12, 48), (32, 48)),
    "linear 512": (Linear(), (16, 512), (480, 512)),
}
WIDE = ("conv 64", "linear 512")  # of which fewer calls will do


@each_scheme
def test_the_smallest_error_sure_to_be_caught_and_the_false_alarms(
    name: str, randomness: Randomness, full: bool, tally, figure
):
    """Honest results, and results wrong by just so much that it is certain, or a thousandth of that. A table."""
    torch.manual_seed(0)
    dtype, sharper = SCHEMES[name].arithmetic.dtype, dict.fromkeys(SHARPER, 0)
    everything = []
    for layer, (op, x_shape, w_shape) in FIGURES.items():
        figures = {kind: Figures() for kind in Pass}
        for trial in range((16 if full else 2) if layer in WIDE else (135 if full else 4)):
            x, w = torch.randn(x_shape).relu(), torch.randn(w_shape) / 8
            delta = torch.randn(op.output_shape(x_shape, w_shape)) * 1e-3
            call = Call(SCHEMES[name], op, *(tensor.to(dtype) for tensor in (x, w, delta)), randomness)
            for kind, found in figures.items():
                found.add(call, kind, trial)
        for kind, found in figures.items():
            print(f"{name:24} {layer:10} {kind.value:11} {found}")
            assert (found.alarms, found.misses, found.small_alarms) == (0, 0, 0)
            sharper = {times: count + found.sharper_alarms[times] for times, count in sharper.items()}
        everything.append(figures)
    calls = sum(found.calls for figures in everything for found in figures.values())
    tally(f"Real's check, {name}", {"honest results": calls, "false alarms": 0, "certain errors": calls, "missed": 0})
    for kinds in ((Pass.FORWARD, Pass.GRAD_INPUT), (Pass.GRAD_WEIGHT,)):
        sizes = [figures[kind].relative for figures in everything for kind in kinds]
        words = (f"{min(column):.0e} to {max(column):.0e}" for column in list(zip(*sizes, strict=True))[1:])
        title = f"{name}, {'grad weight' if Pass.GRAD_WEIGHT in kinds else 'forward, grad input'}"
        figure(title, "sure to be caught, of the result's rms: in all {}; in one element {}".format(*words))
    # The counts can fail: errors a thousand times smaller passed, and tolerances that are too small alarm.
    assert sharper[1000] > 0
    assert sharper[30] > 0 or name not in TIGHT


@dataclass
class Figures:
    """Counts of one layer, scheme and pass."""

    calls: int = 0
    alarms: int = 0
    misses: int = 0
    small_alarms: int = 0
    sharper_alarms: dict[int, int] = field(default_factory=lambda: dict.fromkeys(SHARPER, 0))
    relative: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, call: Call, kind: Pass, trial: int) -> None:
        spread, truth = call.spread(kind), call.truth(kind)
        result = call.decoded(kind, call.answers(kind))
        certain = threshold(call.op, kind, tuple(call.x.shape), tuple(call.w.shape), spread)
        wrong = smallest_wrong(truth, certain, trial)
        self.calls += 1
        self.alarms += not call.passes(kind, result, spread)
        self.misses += call.passes(kind, wrong, spread)
        self.small_alarms += not call.passes(kind, result + (wrong - truth) / 1000, spread)
        for times in SHARPER:
            self.sharper_alarms[times] += not call.passes(kind, result, spread / times)
        self.relative = tuple(size / rms(truth) for size in (spread, certain.rms, certain.element))

    def __str__(self) -> str:
        spread, clear, element = self.relative
        sharper = ", ".join(f"/{times}: {count}" for times, count in self.sharper_alarms.items())
        return (
            f"spread {spread:.1e} of the result's rms; sure to be caught: rms {clear:.1e}, one element {element:.1e}; "
            f"false alarms {self.alarms}, misses {self.misses} in {self.calls} calls "
            f"(error /1000: {self.small_alarms} alarms; tolerance {sharper})"
        )


SHARPER = (30, 1000)  # by which the tolerance is divided to see honest calls refused
# Where noise dominates the spread, honest errors come near it. (What errors that all agree would reach, steady parts of
# the spread, Gaussian data stays further below.)
TIGHT = ("float32 K=3 E=1, 1.5e3", "float32 K=1, 1e2", "float32 dense K=4, 2e4", "paper")


def smallest_wrong(truth: Tensor, certain: Threshold, trial: int) -> Tensor:
    """A result that is wrong by just so much that it is sure to be noticed: in all elements, or in one."""
    if trial % 2:
        return truth + certain.rms
    at = trial * 7 % truth.numel()
    return with_element(truth, at, float(truth.view(-1)[at]) + certain.element)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@some_schemes
def test_any_set_of_answers_that_decodes_has_its_spread(name: str, randomness: Randomness):
    call = call_of(name, CASES[0], randomness)
    answers = call.answers(Pass.FORWARD)
    for missing in answers:
        some = {j: answer for j, answer in answers.items() if j != missing}
        spread = call.spread(Pass.FORWARD, some)
        result = call.decoded(Pass.FORWARD, some)
        assert call.passes(Pass.FORWARD, result, spread)
        assert not call.passes(Pass.FORWARD, result + 1000 * spread, spread)


@each_scheme
def test_one_workers_answer_can_be_checked_against_its_own_share(name: str, randomness: Randomness):
    # Blame: the answer of worker j is an ordinary result, of its share.
    for case in CASES[::8]:
        call = call_of(name, case, randomness)
        for kind in Pass:
            spreads, answers = call.answer_spreads(kind), call.answers(kind)
            for j in list(answers)[: 3 if kind is Pass.GRAD_WEIGHT else None]:
                own = CallOfWorker(call, j)
                assert own.passes(kind, answers[j], spreads[j])
                wrong = answers[j] + 1000 * max(spreads[j], rms(answers[j]) + 1e-6)
                assert not own.passes(kind, wrong, spreads[j])


class CallOfWorker(Call):
    """The same call seen from one worker: its shares are the operands."""

    def __init__(self, call: Call, worker: int) -> None:
        self.op, self.w, self.randomness = call.op, call.w, call.randomness
        self.x, self.delta = call.shares[worker], call.deltas[worker]


# --- wrong results do not -------------------------------------------------------------------------------------------
@some_schemes
@each_pass
def test_wrong_results_are_refused(name: str, kind: Pass, randomness: Randomness):
    smallest: list[float] = []
    for case in CASES[::5]:
        call = call_of(name, case, randomness)
        answers, spread = call.answers(kind), call.spread(kind)
        result = call.decoded(kind, answers)
        size = threshold(case.op, kind, case.x_shape, case.w_shape, spread).element
        for at in (0, result.numel() // 2, result.numel() - 1):
            assert not call.passes(kind, with_element(result, at, result.view(-1)[at] + size), spread)
            assert call.passes(kind, with_element(result, at, result.view(-1)[at] + size), 1e6 * spread)
            for wrong in (math.nan, math.inf, -math.inf):
                assert not call.passes(kind, with_element(result, at, wrong), spread)
        halves = [2.0**-n for n in range(12)]
        ratios = [
            n for n in halves if not call.passes(kind, with_element(result, 0, result.view(-1)[0] + n * size), spread)
        ]
        smallest.append(min(ratios) * size / spread)
        if kind is not Pass.GRAD_WEIGHT:
            stale = call.decoded(kind, call.answers(kind, weights=1.5 * call.w))
            assert not call.passes(kind, stale, spread), case.label
        first, second = list(answers)[:2]
        if kind is not Pass.GRAD_WEIGHT and len(call.x) > 1:
            exchanged = {**answers, first: answers[second], second: answers[first]}
            assert not call.passes(kind, call.decoded(kind, exchanged), spread), case.label
        lie = {**answers, first: answers[first] + 1.0 * rms(answers[first])}
        assert not call.passes(kind, call.decoded(kind, lie), spread), case.label
    print(
        f"{name}, {kind.value}: one wrong element was caught from {min(smallest):.0f} to {max(smallest):.0f} spreads on"
    )


def with_element(result: Tensor, at: int, value: float | Tensor) -> Tensor:
    lie = result.clone()
    lie.view(-1)[at] = value
    return lie


@each_pass
def test_stale_weights_of_one_worker_are_refused(kind: Pass, randomness: Randomness):
    for case in CASES[::6]:
        call = call_of("K=3 M=1 E=1, 1e2", case, randomness)
        answers = call.answers(kind)
        # (A weight gradient uses no weights; there the worker answers for a stale delta.)
        answers[0] = answers[0] * 1.01 if kind is Pass.GRAD_WEIGHT else call.answers(kind, weights=1.01 * call.w)[0]
        assert not call.passes(kind, call.decoded(kind, answers))


# --- how sure -------------------------------------------------------------------------------------------------------
MANY_INPUTS = conv("many inputs", (3, 10, 3), 6, (2,), groups=2)
SMALL = [linear("small", (4, 5), 3), conv("small", (3, 4, 3, 2), 6, (2, 1), groups=2), MANY_INPUTS]
ERRORS = {
    "one element": lambda shape, g: one_hot(shape, g),
    "rank one": lambda shape, g: torch.ones(shape, dtype=torch.float64),
    "two equal rows": lambda shape, g: torch.cat([torch.ones(2, *shape[1:]), torch.zeros(shape[0] - 2, *shape[1:])]),
    "full rank": lambda shape, g: torch.randn(shape, generator=g, dtype=torch.float64),
}


def one_hot(shape, generator: torch.Generator) -> Tensor:
    error = torch.zeros(shape, dtype=torch.float64)
    error.view(-1)[int(torch.randint(error.numel(), (1,), generator=generator))] = 1.0
    return error


def rate(case: Case, kind: Pass, shape: str, times: float, count: int, randomness: Randomness) -> float:
    """How often an error of rms `times` z spreads, at the position that has most, passes."""
    generator = torch.Generator().manual_seed(3)
    x, w, delta = gaussian(case, torch.float64, 0)
    truth = case.run(kind, x, w, delta)
    spread = 1e-3
    accepted = 0
    call = object.__new__(Call)
    call.op, call.x, call.w, call.delta, call.randomness = case.op, x, w, delta, randomness
    for _ in range(count):
        error = ERRORS[shape](truth.shape, generator)
        if kind is Pass.GRAD_WEIGHT:
            grouped = error.reshape(case.op.groups, -1, *error.shape[1:])
            summed = (1,) if checks.inputs_apart(case.op, case.w_shape) else (1, 2)
        else:
            grouped, summed = case.op.rows(error), (0, 1)
        size = float(grouped.double().square().mean(summed).max().sqrt())
        z = threshold(case.op, kind, case.x_shape, case.w_shape, spread).deviations
        accepted += call.passes(kind, truth + error.double() * (times * z * spread / size), spread)
    return accepted / count


@pytest.mark.parametrize("shape", ERRORS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.label)
@each_pass
def test_no_clearly_wrong_result_passes(case: Case, kind: Pass, shape: str, randomness: Randomness, full: bool):
    count = 2000 if full else 60
    assert rate(case, kind, shape, sides(case, kind).clear, count, randomness) == 0
    small, equal = (rate(case, kind, shape, times, 30, randomness) for times in (0.02, 1.0))
    print(f"{case.label}, {kind.value}, {shape}: rms 0.02 z spreads passes {small:.2f}, one z spread {equal:.2f}")
    assert small > 0.9  # what rounding explains is not blamed: the check above could have failed


def sides(case: Case, kind: Pass) -> checks.Sides:
    return checks.ONE if kind is Pass.GRAD_WEIGHT and checks.inputs_apart(case.op, case.w_shape) else checks.BOTH


def one_repetition(monkeypatch) -> None:
    for name in ("ONE", "BOTH"):
        monkeypatch.setattr(checks, name, replace(getattr(checks, name), repetitions=1))


@pytest.mark.parametrize("shape", ERRORS)
@pytest.mark.parametrize("case", [SMALL[0], MANY_INPUTS], ids=lambda case: case.label)
@each_pass
def test_one_repetition_misses_less_than_a_quarter(case, kind: Pass, shape: str, randomness, full: bool, monkeypatch):
    """The step of the guarantee: 4^-20 = 2^-40; and 16^-10 where only the outputs are weighed."""
    most = 0.25 if sides(case, kind) is checks.BOTH else 1 / 16
    one_repetition(monkeypatch)
    count = 10_000 if full else 400
    missed = rate(case, kind, shape, sides(case, kind).clear, count, randomness)
    print(f"one repetition, {kind.value}, {shape}: {missed:.3f} missed")
    assert missed < most + 4 * math.sqrt(most / count)  # of counting


def test_a_quarter_is_what_the_argument_gives():
    # sqrt(2) E(1 + 256 g^2)^-1/2 for Gaussian g, by the midpoint rule.
    g = (torch.arange(4_000_000, dtype=torch.float64) + 0.5) * 1e-5 * 0.25
    density = torch.exp(-g * g / 2) * math.sqrt(2 / math.pi) * 0.25e-5
    bound = math.sqrt(2) * float((density / torch.sqrt(1 + checks.BOTH.clear**2 * g * g)).sum())
    assert 0.2 < bound < 0.25
    assert bound**checks.BOTH.repetitions <= 2.0**-40


def test_a_sixteenth_is_what_the_argument_gives_with_outputs_alone():
    """A coordinate of a random direction in n dimensions, times sqrt(n): its density is largest at zero and large n."""
    near = [
        math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2)) / math.sqrt(math.pi * n) for n in range(3, 100_000, 97)
    ]
    assert near == sorted(near)  # for n >= 3 it falls from there on
    assert near[-1] < 1 / math.sqrt(2 * math.pi) < 1.0001 * near[-1]
    width = 1 / checks.ONE.clear
    two = 2 / math.pi * math.asin(width / math.sqrt(2))  # n = 2, whose density rises
    bound = max(two, 2 * width / math.sqrt(2 * math.pi))
    assert 0.06 < bound < 1 / 16
    assert bound**checks.ONE.repetitions <= 2.0**-40


def test_signs_instead_of_directions_would_miss_half(randomness: Randomness, monkeypatch):
    def signs(stream, sides, length, groups=1):
        return torch.where(directions(stream, sides, length, groups) > 0, 1.0, -1.0).double() / math.sqrt(length)

    directions = checks._directions
    one_repetition(monkeypatch)
    monkeypatch.setattr(checks, "_directions", signs)
    assert rate(SMALL[0], Pass.FORWARD, "two equal rows", 1e6, 200, randomness) > 0.3


# --- what may not enter, and what is refused ------------------------------------------------------------------------
@each_pass
def test_every_call_draws_new_directions(kind: Pass, randomness: Randomness, monkeypatch):
    drawn: list[Tensor] = []
    draw = checks._directions

    def recorded(*arguments) -> Tensor:
        drawn.append(draw(*arguments))
        return drawn[-1]

    monkeypatch.setattr(checks, "_directions", recorded)
    call = call_of("paper", CASES[1], randomness)
    result = call.decoded(kind, call.answers(kind))
    for _ in range(3):
        call.verified(kind, result)
    rows = [tuple(row) for vectors in drawn for row in vectors.tolist()]
    vectors = 2 if sides(CASES[1], kind) is checks.BOTH else 1
    assert len(drawn) == 3 * vectors
    assert len(set(rows)) == len(rows) == 3 * vectors * sides(CASES[1], kind).repetitions
    for vectors in drawn:
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(vectors), dtype=torch.float64))


@each_pass
def test_an_empty_batch_and_zero_gradients_are_verified(kind: Pass, randomness: Randomness):
    for case in CASES[::8]:
        x, w, delta = gaussian(case, torch.float32, 0)
        for scheme in (SCHEMES["paper"], SCHEMES["K=4 M=1, 1e3"]):
            dtype = scheme.arithmetic.dtype
            for operands in ((x[:0], w, delta[:0]), (x, w, torch.zeros_like(delta)), (x, torch.zeros_like(w), delta)):
                call = Call(scheme, case.op, *(operand.to(dtype) for operand in operands), randomness)
                result = call.decoded(kind, call.answers(kind))
                assert call.verified(kind, result) is result


@each_pass
def test_what_cannot_be_compared_is_refused(kind: Pass, randomness: Randomness):
    call = call_of("paper", CASES[0], randomness)
    result = call.decoded(kind, call.answers(kind))
    for spread in (math.nan, math.inf, -1.0):
        with pytest.raises(EncodingError):
            call.verified(kind, result, spread)
    for wrong in (torch.cat([result, result]), result.unsqueeze(0)):
        with pytest.raises(OpError):
            call.verified(kind, wrong)


def test_weights_that_are_not_numbers_have_no_reach(monkeypatch):
    """Else a tolerance would leave them out: wherever they are, nothing can be compared with it."""
    monkeypatch.setattr(checks, "_TOGETHER", 3)
    for place in range(4):
        w = torch.ones(4, 3)
        w[place] = math.nan
        for kind in (Pass.FORWARD, Pass.GRAD_INPUT):
            found = checks.Reach.of(Linear(), kind, w, (2, 3))
            assert math.isnan(found.norm)
            assert math.isnan(found.total)


def test_a_weight_gradient_has_no_reach():
    with pytest.raises(OpError, match="gradient_spread"):
        checks.Reach.of(Linear(), Pass.GRAD_WEIGHT, torch.ones(2, 3), (4, 3))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_reach_of_large_weights_is_that_of_the_whole(case: Case, monkeypatch):
    """A few channels at a time, whichever of them has the weights that count."""
    for seed in range(5):
        _, w, _ = case.integers(bits=4, seed=seed)
        for kind in (Pass.FORWARD, Pass.GRAD_INPUT):
            whole = case.op.fan_in if kind is Pass.FORWARD else case.op.fan_out
            for together in (1, 7, 1 << 16):
                monkeypatch.setattr(checks, "_TOGETHER", together)
                found = checks.Reach.of(case.op, kind, w, case.x_shape)
                assert found.total == whole(w, case.x_shape)
                assert found.norm == math.sqrt(whole(w.square(), case.x_shape) * case.op.copies(case.x_shape))


@some_schemes
def test_an_answer_cannot_widen_the_tolerance(name: str, randomness: Randomness):
    call = call_of(name, CASES[0], randomness)
    for kind in Pass:
        answers, spread = call.answers(kind), call.spread(kind)
        huge = {**answers, 0: answers[0] * 1e12}
        assert not call.passes(kind, call.decoded(kind, huge), spread)
        assert call.spread(kind) == spread


@each_pass
def test_a_spread_without_the_noise_would_blame_honest_workers(kind: Pass, randomness: Randomness):
    """The formula is needed: rounding of the data alone does not explain the errors that noise causes."""
    call = call_of("paper" if kind is Pass.FORWARD else "K=8 M=1, 2e4", CASES[0], randomness)
    result = call.decoded(kind, call.answers(kind))
    assert call.passes(kind, result)
    call.sent_x, call.sent_delta = (replace(sent, noise=0.0) for sent in (call.sent_x, call.sent_delta))
    assert not call.passes(kind, result, call.spread(kind) / 30)
