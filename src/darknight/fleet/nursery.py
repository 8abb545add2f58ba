"""The enclave's half of the nursery: the process that starts workers on this machine, and takes them with it.

`python -m darknight.worker.nursery` loads torch once and forks a worker for each line of its order. It is told
everything on its standard input and reports on its standard output, a JSON object a line; when its standard input ends,
for whatever reason, it kills its workers and ends. So workers never outlive this process, however it dies.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from darknight.errors import FleetError
from darknight.wire import LinkClosed
from darknight.wire.hostile import INSECURE_VARIABLE

START_SECONDS = 60.0
STOP_SECONDS = 5.0
_LONGEST_LINE = 1 << 16

# What of the environment a worker on this machine gets: where programs and libraries are, and how they use processors.
# Everything else may be somebody's secret.
_PASSED_ON = {"HOME", "LANG", "LANGUAGE", "PATH", "PYTHONHOME", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
_PASSED_ON_FAMILIES = ("LC_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "CUDA_", "NVIDIA_", "TORCH_", "PYTORCH_", "ATEN_")

_log = logging.getLogger("darknight.worker")


@dataclass(frozen=True, kw_only=True)
class Berth:
    """What one worker is started with. recorder: the worker's end of a socket for its transcript, closed here then.

    hostile: the plan of a worker that lies.
    """

    operator: str
    threads: int
    shared_memory: str | None = None
    recorder: socket.socket | None = None
    memory_limit: int | None = None
    hostile: str | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where a worker is, and the certificate of the key that it made for itself."""

    pid: int
    address: str
    certificate: bytes


