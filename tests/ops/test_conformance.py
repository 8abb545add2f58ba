"""One suite for every op of the registry: it is PyTorch's layer, bilinear, exact in F_p, and its projections agree."""

import pickle
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from darknight.coding import PRIME_25, PRIME_28
from darknight.errors import OpError
from darknight.ops import REGISTRY, Conv, collapse_rows, field, lookup
from darknight.types import Pass
from ops.cases import CASES, Case, exactly, integers

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning"),  # torch about its own speed
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
every_pass = pytest.mark.parametrize("kind", list(Pass), ids=lambda kind: kind.value)
both_primes = pytest.mark.parametrize("prime", [PRIME_25, PRIME_28], ids=["2^25", "2^28"])

REPS = 3


def test_every_op_of_the_registry_has_cases():
    assert {case.op.name for case in CASES} == set(REGISTRY)
    assert all(type(case.op) is lookup(case.op.name) for case in CASES)


def test_labels_are_unique():
    # Labels seed the generators and key the cache of product tables.
    assert len({case.label for case in CASES}) == len(CASES)


# --- it is PyTorch's layer ------------------------------------------------------------------------------------------
@every_case
def test_all_passes_equal_autograd_of_the_torch_module(case: Case):
    module, generator = case.module(), case.generator()
    x = torch.randn(case.x_shape, generator=generator, dtype=torch.float64, requires_grad=True)
    y = module(x)
    delta = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    grad_input, grad_weight = torch.autograd.grad(y, (x, module.weight), delta)

    values, weight = x.detach(), module.weight.detach()
    assert case.op.output_shape(case.x_shape, case.w_shape) == tuple(y.shape)
    for kind, expected in zip(Pass, (y.detach(), grad_input, grad_weight), strict=True):
        found = case.run(kind, values, weight, delta)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=lambda text, k=kind: f"{k}: {text}")


@every_case
@every_pass
def test_results_live_on_the_device_of_the_operands(case: Case, kind: Pass):
    # The meta device stands for an accelerator: mixing it with tensors of the CPU fails in the same way.
    x, w, delta = (tensor.to("meta") for tensor in case.integers(bits=3))
    assert case.run(kind, x, w, delta).device.type == "meta"


# --- bilinear -------------------------------------------------------------------------------------------------------
@every_case
@every_pass
def test_each_pass_is_linear_in_each_of_its_two_arguments(case: Case, kind: Pass):
    first, second = case.integers(bits=8, seed=1), case.integers(bits=8, seed=2)
    unused = {Pass.FORWARD: 2, Pass.GRAD_INPUT: 0, Pass.GRAD_WEIGHT: 1}[kind]
    for argument in {0, 1, 2} - {unused}:

        def at(value: Tensor, argument: int = argument) -> Tensor:
            operands = list(first)
            operands[argument] = value
            return case.run(kind, *operands)

        mixed = at(3 * first[argument] - 5 * second[argument])
        # Integers this small stay exact in float64, so the two sides are equal and not just close.
        assert torch.equal(mixed, 3 * at(first[argument]) - 5 * at(second[argument]))
        assert mixed.any()


# --- exact in F_p ---------------------------------------------------------------------------------------------------
def in_the_field(case: Case, kind: Pass, x: Tensor, w: Tensor, delta: Tensor, prime: int) -> Tensor:
    if kind is Pass.FORWARD:
        return field.forward(case.op, x, w, prime)
    if kind is Pass.GRAD_INPUT:
        return field.grad_input(case.op, delta, w, tuple(x.shape), prime)
    return field.grad_weight(case.op, x, delta, tuple(w.shape), prime)


def residues(shape: tuple[int, ...], prime: int, generator: torch.Generator) -> Tensor:
    """Uniform over [0, prime), as workers receive them."""
    return torch.randint(0, prime, shape, generator=generator, dtype=torch.int32)


def assert_exact(case: Case, kind: Pass, x: Tensor, w: Tensor, delta: Tensor, prime: int) -> None:
    found = in_the_field(case, kind, x, w, delta, prime)
    expected = exactly(case, kind, x, w, delta) % prime
    assert found.dtype == torch.int32
    assert found.shape == expected.shape
    assert np.array_equal(found.numpy(), expected.astype(np.int64))


