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

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from darknight.coding import PRIME_28

SIDE = 24
PIXELS = SIDE * SIDE

_PAGE, _PIECE = 4096, 512  # bytes of memory
_WINDOW = 4 << 20  # bytes that are read at a time
_BLOCK = 8192  # numbers in one Fourier transform
_AT_ONCE = 8  # transforms
_LARGEST, _SMALLEST, _FLATTEST = 1e9, 1e-6, 1e-3  # numbers and windows that are no images, and would hurt the precision
_CHECKS = 6  # parity checks of an exact mix: by chance a window passes all of them once in p^6


# --- images -----------------------------------------------------------------------------------------------------------
def smooth_images(count: int, seed: int) -> torch.Tensor:
    """(count, 1, SIDE, SIDE) blurred noise. Multiples of 1/32, so that fixed-point numbers of any scale are exact.

    All rows are equally bright: memory is full of steps and plateaus, which look like a picture with a dark half.
    """
    noise = torch.randn(count, 1, SIDE + 4, SIDE + 4, generator=torch.Generator().manual_seed(seed))
    bell = torch.exp(-torch.arange(-2.0, 3.0).square() / 2)
    blurred = torch.nn.functional.conv2d(noise, (bell[:, None] * bell)[None, None])
    blurred -= blurred.mean(3, keepdim=True)
    return (31 * blurred / blurred.abs().amax((1, 2, 3), keepdim=True)).round() / 32


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
    """The three statistics, each the largest, or the sum, over all images or virtual batches."""

    alone: float
    mixed: float
    exact: int

    def __str__(self) -> str:
        return f"alone {self.alone:.3f}, mixed {self.mixed:.3f}, exact {self.exact}"


@dataclass(frozen=True)
class Sight:
    """What was found of images that were used, and of as many that were not: the floor."""

    used: Found
    unused: Found
    windows: int

    def assert_at_the_floor(self, margin: float) -> None:
        assert self.unused.mixed < 0.5, f"the floor is too high to say anything: {self}"
        assert self.used.alone < self.unused.alone + margin, str(self)
        assert self.used.mixed < self.unused.mixed + margin, str(self)
        assert self.used.exact == 0, str(self)

    def __str__(self) -> str:
        return f"{self.used}; floor {self.unused}; {self.windows / 1e6:.1f} M windows"


def look(content: bytes, used: torch.Tensor, unused: torch.Tensor, *, every_byte: bool = False) -> Sight:
    """Looks for images in `content`, at every offset that fits the type; or for residues at every offset at all.

    Images 0 and 1 were in one virtual batch, then 2 and 3, and so on.
    """
    search = _Search(torch.cat([used, unused]))
    for phase in range(4 if every_byte else 1):
        search.residues(_numbers(content, np.int32, phase).astype(np.int64) % PRIME_28)
    for dtype in (np.float32, np.float64):
        with np.errstate(invalid="ignore", over="ignore"):
            search.reals(_numbers(content, dtype, 0).astype(np.float64))
    return Sight(search.found(slice(None, len(used))), search.found(slice(len(used), None)), search.windows)


