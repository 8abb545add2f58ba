"""A program of a rival, in an interpreter and a process of its own: asked a line, it answers a JSON object a line.

Rivals are no dependencies of ours, and their versions of other packages need not be ours: they are installed in an
environment of their own, and only a path leads there.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from darknight.errors import UsageError
from darknight.fleet.nursery import environment

# CrypTen asks for the package sklearn, a deprecated name that refuses to be installed without the variable.
INSTALL = """\
python -m venv rivals
SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True \\
    rivals/bin/pip install torch==2.13.0 crypten==0.4.1 tenseal==0.3.18"""
# glibc's settings, as keep_memory makes them for plain and ours: fresh memory would slow rivals down.
_KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}
_MOST_BYTES = 1 << 20  # of an answer
_LAST_WORDS = 300  # characters


class MissingError(Exception):
    """The interpreter does not have the rival's package. The message says what it has not."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn of a rival took, and what came of it: a loss, or scores."""

    seconds: float
    processor_seconds: float
    result: tuple[float, ...]


class RivalProcess:
    """`script` run by `python`; close ends it, whatever it does. patience: seconds that an answer may take.

    words: a file for what it says on its standard error, which is quoted when it fails.
    """

    def __init__(
        self,
        python: Path,
        script: str,
        arguments: Sequence[str],
        *,
        words: Path,
        settings: Mapping[str, str] | None = None,
        patience: float = 600.0,
    ) -> None:
        self.name = Path(script).stem
        self._patience = patience
        self._words = words
        # -I: neither our PYTHONPATH nor the current folder is searched for modules.
        command = [str(python), "-I", script, *arguments]
        try:
            with words.open("wb") as file:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    bufsize=0,
                    env={**environment(), **_KEPT_MEMORY, **(settings or {})},
                    start_new_session=True,  # Ctrl-C is for this process, which then closes it
                )
        except OSError as error:
            raise UsageError(
                f"{python}: {error.strerror}; needs the Python of an environment with the rivals:\n{INSTALL}"
            ) from None

    def __enter__(self) -> RivalProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ready(self) -> str:
        """Waits until it can take turns; its version. Raises MissingError."""
        answer = self._answer()
        if "missing" in answer:
            raise MissingError(str(answer["missing"]))
        if not isinstance(answer.get("ready"), str):
            raise self._failed("its first line does not say that it is ready")
        return str(answer["ready"])

    def begin(self) -> None:
        """Lets it take a turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
        except OSError:
            raise self._failed("it ended") from None

    def finish(self) -> Turn:
        """Waits for the turn that it began."""
        answer = self._answer()
        try:
            seconds, processor, result = (answer[name] for name in ("seconds", "processor_seconds", "result"))
            numbers = [float(value) for value in (seconds, processor, *result)]
        except (KeyError, TypeError, ValueError):
            raise self._failed("its answer is none to a turn") from None
        if not all(map(math.isfinite, numbers)) or numbers[0] <= 0 or not numbers[2:]:
            raise self._failed("its answer has numbers that cannot be")
        return Turn(seconds=numbers[0], processor_seconds=numbers[1], result=tuple(numbers[2:]))

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._line()
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._failed("its answer is not JSON") from None
        if not isinstance(answer, dict):
            raise self._failed("its answer is not a JSON object")
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        pipe, line, end = self._process.stdout.fileno(), b"", time.monotonic() + self._patience
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not readable:
                raise self._failed(f"no answer in {self._patience:.0f} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise self._failed("it ended")
            line += part
            if len(line) > _MOST_BYTES:
                raise self._failed("its answer does not end")
        return line

    def _failed(self, why: str) -> UsageError:
        said = self._words.read_text(errors="replace").strip()[-_LAST_WORDS:]
        quoted = f" It said, at last:\n{said}" if said else ""
        return UsageError(f"{self.name}: {why}. Install the rivals anew, as follows:\n{INSTALL}{quoted}")
