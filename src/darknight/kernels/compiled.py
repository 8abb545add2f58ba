"""The libraries built from the C files beside this one: whether this installation has and takes them.

Plain shared libraries without Python's headers, called through ctypes, which lets other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from darknight.errors import UsageError

VARIABLE = "DARKNIGHT_KERNELS"  # "reference" or "compiled"; without it, compiled where it is installed

_logger = logging.getLogger("darknight.kernels")

Function = Callable[..., Any]


@cache
def wanted() -> bool:
    """Whether the libraries are taken; else the reference is. Said once in the log."""
    wish = os.environ.get(VARIABLE, "")
    if wish not in ("", "reference", "compiled"):
        raise UsageError(f"{VARIABLE}={wish!r}; known are reference and compiled.")
    taken = wish != "reference" and installed()
    if not taken and wish == "compiled":
        raise UsageError(
            f"{VARIABLE}=compiled, but this installation has no compiled kernels. Install DarKnight where there is a C "
            "compiler."
        )
    if not taken and not wish:
        _logger.warning(
            "no compiled kernels in this installation: masking and checks take several times as long. "
            "Install DarKnight where there is a C compiler to have them."
        )
    else:
        _logger.info("kernels: %s", "compiled" if taken else "reference")
    return taken


def installed() -> bool:
    """Whether there are libraries of these sources."""
    return loaded("residues", "darknight_weigh_3", (ctypes.c_void_p,)) is not None


def loaded(name: str, symbol: str, arguments: Sequence[type], result: type | None = None) -> Function | None:
    """A function of NAME.c; None where there is no library, or one that is not of these sources or this machine."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_{name}{suffix}")
        if path.exists():
            try:
                function = getattr(ctypes.CDLL(str(path)), symbol)
            except (OSError, AttributeError):
                return None
            function.argtypes, function.restype = arguments, result
            found: Function = function
            return found
    return None
