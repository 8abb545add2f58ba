"""What can be found of a job in bytes that somebody holds: a disk, a log, a wire, a core.

Each thing that is looked for is looked for in the bytes as they are, in their text without spaces and line ends (a log
breaks lines anywhere), and in what either says if it is read as hexadecimal, as base 64, or as numbers.

    long          images, momentum, weights: 16 bytes of them in a row, the first, the next, and so on, at any offset
    short         half a key, a run of labels, a figure with all its digits: as a whole
    correlation   the largest |correlation| of as many numbers in a row as an image has pixels, at any offset and of any
                  type, with one image. Linear mixing leaves no bytes of an image, and is found by it.

By chance a correlation reaches THRESHOLD in bytes that are evenly distributed with a probability of at most
2 exp(-share * pixels * THRESHOLD^2 / 2) for each window and image, where `share` of the numbers have the largest
magnitude that is let through, with a random sign: nearly all whole numbers of four and eight bytes, and 0.47 of the
floats. (Bytes and whole numbers of two bytes are uniform, and need no such limit: share = 1.)
"""

import base64
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

THRESHOLD = 0.6
SHARE = 0.46
CHUNK = 16  # bytes that are no coincidence
CORRELATION = "correlation"

_PART, _SIEVE = 1 << 20, 22  # bytes at once, and bits of a number that a first look compares

# How numbers can be written, and the largest that is let through.
_FORMS = {"<u1": None, "<i2": None, "<i4": 2.0**20, "<i8": 2.0**20, "<f4": 2.0**8, "<f8": 2.0**8}
_BLOCK, _AT_ONCE = 8192, 16  # numbers in one Fourier transform, and transforms
_FLATTEST = 2e-4  # of the largest number: windows that vary less are no images, and would hurt the precision

_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{40,}")
_HEX = re.compile(rb"[0-9a-fA-F]{32,}")
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{22,}")
_NUMBER = rb"-?\d[\d.eE+-]*"
_NUMBERS = re.compile(rb"(?:%s[\s,\[\]()]+){7,}%s" % (_NUMBER, _NUMBER))


# --- looking ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sought:
    """What is looked for. images: (image, pixel); unused: such that are not there, for the floor."""

    images: Tensor
    unused: Tensor
    long: dict[str, list[bytes]]
    short: dict[str, list[bytes]]

    @cached_property
    def chunks(self) -> dict[str, np.ndarray]:
        return {name: _chunks(pieces) for name, pieces in self.long.items()}


@dataclass
class Found:
    """exact: how many pieces, by what they are of. compared: how many windows with how many images, multiplied."""

    exact: dict[str, int]
    correlation: float
    floor: float
    compared: int
    pixels: int

    @property
    def names(self) -> set[str]:
        """What was found, in its bytes or by correlation."""
        found = {name for name, count in self.exact.items() if count}
        return found | ({CORRELATION} if self.correlation >= THRESHOLD else set())

    @property
    def false_alarm(self) -> float:
        """A bound for the probability that evenly distributed bytes reach the threshold anywhere."""
        return self.compared * 2 * math.exp(-SHARE * self.pixels * THRESHOLD**2 / 2)

    def __str__(self) -> str:
        exact = ", ".join(f"{count} {name}" for name, count in self.exact.items())
        return f"{exact}; correlation {self.correlation:.3f}, floor {self.floor:.3f}"


def scan(content: bytes, sought: Sought) -> Found:
    exact = dict.fromkeys((*sought.long, *sought.short), 0)
    both = torch.cat([sought.images, sought.unused])
    best, compared = torch.zeros(len(both)), 0
    for reading in readings(content):
        for name, count in _in_common(reading, sought.chunks).items():
            exact[name] += count
        for name, needles in sought.short.items():
            exact[name] += sum(needle in reading for needle in needles)
        here, count = correlations(reading, both)
        best, compared = torch.maximum(best, here), compared + count
    used = len(sought.images)
    return Found(exact, float(best[:used].amax()), float(best[used:].amax()), compared, both.shape[1])