def _numbers(content: bytes, dtype: type, phase: int) -> np.ndarray:
    return np.frombuffer(content, dtype=dtype, count=(len(content) - phase) // np.dtype(dtype).itemsize, offset=phase)


class _Search:
    """Collects the statistics by image (`alone`) and by virtual batch."""

    def __init__(self, images: torch.Tensor) -> None:
        flat = images.flatten(1).double()
        centred = flat - flat.mean(1, keepdim=True)
        templates = centred / centred.norm(dim=1, keepdim=True)
        self._spectra = torch.fft.rfft(templates, _BLOCK).conj()
        self._likeness = (templates[0::2] * templates[1::2]).sum(1)  # of the two images of a virtual batch
        self._checks = [_parity_checks(pair) for pair in (32 * flat).round().long().numpy().reshape(-1, 2, PIXELS)]
        self._alone = flat.new_zeros(len(images))
        self._mixed = flat.new_zeros(len(images) // 2)
        self._exact = [0] * (len(images) // 2)
        self.windows = 0

    def found(self, part: slice) -> Found:
        half = slice(part.start and part.start // 2, part.stop and part.stop // 2)
        return Found(float(self._alone[part].amax()), float(self._mixed[half].amax()), sum(self._exact[half]))

    def residues(self, values: np.ndarray) -> None:
        for group, checks in enumerate(self._checks):
            self._exact[group] += _exact(values, checks)
        self._correlate(np.where(values > PRIME_28 // 2, values - PRIME_28, values))

    def reals(self, values: np.ndarray) -> None:
        sane = (np.abs(values) < _LARGEST) & (np.abs(values) > _SMALLEST)  # False for NaN
        self._correlate(np.where(sane, values, 0.0))

    def _correlate(self, numbers: np.ndarray) -> None:
        values = torch.from_numpy(numbers).double()
        windows = len(values) - PIXELS + 1
        assert windows > 0, "less to look at than one image"
        self.windows += windows
        step = _BLOCK - PIXELS + 1
        blocks = -(-windows // step)
        padded = torch.cat([values, values.new_zeros((blocks - 1) * step + _BLOCK - len(values))])
        for some in padded.unfold(0, _BLOCK, step).split(_AT_ONCE):
            sums, squares = _sliding_sums(some), _sliding_sums(some.square())
            lengths = (squares - sums.square() / PIXELS).clamp_min(0).sqrt()[:, None]
            products = torch.fft.irfft(torch.fft.rfft(some)[:, None] * self._spectra, _BLOCK)[..., :step]
            scores = torch.where(lengths > _FLATTEST, products / lengths, 0.0)  # (block, image, window)
            self._alone = torch.maximum(self._alone, scores.abs().amax((0, 2)))
            first, second, rho = scores[:, 0::2], scores[:, 1::2], self._likeness
            explained = (first.square() + second.square()).sub_(2 * rho[:, None] * first * second).amax((0, 2))
            self._mixed = torch.maximum(self._mixed, (explained / (1 - rho.square())).sqrt())


def _exact(residues: np.ndarray, checks: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """How many windows pass all parity checks; one that is zero in all pixels of a check says nothing."""
    places: slice | np.ndarray = slice(0, max(0, len(residues) - PIXELS + 1))
    for pixels, coefficients in checks:
        if isinstance(places, slice):  # the first check sees every window: slices are faster
            met = [residues[pixel : pixel + places.stop] for pixel in pixels]
        else:
            met = [residues[places + pixel] for pixel in pixels]
        total = sum(coefficient * values for coefficient, values in zip(coefficients, met, strict=True))
        passed = np.flatnonzero((total % PRIME_28 == 0) & ((met[0] | met[1] | met[2]) != 0))
        places = passed if isinstance(places, slice) else places[passed]
    return len(places)


def _sliding_sums(values: torch.Tensor) -> torch.Tensor:
    """Over PIXELS neighbours, by doubling: differences of running sums would lose small numbers beside large ones."""
    count = values.shape[1] - PIXELS + 1
    result, done, power, size = values.new_zeros(len(values), count), 0, values, 1
    while done < PIXELS:
        if PIXELS & size:
            result += power[:, done : done + count]
            done += size
        power, size = power[:, :-size] + power[:, size:], 2 * size
    return result


# --- memory -----------------------------------------------------------------------------------------------------------
class Memory:
    """A worker's memory since this object was made.

    It is read in pieces. Those that were there before, byte for byte, hold nothing of images that came later, and an
    image lies in several pieces in a row that are new. That leaves a hundredth of the memory to look through. What is
    read is all that the process can write, and all that it shares with others; not the code and constants of programs.

    Raises PermissionError where the system lets nobody read another process's memory.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pages: set[int] = set()  # hashes; to know most pieces by their page is faster
        self._pieces: set[int] = set()
        for _, page in _pages(pid):
            self._pages.add(hash(page))
            self._pieces.update(hash(page[place : place + _PIECE]) for place in range(0, _PAGE, _PIECE))

    def new_content(self) -> bytes:
        """What was written since, in the order of addresses, where it is as long as an image."""
        runs: list[list[bytes]] = []
        end = None
        for address, page in _pages(self._pid):
            if hash(page) in self._pages:
                continue
            for place in range(0, _PAGE, _PIECE):
                piece = page[place : place + _PIECE]
                if hash(piece) in self._pieces:
                    continue
                if address + place != end:
                    runs.append([])
                runs[-1].append(piece)
                end = address + place + _PIECE
        return b"".join(piece for run in runs if len(run) * _PIECE >= 4 * PIXELS for piece in run)


def _pages(pid: int) -> Iterator[tuple[int, bytes]]:
    """Address and content of every page that is not all zeros."""
    with (
        open(f"/proc/{pid}/mem", "rb", buffering=0) as memory,
        open(f"/proc/{pid}/pagemap", "rb", buffering=0) as there,
    ):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split(maxsplit=2)
            if rights[0] != "r" or (rights[1] != "w" and rights[3] != "s"):
                continue
            begin, end = (int(part, 16) for part in span.split("-"))
            for start in range(begin, end, _WINDOW):
                stop = min(end, start + _WINDOW)
                if rights[3] != "s" and not _touched(there, start, stop):
                    continue
                content = _read(memory, start, stop)
                for place in np.flatnonzero(np.frombuffer(content, np.uint64).reshape(-1, _PAGE // 8).any(1)) * _PAGE:
                    yield start + int(place), content[place : place + _PAGE]


def _touched(pagemap: BinaryIO, begin: int, end: int) -> bool:
    """Whether a page of the process's own is there: a heap has addresses set aside that nobody has written to."""
    entries = np.frombuffer(_read(pagemap, begin // _PAGE * 8, end // _PAGE * 8), np.uint64)
    return bool((entries >> np.uint64(62)).any())  # in memory, or swapped out


def _read(memory: BinaryIO, begin: int, end: int) -> bytes:
    content = b""
    while len(content) < end - begin:
        memory.seek(begin + len(content))
        part = memory.read(end - begin - len(content))
        assert part, "a mapping that cannot be read to its end"
        content += part
    return content
