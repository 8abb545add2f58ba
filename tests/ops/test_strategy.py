"""Every strategy gives the bits of torch's own ops on doubles, up to the edges of the field; what a GPU needs, too."""

from itertools import product

import pytest
import torch
from torch import Tensor

from darknight.coding import PRIME_25, PRIME_28
from darknight.ops import Conv, Linear, numbers, strategy, unfold
from darknight.ops.numbers import FLOAT32, FLOAT64, INT8, Cut, cut_for, digits, full_precision, padded_product
from darknight.ops.strategy import DOUBLES, STRATEGIES, Unfolded, Work
from darknight.types import Pass
from ops.cases import CASES, Case

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),  # torch about its own speed
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # the latter is only named: nothing is put there
OTHERS = [name for name in STRATEGIES if STRATEGIES[name] is not DOUBLES]
every_prime = pytest.mark.parametrize("prime", [PRIME_25, PRIME_28], ids=["2^25", "2^28"])


def operands(case: Case, prime: int, largest: int, edge: int | None) -> dict[Pass, tuple[Tensor, Tensor]]:
    """Uniform numbers; or, with an edge, all shares the same residue and all weights the largest."""
    generator = case.generator(7)

    def share(shape):
        if edge is not None:
            return torch.full(shape, edge, dtype=torch.int32)
        return torch.randint(prime, shape, generator=generator, dtype=torch.int32)

    x, delta = share(case.x_shape), share(case.y_shape)
    w = torch.randint(-largest, largest + 1, case.w_shape, generator=generator, dtype=torch.int32)
    if edge is not None:
        w = torch.where(w < 0, -largest, largest) if edge % 2 else torch.full_like(w, -largest)
        w = w.to(torch.int32)
    return {Pass.FORWARD: (x, w), Pass.GRAD_INPUT: (delta, w), Pass.GRAD_WEIGHT: (x, delta)}


def work_of(case: Case, kind: Pass, prime: int, largest: int) -> Work:
    shapes = {"x_shape": case.x_shape, "w_shape": case.w_shape}
    return Work(op=case.op, kind=kind, **shapes, prime=prime, largest=float(largest))


def taken(name: str, work: Work) -> bool:
    """On either kind of device: the arithmetic is the same, and is tested here for both."""
    return any(STRATEGIES[name].takes(work, device) for device in (CPU, CUDA))


@every_prime
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_every_strategy_gives_the_same_bits(name: str, case: Case, prime: int):
    for largest in (40, 1023, prime - 1):
        for edge in (None, prime // 2, prime // 2 + 1, prime - 1):
            for kind, pair in operands(case, prime, largest, edge).items():
                work = work_of(case, kind, prime, largest)
                if taken(name, work):
                    found = STRATEGIES[name].compute(work, *pair)
                    assert found.dtype == torch.int32
                    assert torch.equal(found, DOUBLES.compute(work, *pair)), (largest, edge, kind)


def test_every_strategy_takes_something_and_int8_every_plain_convolution():
    for name in OTHERS:
        assert any(taken(name, work_of(case, kind, PRIME_28, 1023)) for case in CASES for kind in Pass), name
    for case in CASES:
        conv = getattr(case.op, "conv", case.op)
        plain = isinstance(conv, Linear) or (conv.groups == 1 and conv.padding.mode == "zeros")
        for kind in Pass:
            assert taken("int8-unfolded", work_of(case, kind, PRIME_28, 1023)) == plain, case.label


@pytest.mark.parametrize("name", ["float64-unfolded", "float32-unfolded", "int8-unfolded"])
def test_blocks_of_any_size_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch):
    """One row of positions, several, and several examples at a time; sums that are reduced again and again."""
    monkeypatch.setattr(strategy, "_AT_ONCE", 8)
    for case in CASES:
        for kind, pair in operands(case, PRIME_28, 1023, None).items():
            work = work_of(case, kind, PRIME_28, 1023)
            for size in (1, 300, 3000):
                monkeypatch.setattr(unfold, "BLOCK", size)
                if taken(name, work):
                    found = STRATEGIES[name].compute(work, *pair)
                    assert torch.equal(found, DOUBLES.compute(work, *pair)), (case.label, kind, size)


