"""The worker's command line: what it accepts, and what it says to what it does not."""

import logging
import re
import socket

import pytest

from darknight.errors import FleetError
from darknight.wire.identity import ENCLAVE, WORKER, Identity
from darknight.worker import program
from darknight.worker.options import read_options


@pytest.fixture
def certificate(tmp_path):
    Identity.load_or_create(tmp_path / "enclave", ENCLAVE)
    return tmp_path / "enclave" / "certificate.pem"


@pytest.fixture(autouse=True)
def nothing_changes(monkeypatch):
    """The program sets up logs and a memory wall for its process; this one is the tests'."""
    monkeypatch.setattr(program, "set_up_logs", lambda level, form: logging.getLogger("darknight"))
    monkeypatch.setattr(program, "wall_off", lambda limit: None)
    monkeypatch.setattr(program, "open_more_files", lambda: None)


def test_defaults():
    found = read_options(["--allow-enclave", "a.pem"], {"XDG_DATA_HOME": "/data"})
    assert (found.listen, found.device, found.engine) == ("127.0.0.1:7001", "cpu", "local")
    assert (found.metrics, found.memory_limit, found.shared_memory) == (None, None, None)
    assert found.strategy == "measured"
    assert str(found.state) == "/data/darknight/worker"
    assert [str(path) for path in found.allow_enclave] == ["a.pem"]


def test_every_flag_has_a_variable_and_wins_over_it():
    flags = {
        "listen": ("0.0.0.0:7002", "0.0.0.0:7002"),
        "device": ("cuda:1", "cuda:1"),
        "threads": ("3", 3),
        "memory_limit": ("2GiB", 2 << 30),
        "operator": ("acme", "acme"),
        "engine": ("ray", "ray"),
        "ray_address": ("auto", "auto"),
        "ray_actors": ("2", 2),
        "metrics": ("[::1]:9000", ("::1", 9000)),
        "enclaves": ("7", 7),
        "shared_memory": ("@name", "@name"),
        "grace": ("1.5", 1.5),
        "log_level": ("debug", "debug"),
        "log_format": ("json", "json"),
    }
    variables = {f"DARKNIGHT_WORKER_{name.upper()}": text for name, (text, _) in flags.items()}
    variables |= {"DARKNIGHT_WORKER_ALLOW_ENCLAVE": "a.pem:b.pem", "DARKNIGHT_WORKER_STATE": "/state"}
    found = read_options([], variables)
    assert {name: getattr(found, name) for name in flags} == {name: value for name, (_, value) in flags.items()}
    assert [str(path) for path in found.allow_enclave] == ["a.pem", "b.pem"]
    assert str(found.state) == "/state"
    arguments = [part for name, (text, _) in flags.items() for part in (f"--{name.replace('_', '-')}", text)]
    other = {name: "nonsense" for name in variables if name != "DARKNIGHT_WORKER_STATE"}
    assert read_options([*arguments, "--allow-enclave", "c.pem"], other).threads == 3


def test_the_strategy_can_be_fixed_by_flag_and_variable():
    variables = {"DARKNIGHT_WORKER_STRATEGY": "int8-unfolded", "DARKNIGHT_WORKER_ALLOW_ENCLAVE": "a.pem"}
    assert read_options([], variables).strategy == "int8-unfolded"
    assert read_options(["--strategy", "float64"], variables).strategy == "float64"


