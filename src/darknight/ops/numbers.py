"""The number formats that a worker can multiply in, and how whole numbers are cut into digits that a format holds.

A sum of products of digits is exact while it stays where the format has every whole number: up to 2^53 for float64,
2^24 for float32, 2^31 for the int32 sums of int8. Digits of int8 have 7 bits, not 8: processors without VNNI add pairs
of products in 16 bits, with saturation, and (128 + 64) * 64 * 2 still fits there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from darknight.ops.field import EXACT, Limbs, centred, split

_CUDA_ROWS = 17  # torch._int_mm on a GPU wants more than 16 rows, and multiples of 8 along the other axes
_CUDA_MULTIPLE = 8


@dataclass(frozen=True)
class Numbers:
    """exact: sums are right up to this magnitude. digit: the largest magnitude of one number.

    most: products of digits; with more of them the format is not worth it.
    """

    name: str
    dtype: torch.dtype
    exact: float
    digit: float
    most: int


FLOAT64 = Numbers("float64", torch.float64, EXACT, EXACT, 6)
FLOAT32 = Numbers("float32", torch.float32, 2.0**24, 2.0**24, 6)
INT8 = Numbers("int8", torch.int8, 2.0**31 - 1, 64, 16)


@dataclass(frozen=True)
class Cut:
    """Two operands in digits, and how many products of two digits may be summed: `terms`, for each pair of digits.

    left: weights, or in grad weight the gradients. right: shares. The digit i of one and the digit j of the other meet
    in the place i + j, which counts 2^(bits * (i + j)).
    """

    left: int
    right: int
    bits: int
    terms: int
    largest: float  # of a product of two digits

    @property
    def products(self) -> int:
        return self.left * self.right

    @property
    def overlap(self) -> int:
        """How many products of digits at most meet in one place."""
        return min(self.left, self.right)

    @property
    def places(self) -> int:
        return self.left + self.right - 1

    def meeting(self, place: int) -> range:
        """The digits of the right operand that meet one of the left in this place."""
        return range(max(0, place - self.left + 1), min(place, self.right - 1) + 1)


@lru_cache(maxsize=1024)  # it is asked for with every pass, and takes as long as a small one
def cut_for(numbers: Numbers, left: float, right: float, terms: int, reach: float | None = None) -> Cut | None:
    """The cut with the fewest products in which sums of `terms` products of the operands are exact, if there is one.

    left, right: the largest magnitudes. reach: of the sum of |left| over the terms, where it is known to be less than
    left * terms.
    """
    found: list[Cut] = []
    reach = min(left * terms, reach or float("inf"))
    for bits in range(max(_width(left), _width(right)), 1, -1):
        digit = 2.0 ** (bits - 1)
        for first, first_largest in {(1, left), (-(-_width(left) // bits), min(digit, left))}:
            for second, second_largest in {(1, right), (-(-_width(right) // bits), min(digit, right))}:
                if max(first_largest, second_largest) > numbers.digit:
                    continue
                overlap, largest = min(first, second), max(1.0, first_largest * second_largest)
                sum_of_left = reach if first == 1 else first_largest * terms
                if overlap * sum_of_left * second_largest <= numbers.exact:
                    found.append(Cut(first, second, bits, int(numbers.exact // (largest * overlap)), largest))
    best = min(found, key=lambda cut: (cut.products, -cut.terms), default=None)
    return best if best is not None and best.products <= numbers.most else None


def _width(largest: float) -> int:
    """Bits of a balanced number, with its sign."""
    return int(largest).bit_length() + 1


def digits(values: Tensor, count: int, bits: int, numbers: Numbers, prime: int, near: bool = False) -> list[Tensor]:
    """Balanced digits of whole numbers (int32) modulo prime, lowest first, in the format.

    near: no magnitude is above prime / 2.
    """
    if numbers is INT8:
        return _digits_of_integers(values.clone() if near else _near(values, prime), count, bits)
    doubles = values.to(torch.float64) if near else centred(values.to(torch.float64), prime)
    parts = [doubles] if count == 1 else split(doubles, Limbs(count, bits))
    return [part.to(numbers.dtype) for part in parts]


def _near(values: Tensor, prime: int) -> Tensor:
    half = prime // 2
    found = values - (half - values).bitwise_right_shift_(31).bitwise_and_(prime)  # above prime / 2: negative
    return found.add_((values + half).bitwise_right_shift_(31).bitwise_and_(prime))  # below -prime / 2: positive


def _digits_of_integers(rest: Tensor, count: int, bits: int) -> list[Tensor]:
    parts = []
    for _ in range(count - 1):
        upper = (rest + (1 << (bits - 1))).bitwise_right_shift_(bits)
        parts.append(rest.sub_(upper, alpha=1 << bits).to(torch.int8))
        rest = upper
    return [*parts, rest.to(torch.int8)]


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """left (m, k) @ right (k, n) of digits, exactly: int32 of int8, else the dtype of the operands."""
    if left.dtype != torch.int8:
        return left @ right
    if left.device.type == "cuda":
        return padded_product(left, right)
    return torch._int_mm(_plain_row(left), _plain_row(right))


def _plain_row(matrix: Tensor) -> Tensor:
    """The same; a single row whose strides are both 1, as a transposed column has, is misread by torch._int_mm."""
    return matrix.flatten().unsqueeze(0) if matrix.shape[0] == 1 else matrix


def padded_product(left: Tensor, right: Tensor) -> Tensor:
    """torch._int_mm with zeros to the sizes that a GPU takes."""
    (rows, inner), columns = left.shape, right.shape[1]
    deep, wide = _to_multiple(inner), _to_multiple(columns)
    if (rows, inner, columns) == (max(rows, _CUDA_ROWS), deep, wide):
        return torch._int_mm(left, right)
    left = F.pad(left, (0, deep - inner, 0, max(0, _CUDA_ROWS - rows)))
    return torch._int_mm(left, F.pad(right, (0, wide - columns, 0, deep - inner)))[:rows, :columns]


def _to_multiple(size: int) -> int:
    return max(1, -(-size // _CUDA_MULTIPLE)) * _CUDA_MULTIPLE


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 means 24 bits in here: TF32 has 11, and bfloat16, which processors may take for it, 8."""
    before = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn
