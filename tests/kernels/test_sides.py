"""Both sides of a check in one call: they differ where those that are made sum by sum do, and by the same moduli."""

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from darknight.integrity import freivalds, sides
from darknight.integrity.weighed import Weighed, moduli_for, weigh, weigh_gradient
from darknight.integrity.weighing import Integers, Moduli, Rounded
from darknight.kernels import compiled, compiled_sides, threads
from darknight.kernels.reference import quantise_nearest
from darknight.ops import BilinearOp, Conv, Linear
from darknight.randomness import Randomness
from kernels.guarded import PRELUDE
from kernels.layout import fields_in, fields_of

PRIME = 2**28 - 57


@pytest.fixture(autouse=True)
def library() -> compiled_sides.Library:
    if not compiled.wanted():
        pytest.skip("nothing was compiled")
    found = compiled_sides.chosen()
    assert found is not None, "sides.h was not built from these sources: install the package again"
    return found


@dataclass(frozen=True)
class Check:
    """A pass of a layer: its operands, and the result over the integers, weighed."""

    op: BilinearOp
    x: Integers
    w: Tensor
    delta: Tensor
    y: Weighed
    gx: Weighed
    gw: Weighed
    moduli: Moduli

    def verdicts(self) -> list[list[bool] | None]:
        return [
            sides.forward(self.op, self.y, self.x, self.w, self.moduli),
            sides.grad_input(self.op, self.gx, self.delta, self.w, self.moduli),
            sides.grad_weight(self.op, self.gw, self.x, self.delta, self.moduli),
        ]


def drawn_op(draw: random.Random) -> tuple[BilinearOp, tuple[int, ...], tuple[int, ...]]:
    """An op, and shapes of x and w, none of them square."""
    rows, inputs, outputs = draw.randint(1, 9), draw.randint(1, 11), draw.randint(1, 7)
    if draw.random() < 0.25:
        return Linear(), (rows, *draw.choice([(), (3,)]), inputs), (outputs, inputs)
    kernel = draw.choice([(1, 1), (3, 3), (1, 3), (5, 2), (7, 7), (2, 1)])
    padding = (draw.randint(0, 2), draw.randint(0, 3))
    settings = {
        "stride": (draw.randint(1, 3), draw.randint(1, 2)),
        "dilation": (draw.randint(1, 2), draw.randint(1, 3)),
    }
    op = Conv.make(kernel, padding=padding, **settings)
    sizes = [
        max(1, hole * (taps - 1) + 1 - 2 * pad) + draw.choice([0, 1, 4, 29])
        for hole, taps, pad in zip(settings["dilation"], kernel, padding, strict=True)
    ]
    return op, (rows, inputs, *sizes), (outputs, inputs, *kernel)


def a_check(draw: random.Random, *, further: bool = False, wraps: bool = False, rounded: bool = False) -> Check:
    op, x_shape, w_shape = drawn_op(draw)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))

    def integers(shape: tuple[int, ...], most: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator, dtype=torch.int32)

    x, w = integers(x_shape, 100), integers(w_shape, 100)
    delta = integers(op.output_shape(x_shape, w_shape), 100)
    y = op.forward(x.double(), w.double()).to(torch.int32)
    gx = op.grad_input(delta.double(), w.double(), x_shape).to(torch.int32)
    gw = op.grad_weight(x.double(), delta.double(), w_shape).to(torch.int32)
    stream, options = Randomness(bytes(32)).fresh(), {"wraps": wraps, "further": further}
    operand = Rounded(x.to(torch.float32) / 8, 3) if rounded else x
    assert not rounded or torch.equal(quantise_nearest(operand.values, 3), x)
    found = (weigh(op, y, PRIME, stream, **options), weigh(op, gx, PRIME, stream, **options))
    return Check(
        op, operand, w, delta, *found, weigh_gradient(op, gw, PRIME, stream, **options), moduli_for(PRIME, wraps)
    )


