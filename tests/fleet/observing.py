"""What somebody who sits at a worker can look for: private images, in its memory and in what its reader saw.

Every place where an image could lie is a window: as many numbers in a row as the image has pixels, read as residues
modulo the prime, as float32 or as float64. Three statistics, from the bluntest to the sharpest:

    alone    the largest |correlation| of a window with one image. It finds images that were not masked.
    mixed    the largest multiple correlation of a window with the images of one virtual batch, that is, with the best
             combination of them. It finds images that were mixed with real coefficients and no noise.
    exact    the number of windows that are a combination of the images of one virtual batch over F_p. It finds images
             that were mixed in the field without noise: there products wrap around, and no correlation is left.

The first two are never zero by chance. Images that were never used, looked for in the same windows, give the floor.
"""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

from darknight.coding import PRIME_28

SIDE = 24
PIXELS = SIDE * SIDE
PAGE = 4096

_BLOCK = 8192  # numbers in one Fourier transform
_AT_ONCE = 8  # transforms
_LARGEST, _SMALLEST, _FLATTEST = 1e9, 1e-6, 1e-3  # numbers and windows that are no images, and would hurt the precision
_CHECKS = 6  # parity checks of an exact mix: by chance a window passes all of them once in p^6


# --- images -----------------------------------------------------------------------------------------------------------
def smooth_images(count: int, seed: int) -> torch.Tensor:
    """(count, 1, SIDE, SIDE) blurred noise. Multiples of 1/32, so that fixed-point numbers of any scale are exact."""
    noise = torch.randn(count, 1, SIDE + 4, SIDE + 4, generator=torch.Generator().manual_seed(seed))
    bell = torch.exp(-torch.arange(-2.0, 3.0).square() / 2)
    blurred = torch.nn.functional.conv2d(noise, (bell[:, None] * bell)[None, None])
    return (31 * blurred / blurred.abs().amax((1, 2, 3), keepdim=True)).round() / 32


class Wanted:
    """Images to look for, by virtual batch: images 0 and 1, then 2 and 3, and so on."""

    def __init__(self, images: torch.Tensor) -> None:
        flat = images.flatten(1).double()
        centred = flat - flat.mean(1, keepdim=True)
        self.templates = centred / centred.norm(dim=1, keepdim=True)
        pairs = self.templates.reshape(-1, 2, PIXELS)
        self.whitening = torch.linalg.inv(pairs @ pairs.transpose(1, 2))  # (group, 2, 2)
        self.checks = [_parity_checks(pair) for pair in (32 * flat).round().long().numpy().reshape(-1, 2, PIXELS)]