@pytest.mark.parametrize(
    ("format_", "inner", "largest"), [(FLOAT64, 60_000, 1023), (FLOAT32, 500, 60), (INT8, 60_000, 1023)]
)
def test_a_long_sum_at_the_edge_is_exact_and_not_with_wider_digits(format_, inner: int, largest: int):
    work = Work(
        op=Linear(), kind=Pass.FORWARD, x_shape=(20, inner), w_shape=(3, inner), prime=PRIME_28, largest=largest
    )
    generator = torch.Generator().manual_seed(3)
    x = PRIME_28 // 2 - torch.randint(5, (20, inner), generator=generator, dtype=torch.int32)
    w = largest - torch.randint(5, (3, inner), generator=generator, dtype=torch.int32)
    expected = DOUBLES.compute(work, x, w)
    assert torch.equal(Unfolded(format_).compute(work, x, w), expected)
    if format_ is FLOAT32:
        too_wide = Unfolded(format_)
        too_wide.cut = lambda work: Cut(1, 2, 14, inner, largest * 2.0**13)  # sums up to 2^28
        x = torch.randint(PRIME_28 // 2, x.shape, generator=generator, dtype=torch.int32)
        assert not torch.equal(too_wide.compute(work, x, w), DOUBLES.compute(work, x, w))


def _layouts(rows: int, columns: int, generator: torch.Generator) -> list[Tensor]:
    values = torch.randint(-64, 65, (rows, columns), generator=generator, dtype=torch.int8)
    transposed = torch.empty(columns, rows, 1, dtype=torch.int8)
    wide, tall = torch.zeros(rows, columns + 5, dtype=torch.int8), torch.zeros(columns, rows + 5, dtype=torch.int8)
    transposed[:, :, 0], wide[:, :columns], tall[:, :rows] = values.t(), values, values.t()
    return [values, transposed.squeeze(-1).t(), wide[:, :columns], tall[:, :rows].t()]


def test_products_of_bytes_are_right_in_every_layout():
    """torch._int_mm alone is not: a row with strides (1, 1) is misread."""
    generator = torch.Generator().manual_seed(4)
    misread = 0
    for rows, inner, columns in product((1, 2, 17), repeat=3):
        for left, right in product(_layouts(rows, inner, generator), _layouts(inner, columns, generator)):
            expected = (left.double() @ right.double()).to(torch.int32)
            assert torch.equal(numbers.multiply(left, right), expected), (left.stride(), right.stride())
            misread += not torch.equal(torch._int_mm(left, right), expected)
    assert misread  # else a newer torch has mended it, and numbers can do without


@every_prime
def test_cuts_hold_what_they_promise(prime: int):
    half = prime // 2
    for format_ in (FLOAT64, FLOAT32, INT8):
        for largest in (1, 63, 64, 65, 1023, 8191, half):
            for terms in (1, 9, 576, 4608, 100_000):
                cut = cut_for(format_, largest, half, terms)
                if cut is None:
                    continue
                edges = torch.tensor([0, 1, -1, half, -half, half - 1, 1 - half], dtype=torch.int32)
                parts = digits(edges, cut.right, cut.bits, format_, prime)
                assert max(float(part.double().abs().max()) for part in parts) <= format_.digit
                assert sum(part.double() * 2.0 ** (cut.bits * place) for place, part in enumerate(parts)).tolist() == (
                    edges.tolist()
                )
                assert cut.terms * cut.largest * cut.overlap <= format_.exact
                assert cut.products <= format_.most


def test_weights_of_ten_bits_need_the_fewest_digits():
    half = PRIME_28 // 2
    assert cut_for(FLOAT64, 1023, half, 4608).products == 1
    assert cut_for(INT8, 1023, half, 4608).products == 8
    assert cut_for(INT8, 63, half, 4608).products == 4  # small weights: one digit
    assert cut_for(INT8, half, half, 1024).products == 16
    assert cut_for(FLOAT64, half, half, 1024).products == 2
    assert cut_for(FLOAT32, 1023, half, 9).products == 3  # depthwise


# --- what a GPU needs -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(17, 8, 8), (1, 1, 1), (3, 5, 7), (16, 16, 16), (20, 9, 8), (40, 24, 17)])
def test_products_are_padded_to_the_sizes_that_a_gpu_takes(shape, monkeypatch: pytest.MonkeyPatch):
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(1)
    left = torch.randint(-64, 65, (rows, inner), generator=generator, dtype=torch.int8)
    right = torch.randint(-64, 65, (inner, columns), generator=generator, dtype=torch.int8)
    seen, real = [], torch._int_mm

    def watched(a: Tensor, b: Tensor) -> Tensor:
        seen.append((a.shape[0] > 16, a.shape[1] % 8, b.shape[1] % 8))
        return real(a, b)

    monkeypatch.setattr(torch, "_int_mm", watched)
    found = padded_product(left, right)
    assert seen == [(True, 0, 0)]
    assert torch.equal(found, (left.double() @ right.double()).to(torch.int32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_the_path_of_a_gpu_gives_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Everything but the device: products of bytes go through the padding."""
    monkeypatch.setattr(unfold, "multiply", lambda left, right: _padded(left, right))
    monkeypatch.setattr(strategy, "multiply", lambda left, right: _padded(left, right))
    for kind, pair in operands(case, PRIME_28, 1023, None).items():
        work = work_of(case, kind, PRIME_28, 1023)
        for name in OTHERS:
            if STRATEGIES[name].takes(work, CUDA):
                assert torch.equal(STRATEGIES[name].compute(work, *pair), DOUBLES.compute(work, *pair)), (name, kind)


def _padded(left: Tensor, right: Tensor) -> Tensor:
    return padded_product(left, right) if left.dtype == torch.int8 else left @ right


def test_float32_means_24_bits_while_a_strategy_computes():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True
    try:
        with full_precision():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_singles_are_multiplied_in_full_precision_only(monkeypatch: pytest.MonkeyPatch):
    seen = []
    op = Conv.make((3, 3), padding=1)
    work = Work(op=op, kind=Pass.FORWARD, x_shape=(1, 2, 4, 5), w_shape=(3, 2, 3, 3), prime=PRIME_25, largest=15.0)
    x, w = torch.ones(1, 2, 4, 5, dtype=torch.int32), torch.ones(3, 2, 3, 3, dtype=torch.int32)
    real = numbers.multiply

    def watched(left: Tensor, right: Tensor) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return real(left, right)

    monkeypatch.setattr(unfold, "multiply", watched)
    torch.set_float32_matmul_precision("medium")
    try:
        Unfolded(FLOAT32).compute(work, x, w)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {"highest"}


def test_torchs_own_convolution_of_singles_is_not_for_a_gpu():
    """It may take TF32, or Winograd's way."""
    op = Conv.make((3, 3), groups=4)
    work = Work(op=op, kind=Pass.FORWARD, x_shape=(1, 4, 6, 5), w_shape=(4, 1, 3, 3), prime=PRIME_28, largest=1023.0)
    assert STRATEGIES["float32"].takes(work, CPU)
    assert not STRATEGIES["float32"].takes(work, CUDA)


def test_a_stride_without_end_is_left_to_torch():
    """One product for each remainder would take for ever."""
    op = Conv.make((1, 1), stride=2**24)
    shapes = {"x_shape": (2, 4, 2**25 + 1, 2**25 + 1), "w_shape": (4, 4, 1, 1)}
    work = Work(op=op, kind=Pass.GRAD_INPUT, **shapes, prime=PRIME_28, largest=1.0)
    assert not any(taken(name, work) for name in OTHERS if name != "float32")