# --- bytes ------------------------------------------------------------------------------------------------------------
def _chunks(pieces: list[bytes]) -> np.ndarray:
    """A number for every CHUNK bytes, without those whose two halves are the same: plateaus are everywhere."""
    halves = [np.frombuffer(piece[: len(piece) // CHUNK * CHUNK], "<u8").reshape(-1, 2) for piece in pieces]
    first, second = np.concatenate(halves).T
    return np.unique(_mixed(first, second)[first != second])


def _in_common(content: bytes, material: dict[str, np.ndarray]) -> dict[str, int]:
    """How many different chunks of each material lie anywhere in the content."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in material}
    everything = np.concatenate(list(material.values()))
    known = np.zeros(1 << _SIEVE, bool)  # most windows are none of all, which a look at this tells
    known[everything >> np.uint64(64 - _SIEVE)] = True
    for begin in range(0, len(content) - CHUNK + 1, _PART):
        part = np.frombuffer(content, np.uint8, min(_PART + CHUNK - 1, len(content) - begin), begin)
        eights = np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(part, 8)).view("<u8").ravel()
        numbers = _mixed(eights[:-8], eights[8:])
        numbers = numbers[known[numbers >> np.uint64(64 - _SIEVE)]]
        for name, theirs in material.items():
            found[name].append(numbers[np.isin(numbers, theirs)])
    return {name: len(np.unique(np.concatenate(parts))) if parts else 0 for name, parts in found.items()}


def _mixed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return first * np.uint64(0x9E3779B97F4A7C15) + second * np.uint64(0xC2B2AE3D27D4EB4F)


def readings(content: bytes) -> Iterator[bytes]:
    """The bytes, the text in them without its spaces and line ends, and what parts of both say."""
    yield content
    text = b"".join(b"".join(match[0].split()) for match in _TEXT.finditer(content))
    if said := [*_said(content), *_said(text)]:
        yield (b"\0" * CHUNK).join([text, *said])
    elif text:
        yield text


def _said(content: bytes) -> Iterator[bytes]:
    """What is written in hexadecimal or base 64, from any place on, and numbers."""
    for match in _HEX.finditer(content):
        for begin in range(2):
            part = match[0][begin:]
            yield bytes.fromhex(part[: len(part) // 2 * 2].decode())
    for match in _BASE64.finditer(content):
        for begin in range(4):
            part = match[0][begin:].replace(b"-", b"+").replace(b"_", b"/")
            yield base64.b64decode(part[: len(part) // 4 * 4])
    for match in _NUMBERS.finditer(content):
        yield from _as_numbers(match[0])


def _as_numbers(text: bytes) -> list[bytes]:
    """The numbers in a text, written as bytes, float32, float64 and int64."""
    try:
        values = np.array([float(part) for part in re.split(rb"[\s,\[\]()]+", text) if part])
    except ValueError:
        return []
    forms = [values.astype("<f8"), values.astype("<f4")]
    if np.array_equal(values, values.astype(np.uint8)):
        forms.append(values.astype("u1"))
    return [form.tobytes() for form in forms]


# --- correlation ------------------------------------------------------------------------------------------------------
def correlations(content: bytes, images: Tensor) -> tuple[Tensor, int]:
    """For each image the largest |correlation| with any window, and how many were compared."""
    centred = images.double() - images.double().mean(1, keepdim=True)
    spectra = torch.fft.rfft((centred / centred.norm(dim=1, keepdim=True)).float(), _BLOCK).conj()
    best, compared = torch.zeros(len(images)), 0
    for form in _FORMS:
        size = np.dtype(form).itemsize
        for phase in range(size):
            values = _numbers(content, form, phase)
            best = torch.maximum(best, _largest(values, spectra, images.shape[1]))
            compared += max(0, len(values) - images.shape[1] + 1) * len(images)
    return best, compared


def _numbers(content: bytes, form: str, phase: int) -> Tensor:
    """All numbers from an offset on, as float32 from -1 to 1."""
    kind, largest = np.dtype(form), _FORMS[form]
    raw = np.frombuffer(content, kind, max(0, len(content) - phase) // kind.itemsize, min(phase, len(content)))
    if largest is None:
        middle, half = (128, 128) if kind.itemsize == 1 else (0, 1 << 15)
        return torch.from_numpy((raw.astype(np.float32) - middle) / half)
    with np.errstate(invalid="ignore", over="ignore"):
        finite = np.where(np.isfinite(raw), raw, 0)
        return torch.from_numpy((np.clip(finite, -largest, largest) / largest).astype(np.float32))


def _largest(values: Tensor, spectra: Tensor, pixels: int) -> Tensor:
    best = torch.zeros(len(spectra))
    step = _BLOCK - pixels + 1
    blocks = -(-(len(values) - pixels + 1) // step)
    if blocks < 1:
        return best
    padded = torch.nn.functional.pad(values, (0, (blocks - 1) * step + _BLOCK - len(values)))
    for some in padded.unfold(0, _BLOCK, step).split(_AT_ONCE):
        sums, squares = _sliding(some.double(), pixels), _sliding(some.double().square(), pixels)
        lengths = (squares - sums.square() / pixels).clamp_min(0).sqrt().float()[:, None]
        products = torch.fft.irfft(torch.fft.rfft(some)[:, None] * spectra, _BLOCK)[..., :step]
        best = torch.maximum(best, torch.where(lengths > _FLATTEST, products / lengths, 0.0).abs().amax((0, 2)))
    return best


def _sliding(values: Tensor, pixels: int) -> Tensor:
    """Sums over `pixels` neighbours."""
    totals = torch.nn.functional.pad(values.cumsum(1), (1, 0))
    return totals[:, pixels:] - totals[:, :-pixels]
