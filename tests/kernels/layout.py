"""What is handed to a library in C, as Python has it and as the C file says: names, and which of them are pointers."""

import ctypes
import re
from pathlib import Path

from darknight.kernels import compiled

Fields = list[tuple[str, str]]


def fields_of(structure: type[ctypes.Structure]) -> Fields:
    return [("*" if kind is ctypes.c_void_p else "", name) for name, kind in structure._fields_]


def fields_in(file: str, name: str) -> Fields:
    bare = re.sub(r"/\*.*?\*/", "", Path(compiled.__file__).with_name(file).read_text(), flags=re.DOTALL)
    (body,) = re.findall(r"typedef struct \{([^}]*)\} " + name + ";", bare)
    return re.findall(r"(\*?)(\w+)\s*[,;]", body)
