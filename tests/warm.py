"""Real processes of `darknight` that start at once: forked from one that has loaded torch already, which takes seconds.

`start` and `run` are for tests of what a program does. Tests of how it starts, and at least one of each command, take
`subprocess`; with --full (make test-all) everything does, also behind `start` and `run`.

The process to fork from is this file, run as a program. It has one thread and computes nothing, so that a fork of it is
as good as new. A client connects to its socket, once for each process, and sends

    a JSON object a line: program (as after `python`), cwd, environment; with it the descriptors 0, 1 and 2

and is told the process's number and, when it has ended, how. Whoever disconnects before that has it killed.
"""

import array
import atexit
import gc
import json
import os
import runpy
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

fresh = False  # set by conftest.py: start everything from nothing


# --- for tests --------------------------------------------------------------------------------------------------------
def start(
    program: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdin: int | None = DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    cold: bool = False,
) -> "Process | subprocess.Popen[str]":
    """`python PROGRAM`, where program is ["-m", module, ...] or [path, ...], with the arguments of subprocess.Popen.

    cold: from nothing all the same.
    """
    if fresh or cold:
        return subprocess.Popen(
            [sys.executable, *program], cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=True
        )
    return Process(program, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)


def run(program: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """To its end, with what it said."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = start(program, cwd=cwd, env=env, stdout=said.fileno(), stderr=complained.fileno())
        try:
            code = process.wait(600)
        finally:
            process.kill()
        for file in (said, complained):
            file.seek(0)
        return subprocess.CompletedProcess([*program], code, said.read(), complained.read())


class Process:
    """What subprocess.Popen would be, as far as tests need it."""

    def __init__(self, program, *, cwd, env, stdin, stdout, stderr):
        self.args, self.returncode = [*program], None
        self.stdout = self.stderr = None
        given = [os.open(os.devnull, os.O_RDONLY) if stdin is DEVNULL else os.dup(0 if stdin is None else stdin)]
        for name, number, where in (("stdout", 1, stdout), ("stderr", 2, stderr)):
            if where == PIPE:
                ours, theirs = os.pipe()
                setattr(self, name, open(ours))  # noqa: SIM115 - as long as this object
            elif where == DEVNULL:
                theirs = os.open(os.devnull, os.O_WRONLY)
            else:
                file = number if where is None else where
                theirs = os.dup(file if isinstance(file, int) else file.fileno())
            given.append(theirs)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address())
        order(self._socket, program, os.fspath(cwd), env, given)
        for descriptor in given:
            os.close(descriptor)
        self._lines = self._socket.makefile()
        self.pid = int(self._lines.readline())

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout=None):
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self.returncode = int(self._socket.recv(16))  # in one piece: nothing else is ever sent
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._lines.close()
            self._socket.close()
        return self.returncode

    def communicate(self, timeout=None):
        said, threads = {}, []
        for pipe in filter(None, (self.stdout, self.stderr)):
            threads.append(threading.Thread(target=lambda pipe=pipe: said.update({pipe: pipe.read()}), daemon=True))
            threads[-1].start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return said.get(self.stdout), said.get(self.stderr)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def command(folder: Path) -> Path:
    """An executable `darknight` in a folder of its own: for a shell, what the installed one is, and started at once."""
    if fresh:
        return Path(sys.executable).parent
    script = folder / "darknight"
    script.write_text(f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n")
    with script.open("a") as file:
        file.write(f"import warm\nsys.exit(warm.stand_for({address()!r}))\n")
    script.chmod(0o755)
    return folder


def stand_for(where: str) -> int:
    """In the shell's own child: a process from there in its place, with its signals and its end."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(where)
        order(connection, ["-m", "darknight.cli", *sys.argv[1:]], os.getcwd(), os.environ, [0, 1, 2])
        pid, _, code = connection.recv(16).decode().partition("\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(int(pid), number))
        ended = int(code or connection.recv(16))
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    return ended


def order(connection, program, cwd, environment, descriptors) -> None:
    words = {"program": [*program], "cwd": cwd, "environment": {**environment}}
    whole = json.dumps(words).encode() + b"\n"
    kind = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    sent = connection.sendmsg([whole], [kind])
    connection.sendall(whole[sent:])


_server: subprocess.Popen[bytes] | None = None
_address = ""


def address() -> str:
    """Of the process to fork from, which is started when it is first asked for, and ends with this one."""
    global _server, _address
    if _server is None:
        _address = f"\0darknight-tests-{secrets.token_hex(8)}"
        # One thread, as every test has it that starts a process: it is read when torch is loaded.
        environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in environment.items() if not name.startswith("DARKNIGHT_")}
        _server = subprocess.Popen(
            [sys.executable, __file__, _address[1:]], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert _server.stdout is not None
        assert _server.stdout.readline() == b"ready\n"
        atexit.register(_end, _server)
    return _address


def _end(server: subprocess.Popen[bytes]) -> None:
    server.communicate()  # closes its standard input


# --- in the process to fork from --------------------------------------------------------------------------------------
def main() -> None:
    _load()
    assert threading.active_count() == 1, "a fork would lack the other threads"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{sys.argv[1]}")
    listener.listen(64)
    os.write(1, b"ready\n")
    if (words := _serve(listener)) is not None:
        _become(words)


def _load() -> None:
    """All that a command may need."""
    sys.path[0] = str(Path(__file__).parent)
    app = import_module("darknight.cli.app")
    for load in app.COMMANDS.values():
        load()
    for name in ("darknight.runtime", "darknight.worker.program", "darknight.service", "sklearn.datasets"):
        import_module(name)
    gc.freeze()  # what was loaded stays shared


def _serve(listener: socket.socket) -> dict | None:
    """None when the tests have ended; in a fork, what it is to become."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    running: set[int] = set()
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return None
            if key.fileobj is listener:
                client, _ = listener.accept()
                words, given = _ordered(client)
                pid = os.fork()
                if pid == 0:
                    for each in (client, *(key.fileobj for key in list(selector.get_map().values()))):
                        os.close(each) if isinstance(each, int) else each.close()  # what is ours, and not the fork's
                    selector.close()
                    for number, descriptor in enumerate(given):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    return words
                running.add(pid)
                for descriptor in given:
                    os.close(descriptor)
                client.sendall(f"{pid}\n".encode())
                selector.register(client, selectors.EVENT_READ, pid)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, client))
            elif isinstance(key.data, tuple):
                pid, client = key.data
                running.remove(pid)
                selector.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError):  # the client is gone
                    client.sendall(f"{code}\n".encode())
                with suppress(KeyError):  # it was gone before
                    selector.unregister(client)
                client.close()
            elif key.data in running:  # a client that left: it has nothing more to say
                os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)


def _ordered(client: socket.socket) -> tuple[dict, list[int]]:
    whole, given, _, _ = socket.recv_fds(client, 1 << 20, 3)
    while not whole.endswith(b"\n"):
        whole += client.recv(1 << 20)
    return json.loads(whole), given


def _become(words: dict) -> None:
    os.chdir(words["cwd"])
    os.environ.clear()
    os.environ.update(words["environment"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        mode, errors = ("r", "strict") if number == 0 else ("w", "strict" if number == 1 else "backslashreplace")
        file = open(number, mode, buffering=1 if number == 2 or os.isatty(number) else -1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    if words["program"][0] == "-m":
        sys.argv = words["program"][1:]
        sys.path[0] = words["cwd"]
        runpy.run_module(words["program"][1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words["program"]
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
