"""What this machine is, and which version of the program runs: enough to know which figures can be compared.

No name, address or number of it: a history may be shown to anybody.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from darknight import __version__
from darknight.kernels.compiled import wanted
from darknight.memory import large_page_settings

_HERE = Path(__file__).parent
_PATIENCE = 10.0


def machine() -> dict[str, str | int]:
    """What decides how fast it is. Two lines of a history with the same are compared."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "system": f"{platform.system()} {platform.machine()}",
        "large_pages": ", ".join(f"{whose} {when}" for whose, when in large_page_settings().items()),
    }


def program() -> dict[str, str | bool | None]:
    """Versions. commit: of the sources, where they are a git checkout, with a + if files were changed since."""
    return {
        "version": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "compiled_kernels": wanted(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str | None:
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit and commit + ("+" if _git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    """Of the folder of this file: where the program is installed without its sources, it is no checkout."""
    done = subprocess.run(
        ["git", "-C", str(_HERE), *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=True
    )
    return done.stdout.strip()