@every_case
@both_primes
@every_pass
def test_shares_over_the_full_range_meet_ten_bit_weights_exactly(case: Case, kind: Pass, prime: int):
    generator = case.generator(3)
    x, delta = residues(case.x_shape, prime, generator), residues(case.y_shape, prime, generator)
    assert_exact(case, kind, x, integers(case.w_shape, 10, generator).to(torch.int32), delta, prime)


@every_case
@both_primes
@every_pass
def test_shares_over_the_full_range_meet_weights_over_the_full_range_exactly(case: Case, kind: Pass, prime: int):
    generator = case.generator(4)
    x, delta = residues(case.x_shape, prime, generator), residues(case.y_shape, prime, generator)
    signs = torch.randint(0, 2, case.w_shape, generator=generator, dtype=torch.int32).mul_(2).sub_(1)
    assert_exact(case, kind, x, residues(case.w_shape, prime, generator) * signs, delta, prime)


@every_case
@both_primes
@every_pass
def test_the_largest_values_of_one_sign_are_exact(case: Case, kind: Pass, prime: int):
    # Nothing cancels: every sum is as large as the op lets it become, so a fan or a copy counted too low would show.
    half, odd = prime // 2, prime - 2
    x, delta = (torch.full(shape, half, dtype=torch.int32) for shape in (case.x_shape, case.y_shape))
    assert_exact(case, kind, x, torch.full(case.w_shape, odd, dtype=torch.int32), delta, prime)


@every_case
def test_sums_never_outgrow_the_stated_bounds(case: Case):
    # Passes over |w| with ones on the other side measure the sums that fan_in, fan_out and positions promise to bound.
    _, w, _ = case.integers(bits=6)
    x, delta = torch.ones(case.x_shape, dtype=torch.float64), torch.ones(case.y_shape, dtype=torch.float64)
    assert case.run(Pass.FORWARD, x, w.abs(), delta).max() <= case.op.fan_in(w, case.x_shape)
    assert case.run(Pass.GRAD_INPUT, x, w.abs(), delta).max() <= case.op.fan_out(w, case.x_shape)
    products = case.run(Pass.GRAD_WEIGHT, x[:1], w, delta[:1]).max()
    assert products <= case.op.positions(case.x_shape, case.y_shape)


# --- projections ----------------------------------------------------------------------------------------------------
# The left sides are written here with plain sums, so that a mistake shared by both sides of the op cannot cancel.


def vectors(length: int, generator: torch.Generator) -> Tensor:
    return integers((REPS, length), 9, generator)


def by_channel(case: Case, tensor: Tensor) -> Tensor:
    """(row, channel, position); Linear's channels are the last axis, and every other axis makes rows."""
    return tensor.reshape(-1, tensor.shape[-1], 1) if case.op.name == "linear" else tensor.flatten(2)