def tampered(weighed: Weighed, modulus: int) -> Weighed:
    """One of its sums is one too high, modulo one of the primes."""
    sums = weighed.sums.clone()
    sums[modulus].view(-1)[sums[modulus].numel() // 2] += 1
    return Weighed(weighed.shape, weighed.vectors, sums)


def try_everything(seed: int) -> None:
    draw = random.Random(seed)
    further, wraps, rounded = (draw.random() < 0.3 for _ in range(3))
    check = a_check(draw, further=further, wraps=wraps, rounded=rounded)
    count = len(check.moduli.primes)
    assert check.verdicts() == [[True] * count] * 3, check.op
    for modulus in range(count):
        wrong = [tampered(each, modulus) for each in (check.y, check.gx, check.gw)]
        changed = Check(check.op, check.x, check.w, check.delta, *wrong, check.moduli)
        for verdict, weighed in zip(changed.verdicts(), wrong, strict=True):
            assert verdict is not None
            assert all(verdict[:modulus] + verdict[modulus + 1 :])
            assert verdict[modulus] == one_by_one(changed, weighed)[modulus], check.op


def one_by_one(check: Check, weighed: Weighed) -> list[bool]:
    """The verdict of the sums that are made apart."""
    judged: list[list[bool]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_sides, "chosen", lambda: None)
        patch.setattr(freivalds, "_compare", lambda _, found, needed: judged.append((found == needed).all(1).tolist()))
        if weighed is check.y:
            freivalds.agree_forward(check.op, weighed, check.x, check.w, PRIME, wraps=len(check.moduli.primes) == 1)
        elif weighed is check.gx:
            freivalds.agree_grad_input(
                check.op, weighed, check.delta, check.w, PRIME, wraps=len(check.moduli.primes) == 1
            )
        else:
            freivalds.agree_grad_weight(
                check.op, weighed, check.x, check.delta, PRIME, wraps=len(check.moduli.primes) == 1
            )
    return judged[0]


@pytest.mark.parametrize("part", range(8))
def test_they_differ_where_sums_one_by_one_do(part: int, full: bool):
    for seed in range(200 if full else 12):
        try_everything(1000 * part + seed)


@pytest.mark.parametrize("seed", [1110, 5062, 5152])
def test_a_single_position_among_zeros_has_a_weight_all_the_same(seed: int):
    """An input of one position, and a result of several, because of the zeros around it."""
    try_everything(seed)


def test_a_changed_operand_is_seen_too():
    check = a_check(random.Random(3))
    assert isinstance(check.x, Tensor)
    x, w, delta = (
        each + torch.arange(each.numel(), dtype=torch.int32).view(each.shape)
        for each in (check.x, check.w, check.delta)
    )
    for changed in (
        Check(check.op, x, check.w, check.delta, check.y, check.gx, check.gw, check.moduli),
        Check(check.op, check.x, w, check.delta, check.y, check.gx, check.gw, check.moduli),
        Check(check.op, check.x, check.w, delta, check.y, check.gx, check.gw, check.moduli),
    ):
        same = [changed.x is check.x and changed.w is check.w, changed.delta is check.delta and changed.w is check.w]
        expected = [*same, changed.x is check.x and changed.delta is check.delta]
        assert changed.verdicts() == [[each] * 2 for each in expected]


def test_large_planes_and_many_rows_go_in_parts(monkeypatch):
    """Rows of a weight gradient that are looked at in several turns, and lines longer than a tile."""
    monkeypatch.setattr(compiled_sides, "_IN_CACHE", 1 << 12)
    generator, stream = torch.Generator().manual_seed(0), Randomness(bytes(32)).fresh()
    for op, x_shape, w_shape in (
        (Conv.make((3, 3), stride=(1, 2), padding=1), (9, 3, 5, 1300), (2, 3, 3, 3)),
        (Conv.make((1, 1), stride=2), (7, 5, 33, 31), (3, 5, 1, 1)),
        (Linear(), (5000, 13), (3, 13)),
    ):
        x = torch.randint(-9, 10, x_shape, generator=generator, dtype=torch.int32)
        w = torch.randint(-9, 10, w_shape, generator=generator, dtype=torch.int32)
        delta = torch.randint(-9, 10, op.output_shape(x_shape, w_shape), generator=generator, dtype=torch.int32)
        moduli, options = moduli_for(PRIME, False), {"wraps": False, "further": False}
        gx = weigh(op, op.grad_input(delta.double(), w.double(), x_shape).to(torch.int32), PRIME, stream, **options)
        gw = weigh_gradient(op, op.grad_weight(x.double(), delta.double(), w_shape).int(), PRIME, stream, **options)
        assert sides.grad_input(op, gx, delta, w, moduli) == [True, True]
        assert sides.grad_input(op, tampered(gx, 0), delta, w, moduli) == [False, True]
        assert sides.grad_weight(op, gw, x, delta, moduli) == [True, True]
        assert sides.grad_weight(op, tampered(gw, 1), x, delta, moduli) == [True, False]


def test_what_it_is_not_for_is_left_to_sums_one_by_one(monkeypatch):
    check = a_check(random.Random(5))
    for op in (Conv.make((3,)), Conv.make((3, 3), groups=2), Conv.make((3, 3), padding=1, padding_mode="reflect")):
        other = Check(op, check.x, check.w, check.delta, check.y, check.gx, check.gw, check.moduli)
        assert other.verdicts() == [None] * 3
    assert isinstance(check.x, Tensor)
    apart = torch.stack([check.x, check.x], -1)[..., 0]  # with gaps
    assert sides.forward(check.op, check.y, apart, check.w, check.moduli) is None
    assert sides.forward(check.op, check.y, check.x.long(), check.w, check.moduli) is None
    others = a_check(random.Random(6))  # vectors of other lengths
    swapped = Check(
        check.op,
        check.x,
        check.w,
        check.delta,
        *(
            Weighed(mine.shape, theirs.vectors, mine.sums)
            for mine, theirs in ((check.y, others.y), (check.gx, others.gx), (check.gw, others.gw))
        ),
        check.moduli,
    )
    assert swapped.verdicts() == [None] * 3
    monkeypatch.setattr(threads, "one_is_enough", lambda numbers: False)  # parts on several threads are faster then
    assert check.verdicts() == [None] * 3


def test_what_is_handed_over_is_laid_out_as_in_the_c_file():
    assert fields_of(compiled_sides._Sides) == fields_in("sides.h", "sides")


GUARDED = (
    PRELUDE
    + """
from darknight.kernels import compiled_residues, compiled_sides

beyond, primes = int(sys.argv[1]), compiled_residues.array_of((2**28 - 57, 2**28 - 89))
library = compiled_sides.Library.loaded()
for rows, inputs, outputs, high, wide, tall, broad, step, hole, zeros in (
    (3, 5, 2, 7, 9, 3, 3, 1, 1, 1),
    (4, 2, 3, 11, 6, 5, 2, 2, 1, 0),
    (2, 3, 4, 8, 8, 1, 1, 2, 1, 0),
    (6, 20, 3, 1, 1, 1, 1, 1, 1, 0),
):
    down, across = ((n + 2 * zeros - hole * (k - 1) - 1) // step + 1 for n, k in ((high, tall), (wide, broad)))
    planes, ended = inputs * high * wide, outputs * down * across
    x, delta = at_the_end(4 * rows * planes), at_the_end(4 * rows * ended)
    w = at_the_end(4 * outputs * inputs * tall * broad)
    u, v = at_the_end(16 * outputs), at_the_end(16 * max(rows, inputs))
    grid, last = (step, step, hole, hole, zeros, zeros), (2, 64, 64, 64, primes, 2, 2)
    shape = (outputs, inputs, tall, broad)
    sums, a, b = at_the_end(16 * down * across), at_the_end(16 * down), at_the_end(16 * across)
    operand = (x + beyond, None, 1.0, rows, planes, inputs, high, wide, None, 0)
    what = compiled_sides._Sides(*operand, *shape, w, *grid, sums, down, across, u, v, a, b, *last)
    assert library.forward(ctypes.byref(what)) == 0  # zeros, all of it
    u = at_the_end(16 * inputs)
    sums, a, b = at_the_end(16 * high * wide), at_the_end(16 * high), at_the_end(16 * wide)
    operand = (delta, None, 1.0, rows, ended, outputs, down, across, None, 0)
    what = compiled_sides._Sides(*operand, *shape, w, *grid, sums, high, wide, u, v, a, b, *last)
    assert library.grad_input(ctypes.byref(what)) == 0
    u, v = at_the_end(16 * outputs), at_the_end(16 * inputs)
    sums, a, b = at_the_end(16 * inputs * tall * broad), at_the_end(16 * tall), at_the_end(16 * broad)
    operand = (x, None, 1.0, rows, planes, inputs, high, wide, delta, ended)
    what = compiled_sides._Sides(*operand, *shape, None, *grid, sums, down, across, u, v, a, b, *last)
    assert library.grad_weight(ctypes.byref(what)) == 0
print("done")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guarded memory is arranged for Linux")
def test_nothing_is_read_beyond_the_end(tmp_path: Path):
    script = tmp_path / "guarded.py"
    script.write_text(GUARDED)

    def run(beyond: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(script), str(beyond)], capture_output=True, text=True, timeout=120)

    done = run(0)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
    assert run(4).returncode < 0  # one element further, and the process dies: the test can fail
