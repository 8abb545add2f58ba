"""The paper's equations, one by one, and the shipped vectors."""

import json
from pathlib import Path

import pytest
import torch

from darknight.coding import PRIME_25, PRIME_28, Real, Scheme, draw_code, field, real, virtual_batches
from darknight.coding.algebra import parity_check
from darknight.coding.fixed_point import exponent_for, largest_magnitude
from darknight.coding.systematic import field_systematic, real_systematic
from darknight.errors import EncodingError
from darknight.kernels import dequantise, quantise_nearest, quantise_stochastic
from darknight.ops import Linear
from darknight.ops import field as field_ops
from darknight.randomness import Randomness, grid_gaussian, rounding_of, uniform_below, words_of

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
GENERATOR = Randomness(bytes(31) + b"e")
SCHEMES = [
    Scheme(inputs=3, colluders=1, spares=1),
    Scheme(inputs=2, colluders=2, mixing="dense"),
    Scheme(inputs=3, colluders=1, mask_gradients=False),
    Scheme(inputs=2, colluders=1, spares=1, mixing="dense", mask_gradients=False),
]


def times(rows, sources, prime):
    """A matrix of Python integers times a list of integer tensors, the slow and obvious way."""
    return [
        sum(int(c) * source.to(torch.int64) for c, source in zip(row, sources, strict=True)).remainder(prime)
        for row in rows
    ]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_eq_2_shares_are_the_matrix_times_the_sources(scheme):
    prime = scheme.arithmetic.prime
    code = draw_code(scheme, GENERATOR.fresh())
    x = uniform_below(GENERATOR.fresh(), (scheme.inputs * 2, 5), 2001) - 1000
    groups = virtual_batches(x, scheme.inputs)
    stream = GENERATOR.fresh()
    shares = field.encode(code.A, groups, prime, stream)
    branches = GENERATOR.replay(stream.number).branches(scheme.colluders)
    noise = [uniform_below(branch, (2, 5), prime) for branch in branches]
    wanted = times(code.A.rows, [*groups.unbind(1), *noise], prime)
    assert torch.equal(shares.to(torch.int64), torch.stack(wanted))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_eq_4_to_6_the_answers_add_up_to_the_gradient(scheme):
    """Every worker multiplies its share of x with its combination of the deltas; the sum is the batch's gradient."""
    prime, K = scheme.arithmetic.prime, scheme.inputs
    code = draw_code(scheme, GENERATOR.fresh())
    x = uniform_below(GENERATOR.fresh(), (2 * K, 4), 201) - 100
    delta = uniform_below(GENERATOR.fresh(), (2 * K, 3), 201) - 100
    shares = field.encode(code.A, virtual_batches(x, K), prime, GENERATOR.fresh())
    groups = virtual_batches(delta, K)
    if code.masks_gradients:
        combined = field.encode(code.B, groups, prime, GENERATOR.fresh())
    else:
        combined = [field_ops.combine_clear([int(v) for v in row], groups, prime) for row in code.B.data]
    equations = {
        j: field_ops.grad_weight(Linear(), shares[j], combined[j], (3, 4), prime) for j in range(scheme.workers)
    }
    wanted = (delta.double().t() @ x.double()).to(torch.int32)
    assert torch.equal(field.decode_gradient(code, equations), wanted)
    wrong = {**equations, code.grad_rows[-1]: equations[code.grad_rows[-1]] + 1}
    assert not torch.equal(field.decode_gradient(code, wrong), wanted)


def test_eq_1_a_step_with_the_decoded_gradient_is_the_plain_step():
    """W - lr * mean of <delta_i, x_i>: the loss averages, so the deltas carry the 1/K and the decoding is a sum."""
    code = field_systematic(4, 1, 0, PRIME_28, True)
    torch.manual_seed(0)
    x, w = torch.randint(-50, 50, (4, 5)), torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    target = torch.randint(-50, 50, (4, 3)).double()
    ((x.double() @ w.t() * target).sum(1).mean()).backward()
    plain = w.detach() - 0.1 * w.grad
    shares = field.encode(code.A, virtual_batches(x, 4), PRIME_28, GENERATOR.fresh())
    masked = field.encode(code.B, virtual_batches(target.long(), 4), PRIME_28, GENERATOR.fresh())
    answers = {j: field_ops.grad_weight(Linear(), shares[j], masked[j], (3, 5), PRIME_28) for j in code.grad_rows}
    private = w.detach() - 0.1 * field.decode_gradient(code, answers).double() / 4
    torch.testing.assert_close(private, plain, rtol=0, atol=1e-12)


def test_display_8_real_shares_are_data_plus_noise():
    code = real_systematic(3, 1, 0, True)
    grid = real.grid_for(code.A, Real(50.0), 1.0)
    x = torch.tensor([[[0.5, -0.25], [1.0, 0.125], [-1.0, 0.75]]], dtype=torch.float64)
    stream = GENERATOR.fresh()
    shares = real.encode(code.A, x, grid, stream, torch.float64)
    noise = (
        grid_gaussian(GENERATOR.replay(stream.number), (1, 1, 2), grid.std, grid.mean)[0].double() * 2.0**-grid.exponent
    )
    data = torch.tensor([[float(v) for v in row] for row in code.A.data], dtype=torch.float64)
    flat = torch.tensor([row[0] for row in code.A.noise], dtype=torch.float64)
    wanted = torch.einsum("wi,gif->wgf", data, x) + flat[:, None, None] * noise
    steps = (shares - wanted).abs().max() * 2.0**grid.exponent
    assert steps <= max(abs(v) for row in code.A.noise for v in row)  # the uniform fraction, times the coefficient


