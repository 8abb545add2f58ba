"""Headers as bytes, and what their fields may be.

Guarantees: `unpack` and the readers of fields give values of exactly the type and range that they name; anything else
is BadFrame. A frame of HEADER_LIMIT bytes costs at most a few of its own sizes to refuse. Contract tests:
tests/wire/test_codec.py::test_a_field_of_another_type_or_range_is_refused,
tests/wire/test_codec.py::test_a_header_is_refused_at_the_cost_of_a_header.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import NoReturn

HEADER_LIMIT = 1 << 16

# Every number has a limit far above what is in use, and far below what overflows an int64 or a size_t.
NAME_LIMIT = 1000  # characters of a layer's name, or of a refusal
AXES = 8
_LONGEST_AXIS = 1 << 40
_NUMBER = 1 << 63
_DEPTH = 8
# A string, or what is left of one. Possessive (++, *+): a frame of quotes and backslashes must not be read again from
# each of them, which takes a minute.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)

Header = dict[str, object]


class BadFrame(Exception):  # noqa: N818 - an event on the wire; who reads it makes an error of it
    """A frame that is not what the protocol allows. The words are safe to show: they repeat nothing of the frame."""


# --- headers --------------------------------------------------------------------------------------------------------
def pack(header: Mapping[str, object]) -> bytes:
    """The frame of a header."""
    try:
        frame = _ENCODER.encode(header).encode()
    except (TypeError, ValueError) as error:  # a surrogate in a name, NaN
        raise BadFrame(f"a header that cannot be written as JSON: {type(error).__name__}") from None
    if len(frame) > HEADER_LIMIT:
        raise BadFrame(f"a header of {len(frame)} bytes; at most {HEADER_LIMIT} are allowed")
    return frame


def unpack(frame: bytes) -> Header:
    """The header in a frame: a JSON object without repeated keys, NaN, infinities or deep nests."""
    if len(frame) > HEADER_LIMIT:
        raise BadFrame(f"a header of {len(frame)} bytes; at most {HEADER_LIMIT} are allowed")
    try:
        text = frame.decode()
        _check_depth(text)
        header = _DECODER.decode(text)
    except (ValueError, RecursionError):  # the decoder's own messages quote the text
        raise BadFrame("a header that is not UTF-8 JSON") from None
    if type(header) is not dict:
        raise BadFrame("a header that is not a JSON object")
    return header


def _check_depth(text: str) -> None:
    if text.count("[") + text.count("{") <= _DEPTH:  # as in every answer: then no nest is deeper
        return
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEPTH:
            raise BadFrame(f"a header with more than {_DEPTH} nested brackets")


def _object(pairs: list[tuple[str, object]]) -> Header:
    if len(found := dict(pairs)) != len(pairs):
        raise BadFrame("a header with a repeated key")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise BadFrame(f"a header with {name}")


# Made once: json.dumps and json.loads make them for every call that is not the usual one.
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


# --- fields ---------------------------------------------------------------------------------------------------------
def an_object(value: object) -> Header:
    if type(value) is not dict:
        raise BadFrame("something else where an object is due")
    return value


def a_list(value: object) -> list[object]:
    if type(value) is not list:
        raise BadFrame("something else where a list is due")
    return value


def text(value: object, limit: int = NAME_LIMIT) -> str:
    if type(value) is not str or len(value) > limit or not _unicode(value):
        raise BadFrame(f"something else where a text of at most {limit} characters is due")
    return value


def _unicode(text: str) -> bool:
    """JSON's escapes can make half of a surrogate pair, which no later output could encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def hexadecimal(value: object, count: int) -> bytes:
    """So many bytes, in lower-case hexadecimal."""
    try:
        found = bytes.fromhex(text(value, 2 * count))
    except ValueError:
        found = b""
    if len(found) != count or found.hex() != value:
        raise BadFrame(f"something else where {count} bytes in hexadecimal are due")
    return found


def number(value: object, *, least: int = 0, limit: int = _NUMBER) -> int:
    if type(value) is not int or not least <= value < limit:  # True is an int too
        raise BadFrame(f"something else where a whole number from {least} to below {limit} is due")
    return value


def real(value: object) -> float:
    """A coefficient: an int stays one (a residue), a float is finite."""
    if type(value) is int and abs(value) < _NUMBER:
        return value
    if type(value) is not float or not math.isfinite(value):
        raise BadFrame("something else where a finite number is due")
    return value


def seconds(value: object) -> float:
    seconds = real(value)
    if seconds < 0:
        raise BadFrame("a negative time")
    return float(seconds)


def flag(value: object) -> bool:
    if type(value) is not bool:
        raise BadFrame("something else where true or false is due")
    return value


def shape(value: object) -> tuple[int, ...]:
    axes = a_list(value)
    if len(axes) > AXES:
        raise BadFrame(f"a shape of {len(axes)} axes; at most {AXES} are allowed")
    return tuple(number(n, limit=_LONGEST_AXIS) for n in axes)


def printable(text: str) -> str:
    """Text without control characters: a worker's words end up in terminals and logs."""
    return "".join(c if c.isprintable() else " " for c in text)
