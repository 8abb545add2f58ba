"""Real workers, as an operator starts them, and what a process leaves behind."""

import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import warm
from darknight.wire.identity import CERTIFICATE_FILE, ENCLAVE, Identity


@dataclass(frozen=True)
class Worker:
    """A worker's process, where it listens and waits with pipes, and the entry that it printed for the fleet file."""

    process: subprocess.Popen[str]
    address: str
    pipe_port: int | None
    entry: str


def launch(
    folder: Path, operator: str, *, listen: str = "127.0.0.1:0", cold: bool = False, **flags: str
) -> subprocess.Popen[str]:
    """Starts `python -m darknight.worker`; its state is folder/operator, its enclave that of folder/enclave.

    cold: in an interpreter of its own, which takes seconds (see warm.py).
    """
    Identity.load_or_create(folder / "enclave", ENCLAVE)
    command = ["-m", "darknight.worker", "--listen", listen, "--operator", operator]
    command += ["--state", str(folder / operator), "--allow-enclave", str(folder / "enclave" / CERTIFICATE_FILE)]
    command += ["--threads", "1", "--log-level", "error"]
    command += [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DARKNIGHT_")}
    return warm.start(command, stdout=subprocess.PIPE, env=kept, cwd=folder, cold=cold)


def announced(process: subprocess.Popen[str]) -> Worker:
    """Waits until the worker says where it is."""
    said = ""
    while said.count("'''") < 2:
        line = process.stdout.readline()
        assert line, f"the worker ended with {process.wait()}: {said}"
        said += line
    (address,) = [line.split()[1] for line in said.splitlines() if line.strip().startswith("listening")]
    ports = [int(line.split()[2]) for line in said.splitlines() if line.strip().startswith("pipes")]
    return Worker(process, address, ports[0] if ports else None, said[said.index("[[worker]]") :])


@contextmanager
def ending(*processes: subprocess.Popen[str]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


@contextmanager
def real_workers(folder: Path, flags: dict[str, dict[str, str]]) -> Iterator[list[Worker]]:
    """Starts one for each operator, side by side, with the operator's flags."""
    with ExitStack() as stack:
        processes = []
        for operator, own in flags.items():
            processes.append(launch(folder, operator, **own))
            stack.enter_context(ending(processes[-1]))
        yield [announced(process) for process in processes]


def free_port() -> int:
    """A port that nobody gets by chance meanwhile: below the range from which the system chooses, if it leaves any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, suppress(OSError):  # it is taken
            probe.bind(("127.0.0.1", secrets.choice(range(10_000, first)) if first > 20_000 else 0))
            return probe.getsockname()[1]


def eventually(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether it becomes true in that time. For what nobody reports, such as the end of somebody else's child."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.02)
    return True


def alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not yet fetched by its parent does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
