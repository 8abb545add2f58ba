"""Arithmetic in F_p with float64: exact up to the last term that fits, refused beyond, and clear about misuse."""

from operator import mul

import pytest
import torch
from torch import Tensor

from darknight.coding import PRIME_25, PRIME_28, WITNESS
from darknight.errors import OpError
from darknight.ops import Conv, ConvTranspose, Linear, Padding, either, field, linear
from darknight.ops.field import Limbs
from darknight.types import Pass
from ops.cases import CASES, Case

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),  # torch about its own speed
]

# prime, limbs, and the longest contraction of two full-range operands that they keep exact
LONGEST = [(PRIME_25, Limbs(2, 13), 131_072), (PRIME_28, Limbs(2, 14), 8_192), (PRIME_28, Limbs(3, 10), 131_072)]
every_limit = pytest.mark.parametrize(("prime", "limbs", "terms"), LONGEST, ids=["2^25/2", "2^28/2", "2^28/3"])
every_prime = pytest.mark.parametrize("prime", [*WITNESS, *WITNESS.values()])


# --- at the limits --------------------------------------------------------------------------------------------------
def worst_values(prime: int, terms: int, bits: int) -> Tensor:
    """(term, pattern), centred: columns of one sign, each as large as a sum can be in another way."""
    half = prime // 2
    top = torch.full((terms,), half)
    # All even but the last: sums of products are odd, so that above 2^53 no float64 can hold them.
    odd_sum = torch.full((terms,), half - half % 2)
    odd_sum[-1] -= 1
    # The lowest balanced digit is as large as it can be: 2^(bits - 1).
    digit = torch.full((terms,), (half >> bits << bits) - 2 ** (bits - 1))
    return torch.stack([top, -top, odd_sum, digit], dim=1)


ODD_SUM = 2  # the column


def gram_exactly(values: Tensor, prime: int) -> Tensor:
    """values^T values mod prime in Python integers."""
    columns = values.t().tolist()
    return torch.tensor([[sum(map(mul, left, right)) % prime for right in columns] for left in columns])


def gram_in_the_field(values: Tensor, prime: int, positions: int = 1) -> Tensor:
    """The same by grad_weight of a linear layer whose input and gradient are `values`, rows cut into examples."""
    rows = values.remainder(prime).to(torch.int32)
    examples = rows if positions == 1 else rows.view(-1, positions, rows.shape[1])
    return field.grad_weight(Linear(), examples, examples, (rows.shape[1],) * 2, prime).to(torch.int64)


@every_limit
def test_the_limbs_are_those_of_the_design_up_to_the_last_term(prime: int, limbs: Limbs, terms: int):
    half = prime // 2
    assert field.limbs_for(half, float(half) * terms) == limbs
    assert field.limbs_for(half, float(half) * (terms + 1)).count == limbs.count + 1
    assert limbs.bound * half * terms <= 2**53 < limbs.bound * half * (terms + 1)


@every_limit
def test_the_longest_contraction_of_the_worst_values_is_exact(prime: int, limbs: Limbs, terms: int):
    values = worst_values(prime, terms, limbs.bits)
    floats, half = values.to(torch.float64), prime // 2
    found = field.exact(lambda a, b: a.t() @ b, floats, floats, bound=half, reach=float(half) * terms, prime=prime)
    assert torch.equal(field.residues(found, prime).to(torch.int64), gram_exactly(values, prime))


@pytest.mark.parametrize(
    ("prime", "bits", "examples", "positions"),
    [
        (PRIME_25, 13, 131_072, 1),  # as long as two limbs allow
        (PRIME_25, 13, 131_073, 1),  # one term more
        (PRIME_25, 13, 2 * 2_048 + 3, 64),  # two full chunks of examples, and a rest
        (PRIME_28, 14, 8_192, 1),
        (PRIME_28, 14, 8_193, 1),
        (PRIME_28, 14, 3 * 8_192 + 5, 1),
        (PRIME_28, 14, 2 * 128 + 1, 64),
    ],
)
def test_grad_weight_of_the_worst_values_is_exact_whatever_the_number_of_examples(prime, bits, examples, positions):
    values = worst_values(prime, examples * positions, bits)
    assert torch.equal(gram_in_the_field(values, prime, positions), gram_exactly(values, prime))


def unsigned_digits(values: Tensor, limbs: Limbs) -> list[Tensor]:
    """Digits in [0, 2^bits) of values that are not negative: what most bignum code would do."""
    digits = [values >> (limbs.bits * place) & (2**limbs.bits - 1) for place in range(limbs.count)]
    assert torch.equal(sum(digit << (limbs.bits * place) for place, digit in enumerate(digits)), values)
    return digits


