"""Real processes of `darknight` that start at once: forked from one that has loaded torch already, which takes seconds.

`start` and `run` are for tests of what a program does, and `for_local_fleets` for the workers of dk.local_fleet. Tests
of how a program starts, and at least one of each command, take `subprocess`; with --full (make test-all) everything
does, also behind these functions.

The process to fork from is this file, run as a program. It has one thread, so that a fork of it is as good as new. A
client connects to its socket, once for each process, and sends

    a JSON object a line: program (as after `python`), cwd, environment, session (whether it leads one of its own), and
    the numbers of the descriptors that come with it: 0, 1, 2 and others

and is told the process's number and, when it has ended, how. Whoever disconnects before that has it killed.
"""

import array
import atexit
import fcntl
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
cold = False  # set by its fixture cold_fleets: local fleets too


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
    """What subprocess.Popen would be, as far as tests need it. pass_fds: of the order's numbers, as there."""

    def __init__(self, program, *, cwd, env, stdin, stdout, stderr, text=True, pass_fds=(), start_new_session=False):
        self.args, self.returncode = [*program], None
        given = []
        for number, (name, where) in enumerate((("stdin", stdin), ("stdout", stdout), ("stderr", stderr))):
            setattr(self, name, None)
            if where == PIPE:
                ends = os.pipe()
                ours, theirs = ends if number else reversed(ends)
                mode = "r" if number else "w"
                file = open(ours, mode) if text else open(ours, f"{mode}b", buffering=0)  # noqa: SIM115
                setattr(self, name, file)
            elif where == DEVNULL:
                theirs = os.open(os.devnull, os.O_RDWR)
            else:
                file = number if where is None else where
                theirs = os.dup(file if isinstance(file, int) else file.fileno())
            given.append(theirs)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address())
        numbered = dict(zip((0, 1, 2), given, strict=True)) | {number: number for number in pass_fds}
        order(self._socket, program, os.fspath(cwd), env, numbered, session=start_new_session)
        for descriptor in given:
            os.close(descriptor)
        self._heard = b""
        self.pid = self._told(None)

    def _told(self, timeout):
        """The next number from there."""
        self._socket.settimeout(timeout)
        while b"\n" not in self._heard:
            part = self._socket.recv(64)
            assert part, "the process to fork from is gone"
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return int(line)

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout=None):
        if self.returncode is None:
            try:
                self.returncode = self._told(timeout)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
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
        order(connection, ["-m", "darknight.cli", *sys.argv[1:]], os.getcwd(), os.environ, {0: 0, 1: 1, 2: 2})
        pid, _, code = connection.recv(16).decode().partition("\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(int(pid), number))
        ended = int(code or connection.recv(16))
    if ended < 0:
        signal.signal(-ended, signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    return ended


def order(connection, program, cwd, environment, descriptors, *, session=False) -> None:
    """descriptors: those of this process, by the number that the other one is to have them under."""
    words = {"program": [*program], "cwd": cwd, "environment": {**environment}, "session": session}
    whole = json.dumps({**words, "numbers": [*descriptors]}).encode() + b"\n"
    kind = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors.values()))
    sent = connection.sendmsg([whole], [kind])
    connection.sendall(whole[sent:])


def for_local_fleets() -> None:
    """From now on, dk.local_fleet of this process starts its workers so; but see the fixture cold_fleets."""
    from darknight.fleet import nursery  # not above: who stands for a command in a shell has no such package

    cold_start = nursery.Nursery._start

    def warm_start(berths):
        if fresh or cold:
            return cold_start(berths)
        environment = nursery.environment(insecure=any(berth.hostile is not None for berth in berths))
        recorders = [berth.recorder.fileno() for berth in berths if berth.recorder is not None]
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "text": False}
        program = ["-m", "darknight.worker.nursery"]
        return Process(program, cwd=os.getcwd(), env=environment, pass_fds=recorders, start_new_session=True, **pipes)

    nursery.Nursery._start = staticmethod(warm_start)


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


def own_process() -> int | None:
    """The number of the process to fork from, if there is one: it stays when the processes of a test have ended."""
    return None if _server is None else _server.pid


def _end(server: subprocess.Popen[bytes]) -> None:
    server.communicate()  # closes its standard input


# What torch, the datasets and the pictures load when they are first used.
LATER = ("torch._dynamo", "sklearn.datasets", "matplotlib.figure", "matplotlib.backends.backend_agg")


# --- in the process to fork from --------------------------------------------------------------------------------------
def main() -> None:
    _load()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{sys.argv[1]}")
    listener.listen(64)
    os.write(1, b"ready\n")
    if (words := _serve(listener)) is None:
        return
    try:
        _become(words)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        # As Python ends, but without a last look at all that was loaded, which would copy it.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


def _load() -> None:
    """All that a command may need."""
    sys.path[0] = str(Path(__file__).parent)
    app = import_module("darknight.cli.app")
    for load in app.COMMANDS.values():
        load()
    for name in ("darknight.runtime", "darknight.worker.program", "darknight.service", *LATER):
        import_module(name)
    import_module("darknight.worker.engine").LocalEngine(threads=1)  # which proves its strategies, once for a program
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
                if words is None:
                    client.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    for each in (client, *(key.fileobj for key in list(selector.get_map().values()))):
                        os.close(each) if isinstance(each, int) else each.close()  # what is ours, and not the fork's
                    selector.close()
                    _take(given, words["numbers"])
                    return words
                running.add(pid)
                for descriptor in given:
                    os.close(descriptor)
                with suppress(OSError):  # the client is gone: that is noticed below
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


def _take(given: list[int], numbers: list[int]) -> None:
    """Under the numbers that are wanted. First all out of the way: one may have the number that is another's."""
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512) for descriptor in given]
    for descriptor in given:
        os.close(descriptor)
    for descriptor, number in zip(away, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _ordered(client: socket.socket) -> tuple[dict | None, list[int]]:
    """None from one that left before it had said everything."""
    whole, given, _, _ = socket.recv_fds(client, 1 << 20, 64)
    while not whole.endswith(b"\n"):
        part = client.recv(1 << 20)
        if not part:
            for descriptor in given:
                os.close(descriptor)
            return None, []
        whole += part
    return json.loads(whole), given


def _become(words: dict) -> None:
    global _address, _server
    if words["session"]:
        os.setsid()
    os.chdir(words["cwd"])
    os.environ.clear()
    os.environ.update(words["environment"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        mode, errors = ("r", "strict") if number == 0 else ("w", "strict" if number == 1 else "backslashreplace")
        file = open(number, mode, buffering=1 if number == 2 or os.isatty(number) else -1, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    sys.modules["warm"] = sys.modules["__main__"]
    _address, _server = f"\0{sys.argv[1]}", "this process came from it"
    for_local_fleets()
    torch = import_module("torch")
    torch.set_num_threads(torch.get_num_threads())  # its threads, of a fork: two of ours that begin at once find none
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
