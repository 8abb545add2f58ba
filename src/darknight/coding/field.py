"""Masking in F_p: encode, decode, and the weight gradient.

Guarantees: the joint distribution of the shares of any M workers, of x and of delta, is uniform and the same for all
    data (contract test: tests/coding/test_privacy_exact.py).
Assumes: the noise is uniform, fresh and used once; every M x M minor of the noise blocks is non-zero (verified when the
    code is built); decoded results are verified before anything depends on them.
Leaks: shapes; and, to M+1 or more pooled shares, the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from darknight.coding.algebra import IntMatrix
from darknight.coding.batches import group_count, joined, without_padding
from darknight.coding.code import Code, Mixing, decoder, same_shape
from darknight.coding.finish import Finish
from darknight.coding.shares import MaskedShares
from darknight.kernels import Encoded, Rounding, Weighing, are_residues, combine, unmask, unmask_weighed
from darknight.kernels import encode as encode_and_mask
from darknight.randomness import Branch, Stream, uniform_below
from darknight.types import Seed

_NO_ROOMS: Mapping[int, Tensor] = MappingProxyType({})


class NotResidues(Exception):  # noqa: N818 - an event; who decodes knows whom to blame
    """Answers that no honest worker can have given: `workers` gave numbers outside the field. Nothing was decoded."""

    def __init__(self, workers: Sequence[int]) -> None:
        super().__init__(f"answers of {len(workers)} workers have numbers outside the field.")
        self.workers = tuple(workers)


def encode(mixing: Mixing, groups: Tensor, prime: int, stream: Stream, *, rows: Sequence[int] | None = None) -> Tensor:
    """Shares xbar = A [x; r] (Eq. 2): quantised (group, input, *feature) -> (worker, group, *feature), in [0, prime).

    `groups` are integers of magnitude below the prime; the noise comes from `stream`. rows: only these workers' shares,
    in this order.
    """
    noise, _ = _noise(mixing, (groups.shape[0], *groups.shape[2:]), prime, stream)
    return _combined(mixing, range(mixing.workers) if rows is None else rows, groups, noise, prime)


def encode_shares(mixing: Mixing, groups: Tensor, prime: int, stream: Stream) -> MaskedShares:
    """The same for all workers, with the seeds of those whose share is a noise row."""
    noise, seeds = _noise(mixing, (groups.shape[0], *groups.shape[2:]), prime, stream)
    others = [worker for worker in range(mixing.workers) if worker not in seeds]
    made = dict(zip(others, _combined(mixing, others, groups, noise, prime), strict=True))
    shares = [_share(mixing, worker, noise) if worker in seeds else made[worker] for worker in range(mixing.workers)]
    return MaskedShares(shares, seeds)


def encode_values(
    mixing: Mixing,
    values: Tensor,
    exponent: int,
    rounding: Rounding | None,
    *,
    largest: int,
    prime: int,
    stream: Stream,
    keep: bool = True,
    row: int | None = None,
    rooms: Mapping[int, Tensor] = _NO_ROOMS,
) -> tuple[MaskedShares, Encoded]:
    """The same from floats (example, *feature), in one pass: the shares (group, *feature), and the quantised values.

    rounding: None for the nearest. largest: of the quantised values' magnitudes. Unless `keep`, the
    quantised values may be left out. row: if a checksum is wanted (see kernels.encode). rooms: by worker, memory for
    its share (group, *feature), which is written once.
    """
    shape = (group_count(values.shape[0], mixing.inputs), *values.shape[1:])
    noise, seeds = _noise(mixing, shape, prime, stream)
    places: list[Tensor | None] = [rooms.get(worker) for worker in range(mixing.workers)]
    for worker, room in enumerate(places):
        if worker in seeds:
            places[worker] = None
        elif room is None:
            places[worker] = torch.empty(shape, dtype=torch.int32)
    encoded = encode_and_mask(
        values,
        exponent,
        rounding,
        mixing.integers,
        noise,
        prime,
        inputs=mixing.inputs,
        largest=largest,
        outs=places,
        keep=keep,
        row=row,
    )
    shares = [_share(mixing, worker, noise) if place is None else place for worker, place in enumerate(places)]
    return MaskedShares(shares, seeds), encoded


def _noise(mixing: Mixing, shape: tuple[int, ...], prime: int, stream: Stream) -> tuple[Tensor, dict[int, Seed]]:
    """(noise row, group, *feature), each row from a key of its own; and that key, by the worker whose share it is."""
    branches = stream.branches(mixing.colluders)
    noise = torch.empty(mixing.colluders, *shape, dtype=torch.int32)
    for row, branch in enumerate(branches):
        uniform_below(branch, shape, prime, out=noise[row])
    return noise, {worker: _seed(branches[row], prime) for worker, row in mixing.carriers.items()}


def _seed(branch: Branch, prime: int) -> Seed:
    return Seed(key=branch.key, prime=prime)


def _share(mixing: Mixing, worker: int, noise: Tensor) -> Tensor:
    """The noise row that the worker's share is."""
    return noise[mixing.carriers[worker]]


def _combined(mixing: Mixing, rows: Sequence[int], groups: Tensor, noise: Tensor, prime: int) -> Tensor:
    shares = torch.empty(len(rows), groups.shape[0], *groups.shape[2:], dtype=torch.int32)
    matrix = [mixing.integers[row] for row in rows]
    return combine(matrix, [*groups.unbind(1), *noise], prime, out=shares, centred=False)


