"""Calls of the libraries in C, written down with all that they point to, to be repeated where there is no torch."""

from __future__ import annotations

import ctypes
import marshal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from darknight.kernels import compiled, compiled_residues

ROOM = ("lines", "held")  # to work in: what is left there is nobody's result, and not every variant needs it

# Repeats what was written down, in memory of its own that is not a byte longer, and compares what it finds there.
REPLAY = """
import ctypes, marshal, sys

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
numbers = (ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float)
kinds = {each._type_: each for each in (ctypes.c_void_p, *numbers)}
libraries, count, less = {}, 0, int(sys.argv[2])
with open(sys.argv[1], "rb") as file:
    while True:
        try:
            path, symbol, signature, result, arguments, blocks, answer = marshal.load(file)
        except EOFError:
            break
        function = getattr(libraries.setdefault(path, ctypes.CDLL(path)), symbol)
        function.argtypes, function.restype = [kinds[each] for each in signature], result and kinds[result]
        sizes = [len(before) - (0 if pointers else less) for before, _, pointers in blocks]
        places = [libc.malloc(size) for size in sizes]
        for place, size, (before, _, pointers) in zip(places, sizes, blocks):
            ctypes.memmove(place, before, size)
            for at, to, offset in pointers:
                ctypes.c_void_p.from_address(place + at).value = places[to] + offset
        found = function(*(places[each[0]] + each[1] if type(each) is tuple else each for each in arguments))
        for place, (_, after, pointers) in zip(places, blocks):
            if not less and not pointers and ctypes.string_at(place, len(after)) != after:
                sys.exit(f"{symbol}: another result than before")
            libc.free(place)
        if not less and found != answer:
            sys.exit(f"{symbol}: another answer than before")
        count += 1
print("repeated", count)
"""


class Recording:
    """Takes the place of `compiled.loaded`, and of the functions that say where something lies."""

    def __init__(self, path: Path, monkeypatch: Any) -> None:
        self._file = path.open("wb")
        self._known: dict[int, tuple[int, Any]] = {}  # by where it begins: its bytes, and its array; the latest is last
        self._loaded = compiled.loaded
        self.symbols: set[str] = set()
        data_ptr, addressof = torch.Tensor.data_ptr, ctypes.addressof

        def of_tensor(tensor: torch.Tensor) -> int:
            storage = tensor.untyped_storage()
            self._note(storage.data_ptr(), storage.nbytes(), None)
            return data_ptr(tensor)

        def of_array(array: Any) -> int:
            self._note(addressof(array), ctypes.sizeof(array), array)
            return addressof(array)

        compiled_residues.array_of.cache_clear()  # its places are to be asked for again
        monkeypatch.setattr(torch.Tensor, "data_ptr", of_tensor)
        monkeypatch.setattr(ctypes, "addressof", of_array)
        monkeypatch.setattr(compiled, "loaded", self.loaded)

    def close(self) -> None:
        self._file.close()

    def loaded(self, name: str, symbol: str, arguments: Sequence[Any], result: Any = None) -> Callable[..., Any] | None:
        function: Any = self._loaded(name, symbol, arguments, result)
        if function is None:
            return None
        (path,) = Path(compiled.__file__).parent.glob(f"_{name}.*.so")

        def called(*values: Any) -> Any:
            self.symbols.add(symbol)
            blocks = _Blocks(self._known)
            kept = [blocks.argument(value, kind) for value, kind in zip(values, arguments, strict=True)]
            before = blocks.contents()
            answer = function(*values)
            pieces = list(zip(before, blocks.results(), blocks.pointers, strict=True))
            signature = "".join(each._type_ for each in arguments)
            kind = None if result is None else result._type_
            marshal.dump((str(path), symbol, signature, kind, kept, pieces, answer), self._file)
            return answer

        return called

    def _note(self, start: int, size: int, array: Any) -> None:
        self._known.pop(start, None)
        self._known[start] = (size, array)


class _Blocks:
    """The pieces of memory of one call, and where in them pointers to others stand."""

    def __init__(self, known: dict[int, tuple[int, Any]]) -> None:
        self._known = known
        self._places: list[tuple[int, int]] = []
        self._objects: list[Any] = []  # arrays that would be gone
        self._room: set[int] = set()
        self.pointers: list[list[tuple[int, int, int]]] = []

    def argument(self, value: Any, kind: Any) -> Any:
        """A number as it is; a pointer as (piece, offset)."""
        if kind is not ctypes.c_void_p or not value:
            return value or None if kind is ctypes.c_void_p else value
        return self._of_address(value) if isinstance(value, int) else self._of_object(getattr(value, "_obj", value))

    def contents(self) -> list[bytes]:
        return [ctypes.string_at(start, size) for start, size in self._places]

    def results(self) -> list[bytes]:
        """The same, of what is to be compared."""
        return [b"" if piece in self._room else found for piece, found in enumerate(self.contents())]

    def _piece(self, start: int, size: int) -> int:
        if (start, size) not in self._places:
            self._places.append((start, size))
            self.pointers.append([])
        return self._places.index((start, size))

    def _of_address(self, address: int) -> tuple[int, int]:
        for start, (size, array) in reversed(self._known.items()):
            if start <= address < start + size:
                return (self._piece(start, size), address - start) if array is None else self._of_object(array)
        raise AssertionError("a pointer to memory that nobody asked the place of")

    def _of_object(self, value: Any) -> tuple[int, int]:
        """A structure or an array, and what it points to."""
        self._objects.append(value)
        piece = self._piece(ctypes.addressof(value), ctypes.sizeof(value))
        for offset, entry in _entries(value):
            if isinstance(entry, ctypes._Pointer):
                address = ctypes.cast(entry, ctypes.c_void_p).value
                (array,) = (each for each in _kept_alive(value._objects) if ctypes.addressof(each) == address)
                self.pointers[piece].append((offset, *self._of_object(array)))
            elif entry:
                self.pointers[piece].append((offset, *self._of_address(entry)))
        for name, kind in getattr(value, "_fields_", ()):
            if name in ROOM and kind is ctypes.c_void_p and getattr(value, name):
                self._room.add(self._of_address(getattr(value, name))[0])
        return piece, 0


def _kept_alive(objects: Any) -> list[Any]:
    """The arrays that a structure points to, which ctypes keeps in tuples in dictionaries."""
    if isinstance(objects, ctypes.Structure):
        return _kept_alive(objects._objects)
    if isinstance(objects, dict | tuple):
        values = objects.values() if isinstance(objects, dict) else objects
        return [each for value in values for each in _kept_alive(value)]
    return [objects] if isinstance(objects, ctypes.Array) else []


def _entries(value: Any) -> list[tuple[int, Any]]:
    """The pointers in a structure or an array, and where in it they stand."""
    if not isinstance(value, ctypes.Structure):
        size = ctypes.sizeof(ctypes.c_void_p)
        return [(index * size, entry) for index, entry in enumerate(value)] if value._type_ is ctypes.c_void_p else []
    found = []
    for name, kind in value._fields_:
        start, entry = getattr(type(value), name).offset, getattr(value, name)
        if isinstance(entry, ctypes.Structure):
            found += [(start + offset, inner) for offset, inner in _entries(entry)]
        elif kind is ctypes.c_void_p or isinstance(entry, ctypes._Pointer):
            found.append((start, entry))
    return found
