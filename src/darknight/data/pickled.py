"""The few pickles that CIFAR's python files consist of, read by an interpreter of our own.

A pickle is a program for a stack machine, and Python's own machine can call anything. This one knows the 38
instructions that dictionaries, lists, texts, integers and arrays of bytes need, and the three names that NumPy's arrays
are made with. It calls nothing: the names are constants here, and "calling" one checks its arguments and makes a note.

Guarantees: no code of the file's choice runs and nothing is imported, whatever the file holds. What the file needs in
memory is bounded by its own size and by _MOST_STEPS objects; long texts, such as the pixels, are not even read, only
their place is noted. Anything out of the ordinary is a DataError. Contract tests:
tests/data/test_pickled.py::test_what_is_no_batch_is_refused_and_nothing_runs,
tests/data/test_pickled.py::test_a_greedy_file_gets_little_memory.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from darknight.data.files import StillFile
from darknight.errors import DataError

_MOST_STEPS = 1_000_000  # the largest real file, CIFAR-100's training part, takes a quarter of it
_SHORT = 1024  # longer texts stay in the file; one image of CIFAR is
_NEWEST_PROTOCOL = 5


class _Name(enum.Enum):
    """What a pickle may refer to."""

    RECONSTRUCT = enum.auto()
    NDARRAY = enum.auto()
    DTYPE = enum.auto()


_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"): _Name.RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _Name.RECONSTRUCT,
    ("numpy", "ndarray"): _Name.NDARRAY,
    ("numpy", "dtype"): _Name.DTYPE,
}


@dataclass(frozen=True)
class Stretch:
    """Bytes that are left where they are in the file."""

    begin: int
    length: int


@dataclass(eq=False)
class PickledArray:
    """An array of bytes in the file. `data` is None until the pickle has said where it is."""

    shape: tuple[int, ...] = ()
    data: Stretch | None = None
    fortran_order: bool = False


class _Bytes:
    """The dtype of bytes, which has a state that says nothing."""


def read_pickle(file: StillFile) -> object:
    """The one value in `file`: of dict, list, tuple, str, bytes, int, bool, None, PickledArray and Stretch."""
    with file.opened(buffered=True) as stream:
        return _Machine(stream, file).run()


class _Machine:
    def __init__(self, stream: BinaryIO, file: StillFile) -> None:
        self._stream = stream
        self._file = file
        self._stack: list[object] = []
        self._marks: list[int] = []  # heights of the stack
        self._memo: dict[int, object] = {}
        self._steps: dict[bytes, Callable[[], None]] = {
            b"\x80": self._protocol,
            b"\x95": self._frame,
            b"(": lambda: self._marks.append(len(self._stack)),
            b"N": lambda: self._stack.append(None),
            b"\x88": lambda: self._stack.append(True),
            b"\x89": lambda: self._stack.append(False),
            b"K": lambda: self._stack.append(self._number("<B")),
            b"M": lambda: self._stack.append(self._number("<H")),
            b"J": lambda: self._stack.append(self._number("<i")),
            b"\x8a": self._long,
            b"U": lambda: self._stack.append(self._text("<B")),  # Python 2's str, which is bytes
            b"T": lambda: self._stack.append(self._text("<i")),
            b"C": lambda: self._stack.append(self._text("<B")),
            b"B": lambda: self._stack.append(self._text("<I")),
            b"\x8e": lambda: self._stack.append(self._text("<Q")),
            b"\x8c": lambda: self._stack.append(self._unicode("<B")),
            b"X": lambda: self._stack.append(self._unicode("<I")),
            b")": lambda: self._stack.append(()),
            b"\x85": lambda: self._tuple(1),
            b"\x86": lambda: self._tuple(2),
            b"\x87": lambda: self._tuple(3),
            b"t": lambda: self._stack.append(tuple(self._since_mark())),
            b"]": lambda: self._stack.append([]),
            b"a": lambda: self._append([self._pop()]),
            b"e": lambda: self._append(self._since_mark()),
            b"}": lambda: self._stack.append({}),
            b"s": lambda: self._set_items([self._pop(), self._pop()][::-1]),
            b"u": lambda: self._set_items(self._since_mark()),
            b"q": lambda: self._put(self._number("<B")),
            b"r": lambda: self._put(self._number("<I")),
            b"\x94": lambda: self._put(len(self._memo)),
            b"h": lambda: self._get(self._number("<B")),
            b"j": lambda: self._get(self._number("<I")),
            b"c": lambda: self._name(self._line(), self._line()),
            b"\x93": lambda: self._name(*[self._pop(), self._pop()][::-1]),
            b"R": self._reduce,
            b"b": self._build,
        }

    def run(self) -> object:
        for _ in range(_MOST_STEPS):
            code = self._take(1)
            if code == b".":
                value = self._pop()
                if self._stack or self._marks or self._stream.read(1):
                    raise self._bad("does not end where its value ends")
                return value
            step = self._steps.get(code)
            if step is None:
                raise self._bad(f"holds the instruction 0x{code.hex()}, which such files do not need")
            step()
        raise self._bad(f"takes more than {_MOST_STEPS} steps")

    def _bad(self, found: str) -> DataError:
        return DataError(
            f"{self._file}: {found}. Needs a pickle of CIFAR, as published: texts, integers and arrays of bytes. "
            "It was not unpickled, and nothing in it was run."
        )

    # --- bytes ------------------------------------------------------------------------------------------------------
    def _take(self, length: int) -> bytes:
        data = self._stream.read(length)
        if len(data) != length:
            raise self._bad("ends too early")
        return data

    def _number(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _skip(self, length: int) -> Stretch:
        begin = self._stream.tell()
        if not 0 <= length <= self._file.size - begin:
            raise self._bad(f"announces {length} bytes and has {self._file.size - begin}")
        self._stream.seek(length, 1)
        return Stretch(begin, length)

    def _text(self, form: str) -> bytes | Stretch:
        length = self._number(form)
        return self._take(length) if 0 <= length <= _SHORT else self._skip(length)

    def _unicode(self, form: str) -> str:
        length = self._number(form)
        if length > _SHORT:
            raise self._bad(f"holds a text of {length} bytes, and at most {_SHORT} are expected")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._bad("holds a text that is not UTF-8") from None

    def _line(self) -> str:
        line = self._stream.readline(256)
        if not line.endswith(b"\n") or not line.isascii():
            raise self._bad("holds a name that is not a name")
        return line[:-1].decode("ascii")

    def _protocol(self) -> None:
        version = self._number("<B")
        if not 2 <= version <= _NEWEST_PROTOCOL:
            raise self._bad(f"has protocol {version}")

    def _frame(self) -> None:
        """A hint for buffering, of no use here."""
        self._take(8)

    def _long(self) -> None:
        self._stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))

    # --- the stack --------------------------------------------------------------------------------------------------
    def _pop(self) -> object:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise self._bad("takes a value that is not there")
        return self._stack.pop()

    def _since_mark(self) -> list[object]:
        if not self._marks:
            raise self._bad("goes back to a mark that is not there")
        height = self._marks.pop()
        values = self._stack[height:]
        del self._stack[height:]
        return values

    def _tuple(self, length: int) -> None:
        self._stack.append(tuple([self._pop() for _ in range(length)][::-1]))

    def _append(self, values: list[object]) -> None:
        target = self._pop()
        if type(target) is not list:
            raise self._bad("appends to something that is not a list")
        target += values
        self._stack.append(target)

    def _set_items(self, values: list[object]) -> None:
        target = self._pop()
        if type(target) is not dict or len(values) % 2:
            raise self._bad("sets items of something that is not a dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if type(key) not in (str, bytes):
                raise self._bad("has a dictionary with keys that are not texts")
            target[key] = value
        self._stack.append(target)

    def _put(self, number: int) -> None:
        value = self._pop()
        self._stack.append(value)
        self._memo[number] = value

    def _get(self, number: int) -> None:
        if number not in self._memo:
            raise self._bad("refers to a value that it did not define")
        self._stack.append(self._memo[number])

    # --- arrays -----------------------------------------------------------------------------------------------------
    def _name(self, module: object, name: object) -> None:
        if not (type(module) is str and type(name) is str):
            raise self._bad("asks for something by a name that is not a text")
        if (module, name) not in _NAMES:
            raise self._bad(f"asks for {f'{module}.{name}'[:80]!a}, which is no part of an array of bytes")
        self._stack.append(_NAMES[module, name])

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        match function, arguments:
            case _Name.RECONSTRUCT, (_Name.NDARRAY, (0,), b"b" | "b"):
                self._stack.append(PickledArray())
            case _Name.DTYPE, (b"u1" | "u1", 0 | False, 1 | True):
                self._stack.append(_Bytes())
            case _:
                raise self._bad("calls something, or makes an array of something else than bytes")

    def _build(self) -> None:
        state, target = self._pop(), self._pop()
        match target, state:
            case _Bytes(), (3, b"|" | "|", None, None, None, -1, -1, 0):
                pass
            case PickledArray(data=None), (1, tuple(shape), _Bytes(), 0 | 1 as fortran, Stretch() as data):
                self._set_array(target, shape, bool(fortran), data)
            case _:
                raise self._bad("gives a state to something else than an array of bytes")
        self._stack.append(target)

    def _set_array(self, array: PickledArray, shape: tuple[object, ...], fortran: bool, data: Stretch) -> None:
        sides = tuple(side for side in shape if type(side) is int and side > 0)
        if len(sides) != len(shape) or math.prod(sides) != data.length:
            raise self._bad(f"has an array with {data.length} bytes, which are not what its shape needs")
        array.shape, array.data, array.fortran_order = sides, data, fortran