def decode(mixing: Mixing, replies: Mapping[int, Tensor], prime: int) -> Tensor:
    """y = L ybar (Eq. 3): answers (group, *feature) by worker -> centred integers (group, input, *feature), int32."""
    _, matrix, answers, results = _decoding(mixing, replies, prime)
    ranges = ((0, prime - 1),) * len(answers)
    combine(matrix, answers, prime, out=results.transpose(0, 1), centred=True, ranges=ranges)
    return results


def decode_values(
    mixing: Mixing,
    replies: Mapping[int, Tensor],
    prime: int,
    exponent: int,
    examples: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for so many examples (example, *feature), and beside it times 2^-exponent, as float32, in one pass.

    The floats are no view of anything: a layer gives them away, and what follows it may write to them. Each answer is
    read once (`kernels.unmask`), and NotResidues raised if that was outside the field, used or not.
    into: integers and floats (group * input, *feature), padding included, to be written and returned without it.
    """
    rows, matrix, answers, results = _decoding(mixing, replies, prime, None if into is None else into[0])
    shape = (results.shape[0] * results.shape[1], *results.shape[2:])
    floats = torch.empty(shape, dtype=torch.float32) if into is None else into[1]
    groups = floats.view(results.shape).transpose(0, 1)
    outside = unmask(matrix, answers, prime, exponent, out=results.transpose(0, 1), floats=groups)
    _refuse_outside(rows, outside, replies, prime)
    return joined(results, examples), without_padding(floats, examples) if into is None else floats[:examples]


def decode_weighed(
    mixing: Mixing,
    replies: Mapping[int, Tensor],
    prime: int,
    exponent: int,
    examples: int,
    weighing: Weighing,
    finish: Finish | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The floats alone, finished, and what the check needs of the integers (`kernels.unmask_weighed`), of which none is
    written. None where nothing was compiled for it: decode, weigh and finish then. into: the floats, to be written.
    """
    rows, matrix = decoder(mixing, prime, replies)
    answers = [replies[row] for row in rows]
    shape = (examples, *same_shape(answers).shape[1:])
    floats = torch.empty(shape, dtype=torch.float32) if into is None else into
    found = unmask_weighed(
        cast(IntMatrix, matrix),
        answers,
        prime,
        exponent,
        floats=floats,
        weighing=weighing,
        bias=None if finish is None else finish.bias,
        limits=None if finish is None else finish.limits,
        scaling=None if finish is None else finish.scaling,
    )
    if found is None:
        return None
    _refuse_outside(rows, found[0], replies, prime)
    return floats, found[1]


def _refuse_outside(rows: Sequence[int], outside: Sequence[int], replies: Mapping[int, Tensor], prime: int) -> None:
    """outside: the places among the rows that decode. Answers that were not needed are looked at too."""
    unused = [row for row in replies if row not in rows and not are_residues(replies[row], prime)]
    if outside or unused:
        raise NotResidues([*(rows[place] for place in outside), *unused])


def decode_gradient(code: Code, replies: Mapping[int, Tensor]) -> Tensor:
    """grad W = sum_j Eq_j over the base workers (Eq. 4 to 6, gamma folded into B), as centred integers, int32.

    A sum and not a mean, because the loss already averages.
    """
    return decode_gradient_values(code, replies, 0)[0]


def decode_gradient_values(code: Code, replies: Mapping[int, Tensor], exponent: int) -> tuple[Tensor, Tensor]:
    """The same, and beside it times 2^-exponent, as float32, in one pass. Reads and raises as `decode_values`."""
    assert code.prime is not None
    equations = [replies[row] for row in code.grad_rows]
    total = torch.empty(same_shape(equations).shape, dtype=torch.int32)
    floats = torch.empty_like(total, dtype=torch.float32)
    ones = ((1,) * len(equations),)
    outside = unmask(ones, equations, code.prime, exponent, out=total.unsqueeze(0), floats=floats.unsqueeze(0))
    if outside:
        raise NotResidues([code.grad_rows[place] for place in outside])
    return total, floats


def decode_gradient_weighed(
    code: Code, replies: Mapping[int, Tensor], exponent: int, weighing: Weighing
) -> tuple[Tensor, Tensor] | None:
    """The floats alone, and what the check needs of the integers; None where nothing was compiled for it."""
    assert code.prime is not None
    equations = [replies[row] for row in code.grad_rows]
    floats = torch.empty(same_shape(equations).shape, dtype=torch.float32)
    whole, ones = [each.unsqueeze(0) for each in equations], ((1,) * len(equations),)
    found = unmask_weighed(ones, whole, code.prime, exponent, floats=floats.unsqueeze(0), weighing=weighing)
    if found is None:
        return None
    if found[0]:
        raise NotResidues([code.grad_rows[place] for place in found[0]])
    return floats, found[1]


def _decoding(
    mixing: Mixing, replies: Mapping[int, Tensor], prime: int, into: Tensor | None = None
) -> tuple[tuple[int, ...], IntMatrix, list[Tensor], Tensor]:
    """Rows and L, the answers that it is for, and memory for (group, input, *feature): `into`, if that is given."""
    rows, matrix = decoder(mixing, prime, replies)
    answers = [replies[row] for row in rows]
    some = same_shape(answers)
    shape = (some.shape[0], mixing.inputs, *some.shape[1:])
    results = torch.empty(shape, dtype=torch.int32) if into is None else into.view(shape)
    return rows, cast(IntMatrix, matrix), answers, results


def syndromes(checks: Sequence[Sequence[int]], answers: Sequence[Tensor], prime: int) -> Tensor:
    """sum_j h_j ybar_j mod prime for each parity check h, in [0, prime): zero exactly if the answers are a codeword."""
    out = torch.empty(len(checks), *same_shape(answers).shape, dtype=torch.int32)
    return combine(checks, answers, prime, out=out, centred=False)