def test_help_has_an_example_the_exit_codes_and_every_flag(capsys):
    assert program.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "python -m darknight.worker --listen" in text
    assert re.search(r"exit codes: 0 .*1 .*2 .*130", text)
    for flag in ("listen", "device", "threads", "memory-limit", "operator", "engine", "ray-address", "allow-enclave"):
        assert f"--{flag} " in text
    for flag in ("state", "metrics", "enclaves", "shared-memory", "grace", "log-level", "log-format"):
        assert f"--{flag} " in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], r"--allow-enclave CERT is missing.*darknight fleet identity"),
        (["--listen", "nowhere"], r"argument --listen: \"nowhere\" is not HOST:PORT"),
        (["--listen", "127.0.0.1:70000"], "is not HOST:PORT"),
        (["--memory-limit", "8GB"], r"\"8GB\" is not a size.*8GiB"),
        (["--threads", "0"], "not a number from 1"),
        (["--engine", "magic"], "is none of local, ray"),
        (["--strategy", "fast"], "is none of measured, float64, .*int8-unfolded"),
        (["--strategy", "float64", "--engine", "ray", "--allow-enclave", "CERT"], "every actor .* measures its own"),
        (["--grace", "nan"], "not a number of seconds"),
        (["--operator", "a\nb"], "printable"),
        (["--allow-enclave", "CERT", "--hostile", "noise"], "argument --hostile: .*never where data is real"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--ray-address", "auto", "--allow-enclave", "CERT"], "add --engine ray"),
        (["--allow-enclave", "missing.pem"], "missing.pem cannot be read"),
        (["--allow-enclave", "CERT", "--allow-enclave", "CERT"], "same certificate"),
        (["--allow-enclave", "CERT", "--device", "cuda:77"], "cuda:77 is not in this machine"),
        (["--allow-enclave", "CERT", "--device", "abacus"], "use cpu or cuda:N"),
    ],
)
def test_mistakes_are_explained_in_one_line(arguments, words, certificate, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DARKNIGHT_INSECURE_HOSTILE", raising=False)
    given = [str(certificate) if part == "CERT" else part for part in arguments]
    assert program.main(["--state", str(tmp_path / "state"), *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("darknight worker: error: ")
    assert said.err.count("\n") == 1
    assert re.search(words, said.err)
    assert not (tmp_path / "state").exists()  # a worker that does not start leaves nothing behind


def test_a_hostile_plan_is_a_flag_and_needs_its_variable(capsys):
    insecure = {"DARKNIGHT_INSECURE_HOSTILE": "1"}
    arguments = ["--allow-enclave", "a.pem", "--hostile", "noise:passes=forward"]
    assert read_options(arguments, insecure).hostile.text == "noise:passes=forward"
    assert read_options(arguments[:2], {**insecure, "DARKNIGHT_WORKER_HOSTILE": "noise"}).hostile is None
    for given, environment, words in (
        (arguments, {}, "argument --hostile: .*never where data is real.*set the environment variable"),
        (arguments, {"DARKNIGHT_INSECURE_HOSTILE": "0"}, "never where data is real"),
        ([*arguments[:3], "charm"], insecure, 'argument --hostile: hostile plan: no attack is called "charm"'),
        ([*arguments[:3], "@nowhere"], insecure, "argument --hostile: .*cannot be read"),
    ):
        with pytest.raises(SystemExit) as end:
            read_options(given, environment)
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert re.search(words, said)


def test_a_wrong_variable_is_blamed_and_not_its_flag(capsys):
    with pytest.raises(SystemExit):
        read_options(["--allow-enclave", "a.pem"], {"DARKNIGHT_WORKER_THREADS": "abc"})
    said = capsys.readouterr().err
    assert 'variable DARKNIGHT_WORKER_THREADS: "abc" is not a number from 1 to 4096.' in said
    assert "--threads" not in said
    help_text = {"DARKNIGHT_WORKER_LISTEN": "127.0.0.1:1"}
    with pytest.raises(SystemExit):
        read_options(["--help"], help_text)
    assert "(default 127.0.0.1:1)" in " ".join(capsys.readouterr().out.split())


def test_a_second_worker_with_the_same_state_is_refused(tmp_path):
    """With two processes: tests/worker/test_program.py."""
    Identity.load_or_create(tmp_path, WORKER)
    with program._key_in_use(tmp_path), pytest.raises(FleetError, match=r"another worker runs with --state .*stop the"):
        program._key_in_use(tmp_path).__enter__()
    with program._key_in_use(tmp_path):  # whoever let go of it left nothing behind
        pass


@pytest.mark.parametrize("size", ["512", "8B", "1023KiB"])
def test_a_limit_whose_unit_was_forgotten_is_refused(capsys, size):
    with pytest.raises(SystemExit):
        read_options(["--allow-enclave", "a.pem", "--memory-limit", size], {})
    assert f'"{size}" is ' in (said := capsys.readouterr().err)
    assert "Write 512MiB or 8GiB." in said
    assert read_options(["--allow-enclave", "a.pem", "--memory-limit", "1MiB"], {}).memory_limit == 1 << 20


def test_a_limit_beyond_the_machine_is_noted_in_the_log(caplog, monkeypatch):
    monkeypatch.setattr(program, "available_memory", lambda: 4 << 30)
    for size, lines in (("4GiB", 0), ("5GiB", 1)):
        options = read_options(["--allow-enclave", "a.pem", "--memory-limit", size], {})
        assert program._memory_limit(options) == options.memory_limit
        assert len(caplog.records) == lines
    assert "--memory-limit is more than this machine" in caplog.records[0].getMessage()


def test_one_of_a_thing_and_several():
    assert [program._counted(number, "thread") for number in (1, 2)] == ["1 thread", "2 threads"]


def test_a_port_that_is_taken_is_a_failure_and_not_wrong_usage(certificate, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        common = ["--state", str(tmp_path / "state"), "--allow-enclave", str(certificate)]
        assert program.main([*common, "--listen", address]) == 1
        assert f"cannot listen at {address}" in capsys.readouterr().err
        assert program.main([*common, "--listen", "127.0.0.1:0", "--metrics", address]) == 1
        assert f"--metrics {address}: cannot listen there" in capsys.readouterr().err


def test_a_damaged_state_folder_is_explained(certificate, tmp_path, capsys):
    state = tmp_path / "state"
    state.mkdir()
    (state / "key.pem").write_text("nothing")
    assert program.main(["--state", str(state), "--allow-enclave", str(certificate)]) == 2
    assert "certificate.pem" in capsys.readouterr().err