def _parity_checks(pair: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Three pixels and the coefficients with which every combination of the two images adds up to zero there."""
    draw, found = np.random.default_rng(0), []
    while len(found) < _CHECKS:
        pixels = draw.choice(PIXELS, 3, replace=False)
        coefficients = np.cross(pair[0, pixels], pair[1, pixels])
        if coefficients.all():
            found.append((pixels, coefficients))
    return found


# --- looking ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Found:
    """The three statistics, each the largest over all images or virtual batches, and how many windows were tried."""

    alone: float = 0.0
    mixed: float = 0.0
    exact: int = 0
    windows: int = 0

    def __or__(self, other: "Found") -> "Found":
        """Of two places together."""
        counts = {"exact": self.exact + other.exact, "windows": self.windows + other.windows}
        return Found(alone=max(self.alone, other.alone), mixed=max(self.mixed, other.mixed), **counts)

    def __str__(self) -> str:
        words = (f"{field.name} {getattr(self, field.name):.4g}" for field in fields(self)[:3])
        return f"{', '.join(words)} in {self.windows / 1e6:.1f} M windows"


def look(content: bytes, images: torch.Tensor, *, every_byte: bool = False) -> Found:
    """Looks for the images in `content`, at every offset that fits the type; or residues at every offset at all."""
    wanted, found = Wanted(images), Found()
    for phase in range(4 if every_byte else 1):
        residues = _numbers(content, np.int32, phase).astype(np.int64) % PRIME_28
        found |= Found(exact=sum(_exact(residues, checks) for checks in wanted.checks))
        found |= _correlations(torch.from_numpy(np.where(residues > PRIME_28 // 2, residues - PRIME_28, residues)), wanted)
    for dtype in (np.float32, np.float64):
        with np.errstate(invalid="ignore", over="ignore"):
            values = _numbers(content, dtype, 0).astype(np.float64)
        sane = (np.abs(values) < _LARGEST) & (np.abs(values) > _SMALLEST)  # False for NaN
        found |= _correlations(torch.from_numpy(np.where(sane, values, 0.0)), wanted)
    return found


def _numbers(content: bytes, dtype: type, phase: int) -> np.ndarray:
    count = (len(content) - phase) // np.dtype(dtype).itemsize
    return np.frombuffer(content, dtype=dtype, count=max(0, count), offset=phase if count > 0 else 0)


def _exact(residues: np.ndarray, checks: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """How many windows pass all parity checks; one that is zero in all pixels of a check says nothing."""
    places = np.arange(max(0, len(residues) - PIXELS + 1))
    for pixels, coefficients in checks:
        met = [residues[places + pixel] for pixel in pixels]
        total = sum(coefficient * values for coefficient, values in zip(coefficients, met, strict=True))
        places = places[(total % PRIME_28 == 0) & ((met[0] | met[1] | met[2]) != 0)]
    return len(places)


def _correlations(values: torch.Tensor, wanted: Wanted) -> Found:
    values = values.double()
    windows = len(values) - PIXELS + 1
    if windows < 1:
        return Found()
    step = _BLOCK - PIXELS + 1
    blocks = -(-windows // step)
    padded = torch.cat([values, values.new_zeros((blocks - 1) * step + _BLOCK - len(values))])
    spectra = torch.fft.rfft(wanted.templates, _BLOCK).conj()
    alone = mixed = 0.0
    for some in padded.unfold(0, _BLOCK, step).split(_AT_ONCE):
        sums, squares = _sliding_sums(some), _sliding_sums(some.square())
        lengths = (squares - sums.square() / PIXELS).clamp_min(0).sqrt()[:, None]
        products = torch.fft.irfft(torch.fft.rfft(some)[:, None] * spectra, _BLOCK)[..., :step]
        scores = torch.where(lengths > _FLATTEST, products / lengths, 0.0)  # (block, image, window)
        alone = max(alone, float(scores.abs().amax()))
        by_group = scores.unflatten(1, (-1, 2))
        explained = (torch.einsum("gij, bgjw -> bgiw", wanted.whitening, by_group) * by_group).sum(2)
        mixed = max(mixed, float(explained.amax().clamp_min(0).sqrt()))
    return Found(alone=alone, mixed=mixed, windows=windows)


def _sliding_sums(values: torch.Tensor) -> torch.Tensor:
    """Over PIXELS neighbours, by doubling: differences of running sums would lose small numbers beside large ones."""
    result, done, power, size = None, 0, values, 1
    while done < PIXELS:
        if PIXELS & size:
            part = power[:, done:]
            result = part if result is None else result[:, : part.shape[1]] + part
            done += size
        power, size = power[:, : power.shape[1] - size] + power[:, size:], 2 * size
    count = values.shape[1] - PIXELS + 1
    return result[:, :count]


# --- memory -----------------------------------------------------------------------------------------------------------
def pages_of(pid: int) -> list[bytes]:
    """Every page of the process that it can write, or shares with somebody, and that is not all zeros.

    What is left out is code and constants: private mappings of files that the process cannot write. Raises
    PermissionError where the system lets nobody read another process's memory.
    """
    found, nothing = [], bytes(PAGE)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, _, _, _, *name = line.split(maxsplit=5)
            if rights[0] != "r" or (rights[1] != "w" and rights[3] != "s") or name == ["[vvar]"]:
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            content = _read(memory, begin, end)
            starts = np.flatnonzero(np.frombuffer(content, np.uint64).reshape(-1, PAGE // 8).any(1)) * PAGE
            found += [content[start : start + PAGE] for start in starts.tolist()]
    assert all(page != nothing for page in found)
    return found


def _read(memory, begin: int, end: int) -> bytes:
    content = b""
    while len(content) < end - begin:
        memory.seek(begin + len(content))
        part = memory.read(end - begin - len(content))
        assert part, "a mapping that cannot be read to its end"
        content += part
    return content


class Memory:
    """A worker's memory since this object was made.

    Pages that were there before, byte for byte, hold nothing of images that came later; leaving them out leaves a
    twentieth of the memory to look through.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._known = {_digest(page) for page in pages_of(pid)}

    def new_content(self) -> bytes:
        """What was written since, in the order of addresses."""
        return b"".join(page for page in pages_of(self._pid) if _digest(page) not in self._known)


def _digest(page: bytes) -> bytes:
    return hashlib.blake2b(page, digest_size=16).digest()