def test_a_redundant_share_shows_one_wrong_answer():
    """The paper's integrity: one answer more gives a parity equation. One liar breaks it; all together do not."""
    code = field_systematic(3, 1, 1, PRIME_25, False)
    check = parity_check([[int(v) for v in row] for row in code.A.rows], code.A.base, PRIME_25)
    x = uniform_below(GENERATOR.fresh(), (3, 6), 1000)
    shares = field.encode(code.A, virtual_batches(x, 3), PRIME_25, GENERATOR.fresh())
    columns = list(zip(*check, strict=True))
    assert not any(syndrome.any() for syndrome in times(columns, list(shares), PRIME_25))
    for liar in range(5):
        wrong = shares.clone()
        wrong[liar, 0, 0] += 1
        assert any(syndrome.any() for syndrome in times(columns, list(wrong), PRIME_25))
    all_wrong_together = [share * 2 % PRIME_25 for share in shares]  # the same altered weights everywhere
    assert not any(syndrome.any() for syndrome in times(columns, all_wrong_together, PRIME_25))


@pytest.mark.parametrize("vector", VECTORS["shares_field"], ids=lambda vector: vector["comment"])
def test_share_vectors(vector):
    code = field_systematic(vector["inputs"], vector["colluders"], vector["spares"], vector["prime"], True)
    rows = (code.A if "x" in vector else code.B).rows
    sources = [torch.tensor(v) for v in [*vector.get("x", vector.get("delta")), *vector.get("r", vector.get("s"))]]
    assert [int(share) for share in times(rows, sources, vector["prime"])] == vector["shares"]


@pytest.mark.parametrize("vector", VECTORS["coefficients_field"], ids=str)
def test_drawn_coefficients_never_change(vector):
    """Public constants: a change would be a new code, and needs a new version in their seed."""
    code = field_systematic(vector["inputs"], vector["colluders"], vector["spares"], PRIME_28, True)
    assert list(code.A.noise[0]) == vector["first_noise_row_of_A"]


@pytest.mark.parametrize("vector", VECTORS["quantise"], ids=str)
def test_quantisation_vectors(vector):
    values = torch.tensor(vector["values"])
    exponent = exponent_for(largest_magnitude(values), vector["bits"])
    assert exponent == vector["exponent"]
    assert quantise_nearest(values, exponent).tolist() == vector["integers"]


def test_stochastic_rounding_is_unbiased_and_reproducible():
    values = torch.full((200_000,), 0.3)
    index = {"seed": 1, "layer": "conv1", "call": 7, "kind": "delta"}
    rounded = quantise_stochastic(values, 0, words_of(rounding_of(**index), values.shape))
    assert set(rounded.unique().tolist()) == {0, 1}
    assert abs(float(rounded.float().mean()) - 0.3) < 0.005
    assert torch.equal(rounded, quantise_stochastic(values, 0, words_of(rounding_of(**index), values.shape)))
    nearest = quantise_nearest(values, 0)
    assert abs(float(nearest.float().mean()) - 0.3) > 0.2  # what the test would see of biased rounding


def test_stochastic_rounding_keeps_integers():
    """floor(v + u) in float32 would round up now and then: v + u is rounded before it is cut."""
    values = torch.full((1 << 20,), 1000.0)
    index = {"seed": 1, "layer": "conv1", "call": 7, "kind": "delta"}
    words = words_of(rounding_of(**index), values.shape)
    assert torch.equal(quantise_stochastic(values, 0, words), values.to(torch.int32))
    uniforms = words.bitwise_and(2**24 - 1) * 2.0**-24
    assert not torch.equal((values + uniforms).floor(), values)  # the mistake shows at this count


def test_scales_beyond_float32_neither_saturate_nor_vanish():
    with pytest.raises(EncodingError, match=r"2\^120"):
        exponent_for(1e60, 10)
    assert dequantise(torch.tensor([0, 1]), -140, torch.float32).tolist() == [0.0, float("inf")]
    assert dequantise(torch.tensor([2**27]), 155, torch.float32).item() == 2.0**-128
    assert dequantise(torch.tensor([3]), -2, torch.float64).item() == 12.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_without_a_magnitude_are_refused(value):
    with pytest.raises(EncodingError, match="NaN or infinite"):
        largest_magnitude(torch.tensor([1.0, value]))


def test_quantising_leaves_its_input_alone():
    values = torch.randn(100)
    kept = values.clone()
    (
        largest_magnitude(values),
        quantise_nearest(values, 3),
        quantise_stochastic(values, 3, torch.arange(100, dtype=torch.int32)),
    )
    assert torch.equal(values, kept)
