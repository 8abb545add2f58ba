"""Batches in fixed point: the checksum that is found while they are masked is the one of reading them again."""

import pytest
import torch

import darknight as dk
from darknight.coding import draw_code
from darknight.kernels import compiled_field, masking, reference
from darknight.randomness import Randomness
from darknight.runtime import operand as operands
from darknight.runtime.operand import Operand

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = {
    "whole": [],
    "in two": [slice(0, 4), slice(4, 7)],
    "in four": [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)],
}
PASSES = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "reference"])


def masked(values, cuts) -> Operand:
    scheme, randomness = dk.Scheme(inputs=2, colluders=1), Randomness.from_operating_system()
    mixing = draw_code(scheme, randomness.fresh()).A
    operand = Operand(values, 7, float(values.abs().max()))
    for part in [operand.part(cut) for cut in cuts] or [operand]:
        part.shares(mixing, scheme.arithmetic.prime, randomness.fresh(), {})
    return operand


@PASSES
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_checksum_does_not_depend_on_how_it_was_found(compiled, cuts, dtype, monkeypatch):
    if not compiled:
        monkeypatch.setattr(masking, "chosen", lambda: None)
    values = torch.randn(7, 3, 500, dtype=dtype)
    expected = reference.checksum(reference.quantise_nearest(values, 7))
    assert masked(values, cuts).checksum == expected
    assert masked(values, cuts[:-1]).checksum == expected  # some were never masked
    assert Operand(values, 7, float(values.abs().max())).checksum == expected


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_what_was_masked_is_not_read_again(cuts, monkeypatch):
    if compiled_field.chosen() is None:
        pytest.skip("nothing was compiled")
    monkeypatch.setattr(operands, "checksum", lambda *_: pytest.fail("it was read once more"))
    values = torch.randn(7, 3, 500)
    operand = masked(values, cuts)
    values.zero_()  # it is of what was masked
    assert operand.checksum != 0


@pytest.mark.parametrize("first", [0, 4])
def test_a_share_is_made_again_only_if_it_is_the_same(first):
    """Two shares under one noise differ by what the data differ by."""
    scheme, randomness = dk.Scheme(inputs=2, colluders=1), Randomness.from_operating_system()
    mixing, prime, noise = draw_code(scheme, randomness.fresh()).A, scheme.arithmetic.prime, randomness.fresh()
    values = torch.randn(7, 3, 500)
    part = Operand(values, 7, float(values.abs().max())).part(slice(first, 7))
    shares = part.shares(mixing, prime, noise, {})
    assert torch.equal(part.share(mixing, prime, randomness.replay(noise.number), 1), shares[1])
    part._integers = None  # as if nobody had looked
    values[5, 1, 7] += 1.0
    if compiled_field.chosen() is None:
        pytest.skip("nothing was compiled: integers are kept")
    for _ in range(2):
        with pytest.raises(dk.errors.EncodingError, match="overwritten while workers computed"):
            part.share(mixing, prime, randomness.replay(noise.number), 1)
