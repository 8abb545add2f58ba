"""darknight worker passes everything on to `python -m darknight.worker`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.command import clean_environment
from darknight.cli import worker as command
from darknight.cli.app import run
from darknight.wire.identity import ENCLAVE, Identity
from darknight.worker.options import read_options


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["-h"],
        ["--version"],
        ["--listen", "127.0.0.1:0", "--allow-enclave", "a.pem", "--allow-enclave=b.pem", "--log-level", "debug"],
        ["--no-such-flag", "value", "word"],
    ],
)
@pytest.mark.parametrize("code", [0, 2, 130])
def test_arguments_and_exit_codes_go_through_unchanged(monkeypatch, arguments, code):
    seen = []
    monkeypatch.setattr(command, "main", lambda given: seen.append(given) or code)
    assert run(["worker", *arguments]) == code
    assert seen == [arguments]


def test_settings_come_from_flags_then_variables_then_the_file(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(command, "main", lambda given: seen.append(read_options(given)) or 0)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DARKNIGHT_")}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(read_options, "__defaults__", (kept,))
    monkeypatch.chdir(tmp_path)
    Path("darknight.toml").write_text(
        '[worker]\nthreads = 2\noperator = "file"\ngrace = 1.5\nmemory-limit = "1GiB"\nallow-enclave = ["a", "b"]\n'
    )
    kept["DARKNIGHT_WORKER_OPERATOR"] = "variable"
    assert run(["worker", "--grace", "3"]) == 0
    (options,) = seen
    assert (options.threads, options.operator, options.grace, options.memory_limit) == (2, "variable", 3, 1 << 30)
    assert options.allow_enclave == (Path("a"), Path("b"))
    assert run(["worker", "--allow-enclave", "c"]) == 0
    assert seen[1].allow_enclave == (Path("c"),)


def test_the_file_makes_no_worker_hostile(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DARKNIGHT_INSECURE_HOSTILE", "1")
    Path("darknight.toml").write_text('[worker]\nhostile = "noise"\n')
    assert run(["worker", "--allow-enclave", "c"]) == 2
    assert "unknown key in [worker]: hostile" in " ".join(capfd.readouterr().err.split())


def test_the_worker_speaks_for_itself(capfd, monkeypatch):
    monkeypatch.delenv("DARKNIGHT_WORKER_ALLOW_ENCLAVE", raising=False)
    assert run(["worker", "--help"]) == 0
    assert "--memory-limit" in capfd.readouterr().out
    assert run(["worker"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("darknight worker: error: ")
    assert "darknight fleet identity" in said


def test_it_is_listed_among_the_commands(capfd):
    run(["--help"])
    listed = capfd.readouterr().out
    assert "worker" in listed
    assert "fleet" in listed


def test_it_runs_and_stops(tmp_path):
    """The enclave's half of the program is loaded here too, and must not keep the worker from TLS 1.3 alone."""
    Identity.load_or_create(tmp_path / "enclave", ENCLAVE)
    arguments = "worker --listen 127.0.0.1:0 --allow-enclave enclave/certificate.pem --state state"
    process = subprocess.Popen(
        [sys.executable, "-m", "darknight.cli", *arguments.split()],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = ""
        while "[[worker]]" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            said += line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