class Nursery:
    """Worker processes of this machine, by number.

    enclave: the certificate that they serve, PEM; its key stays here.
    """

    def __init__(self, berths: Sequence[Berth], *, enclave: bytes) -> None:
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._reports: dict[int, Report] = {}
        self._exited: dict[int, int] = {}
        self._said: deque[str] = deque(maxlen=20)
        self._count = len(berths)
        self._stopped = False
        self._readers: list[threading.Thread] = []
        order = {
            "workers": [_words(berth) for berth in berths],
            "allow_enclave": enclave.decode(),
            "parent": self._owner,
        }
        try:
            self._process = self._start(berths)
        finally:
            for berth in berths:
                if berth.recorder is not None:
                    berth.recorder.close()
        _open.add(self)
        try:
            self._read_with(self._read_reports, self._process.stdout)
            self._read_with(self._read_words, self._process.stderr)
            self._tell(order)
        except BaseException:  # Ctrl-C at this very moment
            self.stop()
            raise

    @staticmethod
    def _start(berths: Sequence[Berth]) -> subprocess.Popen[bytes]:
        # -P: the current folder is not searched for modules; sys.path says where this process found them.
        command = [sys.executable, "-P", "-m", "darknight.worker.nursery"]
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environment(insecure=any(berth.hostile is not None for berth in berths)),
                pass_fds=[berth.recorder.fileno() for berth in berths if berth.recorder is not None],
                start_new_session=True,  # Ctrl-C is for this process, which then decides
            )
        except OSError as error:
            raise FleetError(
                f"cannot start workers: {sys.executable or 'no interpreter is known'}: {error.strerror}. "
                "Use dk.connect with workers that were started by hand."
            ) from error

    # --- what others ask --------------------------------------------------------------------------------------------
    @property
    def processes(self) -> dict[int, int]:
        """The process id of every worker that runs."""
        with self._changed:
            return {worker: report.pid for worker, report in sorted(self._reports.items())}

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Waits until every worker serves. Raises FleetError, with what the nursery wrote, if one does not."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._reports) < self._count:
                left = deadline - time.monotonic()
                if self._stopped or self._exited or left <= 0:
                    break
                self._changed.wait(left)
            else:
                return
            missing = sorted(set(range(self._count)) - self._reports.keys())
            why = "the program that starts them ended" if self._stopped else f"not all were ready in {seconds:.0f} s"
            if self._exited:
                why = "a worker ended while it started"
        self.stop()
        words = " ".join(" ".join(self._said).split())[-2000:]
        raise FleetError(
            f"local workers {', '.join(map(str, missing))} did not start: {why}. "
            f"It wrote: {words or '(nothing)'}. Does `{sys.executable} -m darknight.worker --help` run?"
        )

    def report(self, worker: int, seconds: float) -> Report:
        """Where `worker` is, as soon as it says so. Raises LinkClosed if it ended, or says nothing in that time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while worker not in self._reports:
                if self._stopped:
                    raise LinkClosed("the local workers were stopped")
                if worker in self._exited:
                    raise LinkClosed(f"its process ended with code {self._exited[worker]}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise LinkClosed(f"its process was not ready in {seconds:.0f} s")
                self._changed.wait(left)
            return self._reports[worker]

    def restart(self, worker: int) -> None:
        """Ends the worker's process if it still runs, and starts another one in its place."""
        with self._changed:
            if self._stopped:
                raise FleetError("the local workers were stopped. Start another fleet.")
            self._reports.pop(worker, None)
            self._exited.pop(worker, None)
        self._tell({"restart": worker})

    def stop(self) -> None:
        """Ends all workers. A second time, or in a process that was forked from the one that started them: nothing."""
        if os.getpid() != self._owner:
            return
        _open.discard(self)
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        try:
            self._close_control()
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self._process.poll() is None:
                # The nursery leads a session of its own, so this is the nursery and its workers and nobody else.
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        for reader in self._readers:
            if reader is not threading.current_thread() and reader.ident is not None:
                reader.join(STOP_SECONDS)

    def forked(self) -> None:
        """In a child of this process: workers must not stay alive because the child holds the pipe open."""
        self._close_control()

    # --- the conversation -------------------------------------------------------------------------------------------
    def _read_with(self, read: Callable[[Any], None], stream: object) -> None:
        reader = threading.Thread(target=read, args=(stream,), name="darknight-nursery", daemon=True)
        self._readers.append(reader)
        reader.start()

    def _tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it ended; whoever waits for its report is told so
            left = memoryview(f"{json.dumps(line)}\n".encode())
            while left:
                left = left[self._process.stdin.write(left) :]

    def _close_control(self) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def _read_reports(self, stream: io.FileIO) -> None:
        with io.BufferedReader(stream) as lines:
            for line in iter(lambda: lines.readline(_LONGEST_LINE), b""):
                try:
                    self._reported(json.loads(line))
                except (ValueError, KeyError, TypeError, AttributeError):
                    _log.warning("the nursery of local workers reported something that is no report")
        with self._changed:
            self._stopped = True
            self._reports.clear()  # it is dead, and its workers with it
            self._changed.notify_all()

    def _reported(self, line: dict[str, Any]) -> None:
        worker = int(line["worker"])
        with self._changed:
            if "exited" in line:
                _log.info("local worker %d: its process ended with code %s", worker, line["exited"])
                self._exited[worker] = line["exited"]
                self._reports.pop(worker, None)
            else:
                self._exited.pop(worker, None)
                self._reports[worker] = Report(
                    pid=line["pid"], address=line["address"], certificate=line["certificate"].encode()
                )
            self._changed.notify_all()

    def _read_words(self, stream: io.FileIO) -> None:
        with io.BufferedReader(stream) as lines:
            for line in iter(lambda: lines.readline(_LONGEST_LINE), b""):
                text = "".join(sign if sign.isprintable() else " " for sign in line.decode(errors="replace").rstrip())
                self._said.append(text[:500])
                _log.debug("%s", text)


def _words(berth: Berth) -> dict[str, Any]:
    return {
        "operator": berth.operator,
        "shared_memory": berth.shared_memory,
        "record_fd": berth.recorder and berth.recorder.fileno(),
        "threads": berth.threads,
        "memory_limit": berth.memory_limit,
        "hostile": berth.hostile,
    }


def environment(*, insecure: bool = False) -> dict[str, str]:
    """What a local worker's process gets: the way to this very package, and nothing that could be secret.

    insecure: with the variable without which no worker lies, if this process has it.
    """
    passed_on = _PASSED_ON | ({INSECURE_VARIABLE} if insecure else set())
    kept = {
        name: value for name, value in os.environ.items() if name in passed_on or name.startswith(_PASSED_ON_FAMILIES)
    }
    here = str(Path(__file__).resolve().parents[2])
    folders = dict.fromkeys([*(os.path.abspath(entry) for entry in sys.path), here])
    # Passive: all workers share one machine, where threads that spin while they wait take it from those that compute.
    return {"OMP_WAIT_POLICY": "PASSIVE", **kept, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"}


_open: weakref.WeakSet[Nursery] = weakref.WeakSet()


def _after_fork() -> None:
    for nursery in list(_open):
        nursery.forked()


os.register_at_fork(after_in_child=_after_fork)
