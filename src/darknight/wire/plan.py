"""What a hostile worker is told to do, in a line of text: ``ATTACK[:name=value,...]``, several joined by ``;``.

    one-element      one element of the answer off by the smallest step (floats: size=X adds X)
    sign             one element negated
    row              one example's values replaced by random ones
    noise            field: random residues; floats: noise as large as the answer itself, or of deviation size=X
    scale            every element times 2, or times factor=F
    zeros            every element zero
    nan, infinity    one element that is no number of the arithmetic
    another-call     the answer to another call of the same layer, pass and shape
    earlier-step     the answer from another version of the layer's weights
    another-worker   the answer of another hostile worker to the same call; they meet in the folder meet=FOLDER and wait
                     there for wait=SECONDS (2) at most
    coordinated      plus factor=F (1) times what follows from seed, layer, call, pass and shape alone, so that several
                     workers can lie together; floats: of deviation size=X (1)
    stale-weights    computes with the first weights of each layer that it ever got, or those of back=N versions ago
    altered-weights  computes with weights of which one element is a step off; floats: a tenth of the largest, or size=X
    mislabelled      the answer carries another call's number
    silent, refuse, hang-up    never answers; says that it cannot; closes the link
    slow             answers after seconds=S (1)

Every attack also takes passes=forward+grad_input+grad_weight (which answers; not for weights, which serve two passes),
layers=GLOB, after=N (leaves the first N that match alone), every=N (then each Nth), count=N (at most N lies), seed=N.
They count answers, or for the two attacks on weights the weights that arrive, from the beginning of each session. A
factor is a number or a fraction, which exists in the field too: 2, -1, 0.5, 1/3. What cannot be done yet, or would
change nothing, is not done, and not counted as a lie.

``@FILE`` stands for the plan that is in the file when a session begins; an empty one is honest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from darknight.errors import UsageError
from darknight.types import Pass

_LONGEST_FILE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Lie:
    """One attack of a plan. What is None was not said, and each attack has a default of its own."""

    attack: str
    passes: frozenset[Pass] = frozenset(Pass)
    layers: str = "*"
    every: int = 1
    after: int = 0
    count: int | None = None
    seed: int = 0
    size: float | None = None
    factor: Fraction | None = None
    back: int | None = None
    seconds: float = 1.0
    meet: Path | None = None
    wait: float = 2.0


@dataclass(frozen=True)
class Plan:
    """A plan that makes sense. Made by `Plan.parse`."""

    text: str
    _lies: tuple[Lie, ...] = field(repr=False)
    _file: Path | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Raises UsageError, in words, on what is no plan, or a file that has none."""
        text = text.strip()
        if text.startswith("@"):
            file = Path(text[1:]).absolute()
            return cls(text, _read(file), file)
        lies = _lies(text)
        if not lies:
            raise UsageError(f"an empty hostile plan. Name an attack: {', '.join(ATTACKS)}.")
        return cls(text, lies)

    def lies(self) -> tuple[Lie, ...]:
        """What to do in a session that begins now. Raises UsageError if the plan's file has become none."""
        return self._lies if self._file is None else _read(self._file)


def _read(file: Path) -> tuple[Lie, ...]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_LONGEST_FILE).decode().strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(
            f"hostile plan @{file}: cannot be read ({why}). Write a plan there; empty is honest."
        ) from None
    if text.startswith("@"):
        raise UsageError(f"hostile plan @{file}: it names another file. Write the plan itself there.")
    return _lies(text)


def _lies(text: str) -> tuple[Lie, ...]:
    return tuple(_lie(part.strip()) for part in re.split(r"[;\n]", text) if part.strip())


def _lie(text: str) -> Lie:
    attack, _, rest = text.partition(":")
    if attack not in ATTACKS:
        raise UsageError(f'hostile plan: no attack is called "{attack[:40]}". There are {", ".join(ATTACKS)}.')
    found: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        known = (*ATTACKS[attack], *(common for common in _COMMON if common != "passes" or attack not in ON_WEIGHTS))
        if not equals or name not in known:
            raise UsageError(
                f'hostile plan: {attack} has no "{part[:40]}". It takes {", ".join(f"{n}=" for n in known)}.'
            )
        if name in found:
            raise UsageError(f"hostile plan: {attack}: {name}= is there twice. Say it once.")
        try:
            found[name] = _VALUES[name](value)
        except ValueError as error:
            raise UsageError(f'hostile plan: {attack}: {name}="{value[:40]}" is not {error}.') from None
    if attack == "another-worker" and "meet" not in found:
        raise UsageError("hostile plan: another-worker needs a folder to exchange answers in: meet=FOLDER.")
    return Lie(attack=attack, **found)


# --- the kinds of values; ValueError says what was needed -------------------------------------------------------------
def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
            raise ValueError(f"a whole number from {least}")
        return int(text)

    return read


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError("a positive number")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 3600:
        raise ValueError("a number of seconds from 0 to 3600")
    return seconds


def _fraction(text: str) -> Fraction:
    if not re.fullmatch(r"[+-]?[0-9]{1,12}([./][0-9]{1,6})?", text) or re.search(r"/0+$", text):
        raise ValueError("a number or a fraction of whole numbers, such as 2, -1, 0.5 or 1/3")
    return Fraction(text)


def _passes(text: str) -> frozenset[Pass]:
    try:
        return frozenset(Pass(name.strip()) for name in text.split("+"))
    except ValueError:
        raise ValueError(f"passes joined by +; there are {', '.join(kind.value for kind in Pass)}") from None


def _pattern(text: str) -> str:
    if not text:
        raise ValueError("a pattern of layer names, such as features.*")
    return text


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise ValueError("a folder that exists")
    return Path(text).absolute()


_VALUES: Mapping[str, Callable[[str], object]] = {
    "passes": _passes,
    "layers": _pattern,
    "every": _whole(1),
    "after": _whole(0),
    "count": _whole(0),
    "seed": _whole(0),
    "size": _positive,
    "factor": _fraction,
    "back": _whole(1),
    "seconds": _seconds,
    "meet": _folder,
    "wait": _seconds,
}
_COMMON = ("passes", "layers", "every", "after", "count", "seed")

ON_WEIGHTS = frozenset({"stale-weights", "altered-weights"})

# attack -> the options of its own
ATTACKS: Mapping[str, tuple[str, ...]] = {
    "one-element": ("size",),
    "sign": (),
    "row": (),
    "noise": ("size",),
    "scale": ("factor",),
    "zeros": (),
    "nan": (),
    "infinity": (),
    "another-call": (),
    "earlier-step": (),
    "another-worker": ("meet", "wait"),
    "coordinated": ("factor", "size"),
    "stale-weights": ("back",),
    "altered-weights": ("size",),
    "mislabelled": (),
    "silent": (),
    "refuse": (),
    "hang-up": (),
    "slow": ("seconds",),
}
