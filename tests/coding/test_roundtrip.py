"""Encode, compute on shares, decode: the result is the plain one, for every code, size and set of answers."""

import gc
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coding.layer import plain, protected, quantised, relative_error
from darknight.coding import PRIME_25, PRIME_28, Field, Real, Scheme, draw_code, field, joined, real, virtual_batches
from darknight.coding.code import Code, Mixing
from darknight.errors import EncodingError, SchemeError
from darknight.ops import Conv, Linear
from darknight.ops import field as field_ops
from darknight.randomness import Randomness, uniform_below

GENERATOR = Randomness(bytes(31) + b"r")

schemes = st.builds(
    Scheme,
    inputs=st.integers(1, 5),
    colluders=st.integers(1, 3),
    spares=st.integers(0, 2),
    arithmetic=st.sampled_from([Field(PRIME_25), Field(PRIME_28)]),
    mask_gradients=st.booleans(),
    mixing=st.sampled_from(["systematic", "dense"]),
    training=st.booleans(),
)
batches = st.tuples(st.integers(1, 11), st.integers(1, 4), st.integers(1, 5))


def signed(shape, limit):
    return uniform_below(GENERATOR.fresh(), shape, 2 * limit + 1) - limit


@settings(deadline=None, max_examples=60)
@given(scheme=schemes, shape=batches, data=st.data())
def test_what_is_encoded_decodes_from_any_enough_answers(scheme, shape, data):
    prime = scheme.arithmetic.prime
    code = draw_code(scheme, GENERATOR.fresh())
    x = signed(shape, prime // 2)
    shares = field.encode(code.A, virtual_batches(x, scheme.inputs), prime, GENERATOR.fresh())
    assert shares.shape == (scheme.workers, -(-shape[0] // scheme.inputs), *shape[1:])
    assert shares.dtype == torch.int32
    assert int(shares.min()) >= 0
    assert int(shares.max()) < prime
    count = data.draw(st.integers(scheme.inputs + scheme.colluders, scheme.workers))
    answering = data.draw(st.permutations(range(scheme.workers)))[:count]
    decoded = field.decode(code.A, {j: shares[j] for j in answering}, prime)
    assert torch.equal(joined(decoded, shape[0]), x)


@settings(deadline=None, max_examples=40)
@given(scheme=schemes.filter(lambda scheme: scheme.training), shape=batches)
def test_all_three_passes_are_exact_in_the_field(scheme, shape):
    """Bit for bit the quantised arithmetic of one machine, whatever K, M, E, the mixing and the batch."""
    examples, rows, features = shape
    op = Linear()
    x = signed((examples, rows, features), 900).float()
    w, delta = signed((3, features), 900).float(), signed((examples, rows, 3), 500).float()
    found = protected(scheme, op, x, w, delta, GENERATOR)
    (xq, ex), (wq, ew), (dq, ed) = quantised(op, x, w, delta, scheme.arithmetic)
    wanted = plain(op, xq.double(), wq.double(), dq.double())
    assert torch.equal(found.y, (wanted.y * 2.0 ** -(ex + ew)).float())
    assert torch.equal(found.gx, (wanted.gx * 2.0 ** -(ed + ew)).float())
    assert torch.equal(found.gw, (wanted.gw * 2.0 ** -(ex + ed)).float())


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(inputs=3, colluders=1, spares=1, arithmetic=Real(2e4)),
        Scheme(inputs=2, colluders=2, spares=0, arithmetic=Real(2e4)),
        Scheme(inputs=4, colluders=1, spares=1, arithmetic=Real(2e4), mixing="dense"),
        Scheme(inputs=3, colluders=1, spares=2, arithmetic=Real(2e4), mask_gradients=False),
        Scheme(inputs=2, colluders=1, arithmetic=Real(1e3, 5e2, torch.float32), mask_gradients=False),
        Scheme.paper(),
    ],
    ids=lambda scheme: f"{scheme.mixing}-{scheme.inputs}-{scheme.colluders}-{scheme.arithmetic.dtype}",
)
def test_all_three_passes_are_close_in_the_reals(scheme):
    torch.manual_seed(0)
    op = Conv.make((3, 2), padding=1, stride=(1, 2))
    x, w = torch.rand(7, 4, 6, 5) * 2 - 1, torch.randn(3, 4, 3, 2)
    delta = torch.rand(op.output_shape(tuple(x.shape), tuple(w.shape))) * 2 - 1
    found, wanted = (
        protected(scheme, op, x, w, delta, GENERATOR, bounds=1.0),
        plain(op, x.double(), w.double(), delta.double()),
    )
    forward, gradient = (1e-8, 1e-3) if scheme.arithmetic.dtype == torch.float64 else (2e-2, 3e-2)
    assert relative_error(found.y, wanted.y) < forward
    assert relative_error(found.gx, wanted.gx) < max(forward, 1e-6)
    assert relative_error(found.gw, wanted.gw) < gradient


@settings(deadline=None, max_examples=20)
@given(missing=st.integers(0, 6), inputs=st.integers(1, 4))
def test_real_decoding_survives_a_missing_worker(missing, inputs):
    scheme = Scheme(inputs=inputs, colluders=1, spares=1, arithmetic=Real(2e4))
    code = draw_code(scheme, GENERATOR.fresh())
    x = signed((inputs, 8), 1000).double() / 1000
    grid = real.grid_for(code.A, scheme.arithmetic, 1.0)
    shares = real.encode(code.A, virtual_batches(x, inputs), grid, GENERATOR.fresh(), torch.float64)
    answers = {j: shares[j] for j in range(scheme.workers) if j != missing % scheme.workers}
    torch.testing.assert_close(joined(real.decode(code.A, answers), inputs), x, atol=1e-5, rtol=0)


def test_padding_rows_are_zeros_and_are_masked_like_the_rest():
    x = torch.arange(1, 22).view(7, 3)
    groups = virtual_batches(x, 4)
    assert groups.shape == (2, 4, 3)
    assert not groups[1, 3].any()
    assert torch.equal(joined(groups, 7), x)
    assert virtual_batches(x[:0], 4).shape == (0, 4, 3)
    code = draw_code(Scheme(inputs=4, colluders=1), GENERATOR.fresh())
    shares = field.encode(code.A, groups, PRIME_28, GENERATOR.fresh())
    assert len(torch.unique(shares[3, 1])) == 3  # the padding row's share is noise, not zeros


def test_random_padding_is_caught_by_the_weight_gradient(monkeypatch):
    """Padding rows of x and delta meet in the weight gradient: anything but zeros would be added to it."""

    def random_padding(batch, inputs):
        groups = virtual_batches(batch, inputs)
        padding = groups.flatten(0, 1)[len(batch) :]
        padding.copy_(signed(padding.shape, 900))
        return groups

    torch.manual_seed(0)
    x, w, delta = torch.randn(7, 5), torch.randn(3, 5), torch.randn(7, 3)
    wanted = plain(Linear(), x, w, delta).gw
    scheme = Scheme(inputs=4, colluders=1)
    assert relative_error(protected(scheme, Linear(), x, w, delta, GENERATOR).gw, wanted) < 0.01
    monkeypatch.setattr("coding.layer.virtual_batches", random_padding)
    assert relative_error(protected(scheme, Linear(), x, w, delta, GENERATOR).gw, wanted) > 0.01


def test_a_transposed_matrix_is_caught():
    """In the paper's square setting a transposed A passes every shape check; decoding shows it."""
    scheme = Scheme(inputs=2, colluders=1, mixing="dense", mask_gradients=False)
    code = draw_code(scheme, GENERATOR.fresh())
    assert code.A.workers == 3  # square: three workers, three sources
    columns = tuple(zip(*code.A.rows, strict=True))
    mistake = Mixing(tuple(row[:2] for row in columns), tuple(row[2:] for row in columns), code.A.base)
    x = signed((6, 4), 1000)
    for mixing, right in ((code.A, True), (mistake, False)):
        shares = field.encode(mixing, virtual_batches(x, 2), PRIME_28, GENERATOR.fresh())
        decoded = joined(field.decode(code.A, dict(enumerate(shares)), PRIME_28), 6)
        assert torch.equal(decoded, x) is right


def test_answers_of_different_shapes_are_refused():
    """A smaller answer would be broadcast and decode to something."""
    code = draw_code(Scheme(inputs=3, colluders=1), GENERATOR.fresh())
    shares = dict(enumerate(field.encode(code.A, signed((2, 3, 4), 100), PRIME_28, GENERATOR.fresh())))
    shares[1] = shares[1][:, :1]
    for decode in (lambda: field.decode(code.A, shares, PRIME_28), lambda: field.decode_gradient(code, shares)):
        with pytest.raises(EncodingError, match="needs one shape"):
            decode()
    with pytest.raises(EncodingError, match="needs one shape"):
        real.decode(code.A, shares)


@pytest.mark.parametrize(
    ("inputs", "spares"), [(6, 8), (150, 3), pytest.param(700, 3, marks=pytest.mark.full), (2, 12)]
)
def test_spares_with_large_powers_still_decode(inputs, spares):
    """Coefficients are residues: the powers of the spare rows would not fit the kernels as they are."""
    code = draw_code(Scheme(inputs=inputs, colluders=1, spares=spares), GENERATOR.fresh())
    assert all(abs(value) <= PRIME_28 // 2 for mixing in code.masking for row in mixing.rows for value in row)
    x = signed((inputs, 3), 1000)
    for mixing in code.masking:
        shares = field.encode(mixing, virtual_batches(x, inputs), PRIME_28, GENERATOR.fresh())
        last = range(mixing.workers - inputs - 1, mixing.workers)
        assert torch.equal(joined(field.decode(mixing, {j: shares[j] for j in last}, PRIME_28), inputs), x)


def test_inputs_that_require_a_gradient_are_encoded_as_they_are():
    scheme = Scheme(inputs=2, colluders=1, arithmetic=Real(2e4))
    code = draw_code(scheme, GENERATOR.fresh())
    x = torch.rand(1, 2, 3, requires_grad=True)
    shares = real.encode(code.A, x, real.grid_for(code.A, scheme.arithmetic, 1.0), GENERATOR.fresh(), torch.float64)
    assert not shares.requires_grad


def test_one_lost_share_of_a_weight_gradient_shows():
    scheme = Scheme(inputs=3, colluders=1)
    code = draw_code(scheme, GENERATOR.fresh())
    shares = field.encode(code.A, virtual_batches(signed((6, 4), 1000), 3), PRIME_28, GENERATOR.fresh())
    answers = {j: field_ops.grad_weight(Linear(), shares[j], shares[j], (4, 4), PRIME_28) for j in range(4)}
    with pytest.raises(KeyError):  # there is no redundancy: nothing stands in for the fifth
        field.decode_gradient(code, answers)


def calls_of(function) -> int:
    """How many Python and C functions are called; the fewest of three runs, without what garbage collection calls."""

    def counted() -> int:
        seen: Counter[str] = Counter()

        def profile(frame, event, argument):
            if event in ("call", "c_call"):
                seen[event] += 1

        sys.setprofile(profile)
        try:
            function()
        finally:
            sys.setprofile(None)
        return sum(seen.values())

    gc.disable()
    try:
        return min(counted() for _ in range(3))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(inputs=4, colluders=1),
        Scheme(inputs=4, colluders=2, mixing="dense"),
        Scheme(inputs=4, colluders=1, arithmetic=Real(2e4)),
        Scheme.paper(),
    ],
    ids=["systematic", "dense", "real", "paper"],
)
def test_the_number_of_calls_does_not_grow_with_the_batch(scheme):
    """Encoding and decoding are batched over virtual batches: no Python loop over examples."""
    code: Code = draw_code(scheme, GENERATOR.fresh())

    def call(x: torch.Tensor) -> None:
        groups = virtual_batches(x, scheme.inputs)
        if isinstance(scheme.arithmetic, Field):
            shares = field.encode(code.A, groups, scheme.arithmetic.prime, GENERATOR.fresh())
            joined(field.decode(code.A, dict(enumerate(shares)), scheme.arithmetic.prime), len(x))
            field.decode_gradient(code, dict(enumerate(shares)))
        else:
            grid = real.grid_for(code.A, scheme.arithmetic, 1e3)
            shares = real.encode(code.A, groups, grid, GENERATOR.fresh(), torch.float64)
            joined(real.decode(code.A, dict(enumerate(shares))), len(x))
            real.decode_gradient(code, dict(enumerate(shares)))

    small, large = (signed((examples, 3, 4), 900) for examples in (8, 256))
    call(large)  # buffers that are kept grow once
    assert calls_of(lambda: call(small)) == calls_of(lambda: call(large))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.5])
