"""Masking and fixed point by the compiled library where there is one, else by the reference, with the same results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from darknight.kernels import compiled_field, compiled_unmasking, compiled_weights, reference
from darknight.kernels.compiled_field import Form, Range, chosen
from darknight.kernels.compiled_layers import Affine, Limits
from darknight.kernels.compiled_unmasking import Weighing
from darknight.kernels.reference import Requantised, Rounding

_EXPONENTS = 90  # beyond, the reference takes float64


class Encoded(NamedTuple):
    """What is left of values that were masked. checksum: what they add to that of a batch (see reference.checksum)."""

    quantised: Tensor | None
    checksum: int | None = None


def combine(
    matrix: Sequence[Sequence[int]],
    sources: Sequence[Tensor],
    prime: int,
    *,
    out: Tensor,
    centred: bool,
    ranges: Sequence[Range] | None = None,
) -> Tensor:
    """As reference.combine. ranges: the least and largest value of each source; without, any below the prime."""
    library = chosen()
    if library is None or not compiled_field.combine(
        library, _form(matrix, len(sources), prime, centred, ranges), sources, list(out)
    ):
        reference.combine(matrix, sources, prime, out=out, centred=centred)
    return out


def unmask(
    matrix: Sequence[Sequence[int]],
    sources: Sequence[Tensor],
    prime: int,
    exponent: int,
    *,
    out: Tensor,
    floats: Tensor,
) -> list[int]:
    """As reference.unmask."""
    library, residues = chosen(), ((0, prime - 1),) * len(sources)
    if library is not None and abs(exponent) <= _EXPONENTS:
        form = _form(matrix, len(sources), prime, True, residues)
        outside = compiled_field.unmask(library, form, sources, list(out), list(floats), 2.0**-exponent)
        if outside is not None:
            return outside
    return reference.unmask(matrix, sources, prime, exponent, out=out, floats=floats)


def unmask_weighed(
    matrix: Sequence[Sequence[int]],
    sources: Sequence[Tensor],
    prime: int,
    exponent: int,
    *,
    floats: Tensor,
    weighing: Weighing,
    bias: Tensor | None = None,
    limits: Limits | None = None,
    scaling: Affine | None = None,
) -> tuple[list[int], Tensor] | None:
    """As `unmask`, of sources (group, ...), into floats (example, ...) and no integers; but these are weighed.

    The floats are then finished: a bias of each channel is added, they are scaled, and cut to limits.

    Returns the places too, and what residues.weigh_rows gives for the integers: (modulus, rep, position). None where
    nothing was compiled for these operands.

    Guarantees: as `reference.unmask`: a source is read once, and what was read is what is looked at, combined and
        weighed (contract test: tests/kernels/test_read_once.py).
    """
    function = compiled_unmasking.chosen()
    if function is None or abs(exponent) > _EXPONENTS:
        return None
    form = _form(matrix, len(sources), prime, True, ((0, prime - 1),) * len(sources))
    return compiled_unmasking.unmask(function, form, sources, floats, 2.0**-exponent, weighing, bias, limits, scaling)


def encode(
    values: Tensor,
    exponent: int,
    rounding: Rounding | None,
    matrix: Sequence[Sequence[int]],
    noise: Tensor,
    prime: int,
    *,
    inputs: int,
    largest: int,
    outs: Sequence[Tensor | None],
    keep: bool = True,
    row: int | None = None,
) -> Encoded:
    """As reference.encode. largest: of the quantised values' magnitudes. Unless `keep`, they may be left out.

    row: where the examples stand in a batch whose checksum is wanted. It is left out where nothing was compiled.

    Guarantees: an out is written to once, with what it is in the end, and never read: who sees it while it is written
        sees nothing else (contract test: tests/kernels/test_written_once.py).
    """
    library = chosen()
    if library is not None:
        reach = _rounded_up(largest, prime)
        ranges = ((-reach, reach),) * inputs + ((0, prime - 1),) * noise.shape[0]
        form = _form(matrix, len(ranges), prime, False, ranges)
        quantised = torch.empty(values.shape, dtype=torch.int32) if keep else None
        weights = None if row is None or rounding is not None else _weights()
        scale = 2.0**exponent
        checksum = compiled_field.encode(
            library, form, values, scale, rounding, inputs, noise, outs, quantised, weights, row or 0
        )
        if checksum is not None:
            return Encoded(quantised, None if weights is None else checksum)
    return Encoded(reference.encode(values, exponent, rounding, matrix, noise, prime, inputs=inputs, outs=outs))


def quantise_nearest(values: Tensor, exponent: int) -> Tensor:
    """As reference.quantise_nearest."""
    library = chosen()
    found = None if library is None else compiled_field.quantise(library, values, 2.0**exponent, None)
    return reference.quantise_nearest(values, exponent) if found is None else found


def quantise_stochastic(values: Tensor, exponent: int, words: Tensor) -> Tensor:
    """As reference.quantise_stochastic."""
    library = chosen()
    found = None if library is None else compiled_field.quantise(library, values, 2.0**exponent, words)
    return reference.quantise_stochastic(values, exponent, words) if found is None else found


def rounding_words(count: int, rounding: Rounding) -> Tensor:
    """As reference.rounding_words."""
    library = chosen()
    if library is None:
        return reference.rounding_words(count, rounding)
    return compiled_field.rounding_words(library, count, rounding)


def largest_magnitude(values: Tensor) -> float:
    """As reference.largest_magnitude."""
    library = chosen()
    found = None if library is None else compiled_field.largest(library, values)
    return reference.largest_magnitude(values) if found is None else found


def unchanged(values: Tensor, exponent: int, quantised: Tensor) -> float:
    """As reference.unchanged."""
    library = chosen()
    found = None if library is None else compiled_field.unchanged(library, values, 2.0**exponent, quantised)
    return reference.unchanged(values, exponent, quantised) if found is None else found


def requantise(
    values: Tensor, exponent: int, bits: int, *, counted: bool, earlier: Tensor | None
) -> Requantised | None:
    """As reference.requantise."""
    function, does = compiled_weights.chosen(), reference.requantise
    if function is not None and compiled_weights.suits(values, exponent, bits, earlier):
        does = partial(compiled_weights.requantise, function)
    return does(values, exponent, bits, counted=counted, earlier=earlier)


def cut_words(words: Tensor, mask: int, last: int) -> Tensor:
    """As reference.cut_words."""
    library = chosen()
    found = None if library is None else compiled_field.below(library, words, mask, last)
    return reference.cut_words(words, mask, last) if found is None else found


def moments(values: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """As reference.moments."""
    library = chosen()
    found = None if library is None else compiled_field.moments(library, values, 2.0**exponent)
    return reference.moments(values, exponent) if found is None else found[1]


def survey(values: Tensor, exponent: int) -> tuple[float, tuple[Tensor, Tensor] | None]:
    """As reference.survey."""
    library, floats = chosen(), values.is_floating_point()
    found = compiled_field.moments(library, values, 2.0**exponent) if library is not None and floats else None
    if found is None:
        return reference.survey(values, exponent)
    largest, made = found
    return largest, made if reference.countable(largest, exponent) else None


def checksum(values: Tensor, exponent: int | None = None) -> int:
    """As reference.checksum, of integers; or of round(values * 2^exponent)."""
    library = chosen()
    found = None if library is None else compiled_field.checksum(library, values, exponent, _weights())
    if found is None:
        found = reference.checksum(values if exponent is None else reference.quantise_nearest(values, exponent))
    return found


@cache
def _weights() -> Tensor:
    return reference.checksum_weights().to(torch.uint32)


def _form(
    matrix: Sequence[Sequence[int]], sources: int, prime: int, centred: bool, ranges: Sequence[Range] | None
) -> Form:
    known = ((-prime, prime),) * sources if ranges is None else tuple(ranges)
    return _known_form(tuple(map(tuple, matrix)), known, prime, centred)


_known_form = lru_cache(maxsize=256)(Form)  # not all: a code that is drawn for each call brings new ones


def _rounded_up(largest: int, prime: int) -> int:
    """The next power of two, so that batches of one scale have one form; what is too large for the field stays so."""
    return largest if largest >= prime else min(prime, 1 << (largest - 1).bit_length())