def by_group(case: Case, w: Tensor) -> Tensor:
    """(group, out, in, tap), whichever of the two axes the op's weight has first."""
    groups = case.op.groups
    grouped = w.reshape(groups, w.shape[0] // groups, w.shape[1], -1)
    return grouped.transpose(1, 2) if case.op.name == "conv_transpose" else grouped


def channels(case: Case) -> tuple[int, int]:
    """(out, in), from the shapes of y and x."""
    axis = -1 if case.op.name == "linear" else 1
    return case.y_shape[axis], case.x_shape[axis]


def weighed(case: Case, tensor: Tensor, row_weights: Tensor, channel_weights: Tensor) -> Tensor:
    """sum over rows and channels -> (rep, position)."""
    return torch.einsum("rcp,kr,kc->kp", by_channel(case, tensor), row_weights, channel_weights)


def rows_summed(case: Case, tensor: Tensor, row_weights: Tensor) -> Tensor:
    """sum over rows -> (rep, channel, ...)."""
    rows = case.op.rows(tensor)
    return torch.einsum("rf,kr->kf", rows.flatten(1), row_weights).view(REPS, *rows.shape[1:])


def stacked(folded: Tensor) -> Tensor:
    """Two weights, (rep, 2, ...): one as it is, one times -7, so that their order shows."""
    return torch.stack([folded, -7 * folded], dim=1)


def assert_agree(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
    """Equal, element by element; the left sides have their positions flattened."""
    for left, right in zip(lefts, rights, strict=True):
        assert left.any()
        assert torch.equal(left, right.reshape(left.shape))


@every_case
def test_rows_have_the_shape_that_is_said(case: Case):
    for shape in (case.x_shape, case.op.output_shape(case.x_shape, case.w_shape)):
        assert tuple(case.op.rows(torch.empty(shape)).shape) == tuple(case.op.row_shape(shape))


@every_case
def test_weights_of_positions_grow_only_where_positions_are_repeated(case: Case):
    """A check takes the bits of what is drawn for those of what the op makes of it, unless it says that they repeat."""
    op, y_shape = case.op, case.op.output_shape(case.x_shape, case.w_shape)
    drawn = [torch.full((2, size), -(2.0**23), dtype=torch.float64) for size in op.row_shape(y_shape)[2:]]
    back = [torch.full((2, size), -(2.0**23), dtype=torch.float64) for size in op.row_shape(case.x_shape)[2:]]
    made = op.forward_positions(drawn, case.x_shape, case.w_shape)
    made += op.grad_input_positions(back, case.x_shape, case.w_shape)
    if not op.repeats_positions:
        assert all(float(each.abs().max()) <= 2.0**23 for each in made)


def test_a_border_that_repeats_positions_makes_their_weights_grow():
    op = Conv.make((3, 3), padding=1, padding_mode="replicate")
    assert op.repeats_positions
    drawn = [torch.full((2, size), 2.0**23, dtype=torch.float64) for size in (4, 4)]
    assert any(float(each.max()) > 2.0**23 for each in op.forward_positions(drawn, (1, 1, 4, 4), (1, 1, 3, 3)))


@every_case
def test_channels_are_counted_as_torch_does(case: Case):
    assert case.op.channels(case.w_shape) == channels(case)


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_forward_projected_on_both_sides_agrees(case: Case, seed: int):
    generator = case.generator(seed)
    x, w, _ = case.integers(bits=9, seed=seed)
    y = case.op.forward(x, w)
    u, v = vectors(channels(case)[0], generator), vectors(case.rows, generator)
    left = weighed(case, y, v, u)
    folded = stacked(case.op.fold_weight_output(w, u))
    right = case.op.project_forward(rows_summed(case, x, v), folded, case.y_shape)
    assert_agree([left, -7 * left], right.unbind(1))
    assert_agree([left], [collapse_rows(case.op.fold_channels(case.op.rows(y), u, 1), v)])


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_grad_input_projected_on_both_sides_agrees(case: Case, seed: int):
    generator = case.generator(seed)
    _, w, delta = case.integers(bits=9, seed=seed)
    gx = case.op.grad_input(delta, w, case.x_shape)
    u, v = vectors(channels(case)[1], generator), vectors(case.rows, generator)
    left = weighed(case, gx, v, u)
    folded = stacked(case.op.fold_weight_input(w, u))
    right = case.op.project_grad_input(rows_summed(case, delta, v), folded, case.x_shape)
    assert_agree([left, -7 * left], right.unbind(1))
    assert_agree([left], [collapse_rows(case.op.fold_channels(case.op.rows(gx), u, 1), v)])


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_grad_weight_projected_on_both_sides_agrees_in_each_group(case: Case, seed: int):
    generator = case.generator(seed)
    x, _, delta = case.integers(bits=9, seed=seed)
    gw = case.op.grad_weight(x, delta, case.w_shape)
    outs, ins = channels(case)
    u, v = vectors(outs, generator), vectors(ins, generator)
    grouped = by_group(case, gw)
    groups = case.op.groups
    left = torch.einsum("goct,kgo,kgc->gkt", grouped, u.view(REPS, groups, -1), v.view(REPS, groups, -1)).flatten(0, 1)
    right = case.op.project_grad_weight(
        case.op.fold_channels(case.op.rows(x), v, groups),
        case.op.fold_channels(case.op.rows(delta), u, groups),
        case.w_shape,
    )
    folded = case.op.contract_folded(case.op.fold_weight_output(gw, u), v)
    assert_agree([left, left], [right, folded])


@every_case
@pytest.mark.parametrize("seed", range(3))
def test_grad_weight_projected_on_its_outputs_alone_agrees(case: Case, seed: int):
    generator = case.generator(seed)
    x, _, delta = case.integers(bits=9, seed=seed)
    u = vectors(channels(case)[0], generator)
    gw = case.op.grad_weight(x, delta, case.w_shape)
    left = torch.einsum("goct,kgo->kgct", by_group(case, gw), u.view(REPS, case.op.groups, -1)).flatten(1)
    deltas = case.op.fold_channels(case.op.rows(delta), u, case.op.groups)
    right = case.op.project_grad_weight_inputs(case.op.rows(x), deltas, case.w_shape)
    assert_agree([left, left], [right.flatten(1), case.op.fold_weight_output(gw, u).flatten(1)])
    op, trimmed = case.op.trimmed(x, case.w_shape)
    assert torch.equal(op.project_grad_weight_inputs(op.rows(trimmed), deltas, case.w_shape), right)


@every_case
def test_a_pointwise_op_weighs_each_position_alone(case: Case):
    """Also those that are pointwise without the positions that no tap meets."""
    x, _, delta = case.integers(bits=9, seed=0)
    op, x = case.op.trimmed(x, case.w_shape)
    if not op.is_pointwise(case.w_shape):
        return
    groups, taps = op.groups, case.w_shape[2:]
    pairs = torch.einsum("ngop,ngcp->goc", *(each.unflatten(1, (groups, -1)).flatten(3) for each in (delta, x)))
    assert torch.equal(op.grad_weight(x, delta, case.w_shape), pairs.flatten(0, 1).view(case.w_shape))
    assert set(taps) == {1}


def test_what_is_pointwise_has_no_taps_steps_or_borders():
    assert Conv.make((1, 1), groups=2).is_pointwise((4, 3, 1, 1))
    assert not Conv.make((1, 2)).is_pointwise((4, 3, 1, 2))
    assert not Conv.make((1, 1), stride=2).is_pointwise((4, 3, 1, 1))
    borders = Conv.make((1,), stride=2, padding=1)  # three positions become three others
    assert borders.output_shape((2, 3, 3), (4, 3, 1)) == (2, 4, 3)
    assert not borders.is_pointwise((4, 3, 1))
    assert not borders.trimmed(torch.zeros(2, 3, 3), (4, 3, 1))[0].is_pointwise((4, 3, 1))


def test_a_convolution_remembers_a_few_shapes_and_stays_what_it_is():
    op, same = Conv.make((3,), stride=2, padding=1), Conv.make((3,), stride=2, padding=1)
    for size in [*range(1, 200), 1]:
        for _ in range(2):
            assert op.output_shape((2, 4, size), (6, 4, 3)) == (2, 6, (size + 1) // 2)
    for _ in range(2):
        with pytest.raises(OpError, match="input"):
            op.output_shape((2, 5, 7), (6, 4, 3))
    assert len(op._shapes) <= 64
    assert op == same
    assert hash(op) == hash(same)
    assert pickle.loads(pickle.dumps(op)) == same


GROUPED = [case for case in CASES if isinstance(case.op, Conv) and case.op.groups > 1]


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.label)
def test_a_plain_sum_over_output_channels_is_wrong_for_groups_and_the_identity_shows_it(case: Case):
    generator = case.generator()
    x, w, _ = case.integers(bits=9)
    u, v = vectors(channels(case)[0], generator), vectors(case.rows, generator)
    left = weighed(case, case.op.forward(x, w), v, u)

    def right(folded: Tensor) -> Tensor:
        inputs = rows_summed(case, x, v)
        return case.op.project_forward(inputs, folded.unsqueeze(1), case.y_shape)[:, 0].flatten(1)

    plain = torch.einsum("o...,ko->k...", w, u)  # forgets which group an output belongs to
    plain = plain.repeat(1, case.op.groups, *[1] * (w.dim() - 2))
    assert torch.equal(left, right(case.op.fold_weight_output(w, u)))
    assert not torch.equal(left, right(plain))


# --- the registry ---------------------------------------------------------------------------------------------------
def test_an_unknown_op_is_refused_with_the_known_ones():
    with pytest.raises(OpError, match="'pooling'") as refusal:
        lookup("pooling")
    assert all(name in str(refusal.value) for name in REGISTRY)