def sum_of_partials(digits: list[Tensor], values: Tensor, bits: int, prime: int) -> int:
    """The product with `values` limb by limb in float64, recombined in Python integers."""
    partials = [int(digit.to(torch.float64) @ values.to(torch.float64)) for digit in digits]
    return sum(partial << (bits * place) for place, partial in enumerate(partials)) % prime


@every_limit
def test_unsigned_limbs_and_no_limbs_are_inexact_where_balanced_ones_are_exact(prime: int, limbs: Limbs, terms: int):
    # If these passed, the tests above would prove nothing.
    values = worst_values(prime, terms, limbs.bits)[:, ODD_SUM]
    expected = int(gram_exactly(values.unsqueeze(1), prime))
    balanced = [digit.to(torch.int64) for digit in field.split(values.to(torch.float64), limbs)]
    assert sum_of_partials(balanced, values, limbs.bits, prime) == expected
    assert sum_of_partials(unsigned_digits(values, limbs), values, limbs.bits, prime) != expected
    assert sum_of_partials([values], values, 0, prime) != expected


def test_a_contraction_that_cannot_be_exact_is_refused():
    features = 2**21 + 1
    x, w = torch.ones(1, features, dtype=torch.int32), torch.full((1, features), PRIME_28 - 1, dtype=torch.int32)
    with pytest.raises(OpError, match="too long for exact float64 arithmetic"):
        field.forward(Linear(), x, w, PRIME_28)
    with pytest.raises(OpError, match="too long"):
        field.limbs_for(PRIME_28 // 2, 2.0**50)


# --- digits and residues --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("limbs", [Limbs(2, 13), Limbs(3, 9), Limbs(6, 5), Limbs(2, 14), Limbs(3, 10), Limbs(5, 6)])
def test_digits_are_balanced_and_recombine(limbs: Limbs):
    largest = PRIME_25 // 2 if limbs.count * limbs.bits < 28 or limbs.count == 6 else PRIME_28 // 2
    edges = torch.tensor([0, 1, 2 ** (limbs.bits - 1), 2**limbs.bits, 3 * 2 ** (limbs.bits - 1), largest - 1, largest])
    spread = torch.linspace(-largest, largest, 10_001, dtype=torch.float64).round()
    values = torch.cat([edges, -edges, edges - 1, spread]).to(torch.float64)
    digits = field.split(values, limbs)
    assert len(digits) == limbs.count
    assert all(digit.abs().max() <= 2 ** (limbs.bits - 1) for digit in digits)
    assert torch.equal(sum(digit * 2.0 ** (limbs.bits * place) for place, digit in enumerate(digits)), values)
    prime = PRIME_25 if largest == PRIME_25 // 2 else PRIME_28
    total, bound = field.joined(digits, limbs.bits, [limbs.bound] * limbs.count, prime)
    assert total.abs().max() <= bound
    assert torch.equal(field.centred(total, prime), values)


@every_prime
def test_digits_are_joined_whether_or_not_they_are_reduced_in_between_and_stay_as_they_are(prime: int):
    generator = torch.Generator().manual_seed(0)
    for most in (2**20, 2**38, 2**39, 2**51, 2**53 - 1):  # of one place: nothing, the upper ones, all are reduced
        sums = [torch.randint(-most, most, (3, 5), generator=generator) for _ in range(3)]
        exact = [sum(int(value) << (14 * place) for place, value in enumerate(each)) for each in _columns(sums)]
        doubles = [each.to(torch.float64) for each in sums]
        total, bound = field.joined(doubles, 14, [float(most)] * 3, prime)
        assert bound <= 2**53
        assert field.least(total, bound, prime).flatten().tolist() == [value % prime for value in exact]
        assert all(torch.equal(each.to(torch.int64), before) for each, before in zip(doubles, sums, strict=True))


def _columns(sums: list[Tensor]) -> list[tuple[int, ...]]:
    return list(zip(*(each.flatten().tolist() for each in sums), strict=True))


@every_prime
@pytest.mark.parametrize("bits", [30, 49, 50, 51, 53])
def test_least_residues_are_those_of_whole_numbers_up_to_their_bound(prime: int, bits: int):
    most = 2**bits // prime
    multiples = [0, 1, 2, most // 2, most - 1, most]
    around = [base * prime + offset for base in multiples for offset in (0, 1, -1, prime // 2, prime // 2 + 1)]
    spread = torch.randint(-(2**bits), 2**bits, (100_003,), generator=torch.Generator().manual_seed(0)).tolist()
    exact = [value for each in around for value in (each, -each) if abs(value) <= 2**bits] + spread
    found = field.least(torch.tensor(exact, dtype=torch.float64), 2.0**bits, prime)
    assert found.dtype == torch.int32
    assert found.tolist() == [value % prime for value in exact]


@every_prime
def test_beyond_their_bound_least_residues_would_be_wrong(prime: int):
    # If they were not, the test above would prove nothing about the bound.
    values = torch.arange(2**53 // prime - 2**16, 2**53 // prime, dtype=torch.float64) * prime - 1
    assert (field.least(values, 2.0**53, prime) == prime - 1).all()
    assert (field.least(values, 0.0, prime) == -1).any()


@every_prime
def test_centred_values_are_congruent_and_small_up_to_two_to_the_53(prime: int):
    half = prime // 2
    largest = 2**53 // prime
    multiples = [0, 1, 2, largest // 2, largest - 1]
    around = [base * prime + offset for base in multiples for offset in (0, 1, -1, half, half + 1, -half, prime - 1)]
    # Just below 2^53 a multiple of the prime above it may be nearer; it must not be rounded on the way.
    last = [2**53 - step for step in (*range(50), half - 1, half, half + 1, prime)]
    exact = [sign * value for value in (*around, *last) for sign in (1, -1)]
    found = field.centred(torch.tensor(exact, dtype=torch.float64), prime)
    assert found.abs().max() <= prime / 2 + 8
    canonical = field.residues(found, prime)
    assert canonical.dtype == torch.int32
    assert canonical.tolist() == [value % prime for value in exact]


@every_prime
def test_residues_are_canonical_over_their_whole_domain(prime: int):
    half = prime // 2
    exact = [0, 1, -1, half, -half, half + 1, -half - 1, half + 8, -half - 8, prime - 1, 1 - prime]
    assert field.residues(torch.tensor(exact, dtype=torch.float64), prime).tolist() == [
        value % prime for value in exact
    ]
    assert field.residues(torch.tensor([-0.0]), prime).tolist() == [0]


@every_prime
def test_shares_are_centred_to_the_nearest_representative(prime: int):
    half = prime // 2
    shares = torch.tensor([0, 1, half, half + 1, prime - 1], dtype=torch.float64)
    assert field.centred(shares, prime).tolist() == [0, 1, half, -half, -1]


# --- nothing to do --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_an_empty_batch_gives_empty_results_and_a_zero_weight_gradient(case: Case):
    x_shape, y_shape = (0, *case.x_shape[1:]), (0, *case.y_shape[1:])
    x, delta = (torch.zeros(shape, dtype=torch.int32) for shape in (x_shape, y_shape))
    w = torch.ones(case.w_shape, dtype=torch.int32)
    assert tuple(field.forward(case.op, x, w, PRIME_25).shape) == y_shape
    assert tuple(field.grad_input(case.op, delta, w, x_shape, PRIME_25).shape) == x_shape
    assert torch.equal(field.grad_weight(case.op, x, delta, case.w_shape, PRIME_25), torch.zeros_like(w))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_grad_weight_stays_on_the_device_of_the_shares(case: Case):
    # The meta device stands for an accelerator: mixing it with tensors of the CPU fails in the same way.
    x, delta = (torch.zeros(shape, dtype=torch.int32, device="meta") for shape in (case.x_shape, case.y_shape))
    assert field.grad_weight(case.op, x, delta, case.w_shape, PRIME_25).device.type == "meta"


# --- large weights, block by block ------------------------------------------------------------------------------------
@pytest.mark.parametrize("prime", [PRIME_25, PRIME_28, None], ids=["2^25", "2^28", "real"])
@pytest.mark.parametrize("x_shape", [(3, 7), (2, 4, 7)], ids=["rows", "more axes"])
def test_blocks_give_what_the_whole_gives(prime: int | None, x_shape, monkeypatch):
    """5 output and 7 input channels, in blocks that do not divide them: exactly the same in the field."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        if prime is None:
            return torch.randn(shape, generator=generator)
        return torch.randint(prime, shape, generator=generator, dtype=torch.int32)

    op, x, w, delta = Linear(), draw(*x_shape), draw(5, 7), draw(*x_shape[:-1], 5)

    def results():
        return [
            either.forward(op, x, w, prime),
            either.grad_input(op, delta, w, x_shape, prime),
            either.grad_weight(op, x, delta, (5, 7), prime),
        ]

    whole = results()
    monkeypatch.setattr(linear, "BLOCK", 15)
    assert op.output_blocks((5, 7)) == (slice(0, 2), slice(2, 4), slice(4, 6))
    assert op.input_blocks((5, 7)) == (slice(0, 3), slice(3, 6), slice(6, 9))
    for found, expected in zip(results(), whole, strict=True):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected) if prime else torch.allclose(found, expected, atol=1e-6)


# --- misuse ---------------------------------------------------------------------------------------------------------
IMPOSSIBLE = {
    "unknown padding mode": (lambda: Conv.make((3,), padding=1, padding_mode="mirror"), "'mirror'.*reflect"),
    "unknown padding word": (lambda: Conv.make((3,), padding="full"), "'full'.*same.*valid"),
    "negative padding": (lambda: Padding(((1, -1),)), "not be negative"),
    "same with stride": (lambda: Conv.make((3, 3), padding="same", stride=(1, 2)), "stride 1 only"),
    "stride of zero": (lambda: Conv.make((3,), stride=0), "at least 1"),
    "no groups": (lambda: Conv.make((3,), groups=0), "at least 1"),
    "too many numbers": (lambda: Conv.make((3, 3), stride=(1, 2, 3)), "3 numbers.*2 spatial axes"),
    "four axes": (lambda: Conv.make((1, 1, 1, 1)), "1, 2 or 3 spatial axes"),
    "output padding as large as stride": (lambda: ConvTranspose.make((3,), stride=2, output_padding=2), "stride 2"),
    "negative output padding": (lambda: ConvTranspose.make((3,), stride=2, output_padding=-1), "at least 0"),
    # torch allows it; conv does not lead back from y's shape to x's, so it is refused rather than silently wrong.
    "output padding below dilation only": (
        lambda: ConvTranspose.make((3,), dilation=3, output_padding=2),
        "less than stride 1",
    ),
    "transposed, filled padding": (
        lambda: ConvTranspose(Conv.make((3,), padding=1, padding_mode="circular"), (0,)),
        "symmetric padding with zeros",
    ),
}


@pytest.mark.parametrize(("make", "says"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_arguments_are_refused_with_what_is_needed(make, says: str):
    with pytest.raises(OpError, match=says):
        make()


MISFITS = {
    "linear, other features": (Linear(), (4, 5), (3, 6), "needs .*in.*out, in"),
    "linear, one axis": (Linear(), (5,), (3, 5), "needs"),
    "linear, weight of one axis": (Linear(), (4, 5), (5,), "needs"),
    "conv, weight of one axis": (Conv.make((3,)), (2, 3, 8), (3,), "needs"),
    "conv, other channels": (Conv.make((3,)), (2, 3, 8), (4, 2, 3), "groups=1"),
    "conv, channels do not divide": (Conv.make((3,), groups=2), (2, 4, 8), (5, 2, 3), "divisible by groups"),
    "conv, missing axis": (Conv.make((3, 3)), (2, 3, 8), (4, 3, 3), "spatial"),
    "conv, kernel too large": (Conv.make((5,), padding=1), (2, 3, 2), (4, 3, 5), "does not fit"),
    "transposed, other channels": (ConvTranspose.make((3,)), (2, 3, 8), (2, 4, 3), "in, out / groups"),
    "transposed, channels do not divide": (ConvTranspose.make((3,), groups=2), (2, 3, 8), (3, 4, 3), "2 groups"),
    "transposed, nothing left": (ConvTranspose.make((1,), padding=3), (2, 3, 4), (3, 2, 1), "leaves nothing"),
}


@pytest.mark.parametrize(("op", "x_shape", "w_shape", "says"), MISFITS.values(), ids=MISFITS.keys())
def test_operands_that_do_not_fit_are_refused_in_every_pass(op, x_shape, w_shape, says: str):
    x, w = torch.zeros(x_shape), torch.zeros(w_shape)
    for attempt in (
        lambda: op.output_shape(x_shape, w_shape),
        lambda: op.forward(x, w),
        lambda: op.grad_input(x, w, x_shape),
        lambda: op.grad_weight(x, x, w_shape),
        lambda: field.forward(op, x, w, PRIME_25),
        lambda: field.grad_input(op, x, w, x_shape, PRIME_25),
        lambda: field.grad_weight(op, x, x, w_shape, PRIME_25),
    ):
        with pytest.raises(OpError, match=says):
            attempt()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
@pytest.mark.parametrize("kind", [Pass.GRAD_INPUT, Pass.GRAD_WEIGHT], ids=lambda kind: kind.value)
def test_a_gradient_of_another_shape_is_refused(case: Case, kind: Pass):
    x, w, delta = case.integers(bits=3)
    for wrong in (torch.cat([delta, delta]), delta[..., :-1], delta.unsqueeze(0)):
        with pytest.raises(OpError, match="does not belong"):
            case.run(kind, x, w, wrong)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_padding_wider_than_the_input_is_refused_in_every_pass(mode: str):
    op = Conv.make((3,), padding=4, padding_mode=mode)
    x, w, delta = torch.zeros(2, 1, 3), torch.zeros(2, 1, 3), torch.zeros(2, 2, 9)
    for attempt in (
        lambda: op.forward(x, w),
        lambda: op.grad_input(delta, w, (2, 1, 3)),
        lambda: op.grad_weight(x, delta, (2, 1, 3)),
    ):
        with pytest.raises(OpError, match=f"mode '{mode}'"):
            attempt()