def test_values_that_real_cannot_mask_are_refused(value):
    scheme = Scheme(inputs=2, colluders=1, arithmetic=Real(2e4))
    code = draw_code(scheme, GENERATOR.fresh())
    grid = real.grid_for(code.A, scheme.arithmetic, 1.0)
    with pytest.raises(EncodingError, match="declared bound 1"):
        real.encode(code.A, torch.tensor([[[0.5], [value]]]), grid, GENERATOR.fresh(), torch.float64)
    for bound in (0.0, -1.0, 1e60, 1e-310, value):
        with pytest.raises(EncodingError, match="bound"):
            real.grid_for(code.A, scheme.arithmetic, bound)


@pytest.mark.parametrize("noise_std", [1.0, 2e4, 4.8e5, 1.95e6, 3.9e6, 4e6])
@pytest.mark.parametrize("inputs", [1, 4])
def test_every_noise_that_constructs_can_be_drawn(noise_std, inputs):
    scheme = Scheme(inputs=inputs, colluders=1, arithmetic=Real(noise_std), training=False)
    code = draw_code(scheme, GENERATOR.fresh())
    for bound in (1.0, 1.999999, 2.0**-60):
        grid = real.grid_for(code.A, scheme.arithmetic, bound)
        x = torch.full((1, inputs, 5), bound, dtype=torch.float64)
        shares = real.encode(code.A, x, grid, GENERATOR.fresh(), torch.float64)
        error = (real.decode(code.A, dict(enumerate(shares))) - x).abs().max() / bound
        assert error < max(2.0**-39, noise_std * 2.0**-44)  # the grid's step, or what float64 leaves beside the noise


def test_an_inference_code_has_no_carriers_of_s():
    scheme = Scheme(inputs=3, colluders=2, spares=1)
    assert draw_code(scheme, GENERATOR.fresh()).A.workers == 8
    assert draw_code(scheme.for_inference(), GENERATOR.fresh()).A.workers == 6
    with pytest.raises(SchemeError, match="spares"):
        replace(Scheme(inputs=3, colluders=1, integrity="parity"), training=False)
