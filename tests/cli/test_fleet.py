"""darknight fleet: the enclave's certificate, the fleet file, its workers, and the cost of the wire."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest

from cli.command import refused
from darknight.cli.app import run
from darknight.cli.training_table import operator_words
from darknight.fleet.nursery import Berth, Nursery
from darknight.wire.identity import ENCLAVE, WORKER, Identity, fingerprint
from fleet.workers import free_port

OPERATORS = ("north", "south", "east", "east")
SEPARATE, SHARED = (0, 1, 2), (2, 3, 0)  # workers of three operators; and two of them of one


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Four workers of three operators, and a fleet file for any of them."""
    folder = tmp_path_factory.mktemp("site")
    identity = Identity.load_or_create(folder / "enclave", ENCLAVE)
    nursery = Nursery([Berth(operator=name, threads=1) for name in OPERATORS], enclave=identity.certificate)
    try:
        nursery.wait()
        reports = [nursery.report(worker, 10) for worker in range(len(OPERATORS))]

        def file(*workers, **replaced):
            text = "\n".join(entry(reports[j], OPERATORS[j], **replaced) for j in workers)
            path = folder / "fleet.toml"
            path.write_text(text)
            return str(path)

        yield SimpleNamespace(folder=folder, file=file, reports=reports)
    finally:
        nursery.stop()


def entry(report, operator, **replaced):
    keys = {"address": report.address, "operator": operator, "certificate": report.certificate.decode(), **replaced}
    return "\n".join(["[[worker]]", *(f"{key} = '''{value}'''" for key, value in keys.items()), ""])


@pytest.fixture
def here(tmp_path, monkeypatch, capsys):
    """Runs the command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)

    def command(*arguments):
        code = run(list(arguments))
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return command


# --- identity ---------------------------------------------------------------------------------------------------------
def test_identity_is_made_once_and_explains_what_to_do_with_it(here, tmp_path):
    first = here("fleet", "identity", "--out", "mine")
    assert first.returncode == 0
    certificate = (tmp_path / "mine" / "certificate.pem").read_bytes()
    for words in ("mine/key.pem (new", fingerprint(certificate), "--allow-enclave certificate.pem", "compare"):
        assert words in first.stdout, words
    assert "PRIVATE" not in first.stdout
    again = json.loads(here("fleet", "identity", "--out", "mine", "--json").stdout)
    assert again == {
        "certificate": "mine/certificate.pem",
        "fingerprint": fingerprint(certificate),
        "new": False,
    }
    assert (tmp_path / "mine" / "key.pem").stat().st_mode & 0o777 == 0o600


def test_half_an_identity_is_refused(here, tmp_path):
    here("fleet", "identity")
    (tmp_path / "enclave" / "certificate.pem").unlink()
    assert "key.pem is there but certificate.pem is not" in refused(here("fleet", "identity"), 2)


# --- list -------------------------------------------------------------------------------------------------------------
def test_list_shows_the_file_and_connects_to_nobody(here, tmp_path):
    certificate = Identity.create(WORKER).certificate
    report = SimpleNamespace(address="no.such.host.invalid:7001", certificate=certificate)
    (tmp_path / "fleet.toml").write_text(entry(report, "north", name="[bold]first[/]"))
    table = here("fleet", "list", "fleet.toml")
    assert table.returncode == 0
    assert max(map(len, table.stdout.splitlines())) <= 80
    assert "1 worker" in table.stdout
    assert "[bold]first[/]" in table.stdout.replace("\n", "")
    (worker,) = json.loads(here("fleet", "list", "fleet.toml", "--json").stdout)["workers"]
    assert worker == {
        "name": "[bold]first[/]",
        "address": "no.such.host.invalid:7001",
        "operator": "north",
        "fingerprint": fingerprint(certificate),
        "shared_memory": None,
    }
    assert not (tmp_path / "enclave").exists()


# --- check ------------------------------------------------------------------------------------------------------------
def test_check_of_workers_that_are_all_well(here, site):
    path = site.file(*SEPARATE)
    done = here("fleet", "check", path, "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["plan"] is None
    for worker, operator, report in zip(found["workers"], OPERATORS, site.reports, strict=False):
        assert worker["ok"]
        assert (worker["address"], worker["operator"], worker["device"]) == (report.address, operator, "cpu")
        assert worker["fingerprint"] == fingerprint(report.certificate)
        assert worker["memory"] > 1 << 20
        assert 0 < worker["seconds"] < 5
    table = here("fleet", "check", path, "--inputs", "1")
    assert table.returncode == 0
    assert "3 workers, 3 well" in table.stdout
    assert all(report.address in table.stdout for report in site.reports[:3])  # in one line each
    assert "north 1 of its 1, south 1 of its 1, east 1 of its 1. No operator can unmask" in " ".join(
        table.stdout.split()
    )
    assert max(map(len, table.stdout.splitlines())) <= 80


def test_check_finds_a_plan_that_gives_one_operator_too_much(here, site):
    path = site.file(*SHARED)
    assert here("fleet", "check", path).returncode == 0  # as workers they are well
    done = here("fleet", "check", path, "--inputs", "1", "--colluders", "1")
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert "needs 3 workers, at most 1 of one operator. Here only 2 can be used" in words
    plan = json.loads(here("fleet", "check", path, "--inputs", "1", "--json").stdout)["plan"]
    assert not plan["ok"]
    assert plan["operators"] == {"east": {"workers": 2, "shares": 1}, "north": {"workers": 1, "shares": 1}}


def test_check_says_what_is_wrong_with_each(here, site):
    dead = entry(
        SimpleNamespace(address=f"127.0.0.1:{free_port()}", certificate=Identity.create(WORKER).certificate), "x"
    )
    (site.folder / "mixed.toml").write_text(
        "\n".join([dead, entry(site.reports[0], "south"), entry(site.reports[1], "south")])
    )
    done = here("fleet", "check", str(site.folder / "mixed.toml"))
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert "3 workers, 1 well" in words
    assert "nothing listens there" in words
    assert "its operator is 'north'; the fleet file says 'south'" in words


def test_check_says_that_it_made_an_identity(here, tmp_path):
    report = SimpleNamespace(address=f"127.0.0.1:{free_port()}", certificate=Identity.create(WORKER).certificate)
    (tmp_path / "fleet.toml").write_text(entry(report, "x"))
    first = " ".join(here("fleet", "check", "fleet.toml").stderr.split())
    assert "a new identity was made in enclave; give its certificate.pem to the operators" in first
    assert "visiting 1 worker" in first
    assert "1 workers" not in first
    again = here("fleet", "check", "fleet.toml")
    assert "identity" not in again.stderr
    words = " ".join(again.stdout.split())
    assert "nothing listens there. Start the worker, or correct the address" in words
    assert "failed to connect" not in words


# --- bench ------------------------------------------------------------------------------------------------------------
def test_bench_of_a_file_measures_each_worker(here, site):
    path = site.file(*SEPARATE)
    found = json.loads(here("fleet", "bench", path, "--size", "1MiB", "--times", "2", "--json").stdout)
    assert (found["size_bytes"], found["times"]) == (1 << 20, 2)
    assert len(found["workers"]) == 3
    assert all(worker["ok"] and worker["seconds"] > 0 for worker in found["workers"])
    table = here("fleet", "bench", path, "--size", "64KiB", "--times", "1")
    assert table.returncode == 0
    assert "64.0 KiB there and back" in table.stdout
    assert table.stdout.count("sealed pipe") == 3


def test_bench_of_this_machine_compares_the_transports(here):
    done = here("fleet", "bench", "--size", "1MiB", "--times", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    seconds = found["seconds"]
    assert seconds.keys() == {"copy", "shared_memory", "tls_socket", "pipe", "grpc_tls"}
    assert all(value > 0 for value in seconds.values())
    assert found["ratios"]["shared_memory"] == pytest.approx(seconds["shared_memory"] / seconds["copy"])
    assert found["ratios"]["grpc_tls"] == pytest.approx(seconds["grpc_tls"] / seconds["tls_socket"])


@pytest.mark.full
def test_transports_cost_at_most_twice_the_least_possible(here):
    found = json.loads(here("fleet", "bench", "--json").stdout)
    assert found["size_bytes"] == 64 << 20
    assert found["ratios"]["shared_memory"] < 2
    assert found["ratios"]["grpc_tls"] < 2
    assert found["ratios"]["pipe"] < 1


# --- train ------------------------------------------------------------------------------------------------------------
TRAIN = ("train", "--model", "mlp", "--epochs", "1", "--batch-size", "512", "--no-clear", "--inputs", "1")


def test_training_in_one_hand_is_refused_before_anything_is_done(here, site):
    done = here(*TRAIN, "--fleet", site.file(*SHARED))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "can pool what its workers see" in done.stderr
    assert "insecure_one_operator=True" in done.stderr
    assert "epoch" not in done.stderr


def test_training_in_one_hand_says_so_loudly(here, site, tmp_path):
    done = here(*TRAIN, "--fleet", site.file(*SHARED), "--insecure-one-operator", "--output", "run")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "PRIVACY: NONE" in words
    assert "east (2 workers), north (1 worker)" in words
    fleet = json.loads((tmp_path / "run" / "summary.json").read_text())["fleet"]
    assert fleet["insecure_one_operator"] is True
    assert [worker["operator"] for worker in fleet["workers"]] == ["east", "east", "north"]
    assert fleet["file"].endswith("fleet.toml")


def test_local_workers_are_called_a_simulation():
    fleet = {"file": None, "workers": [{}] * 6, "insecure_one_operator": False}
    assert operator_words(fleet) == "simulated: all 6 workers are on this machine, in one hand"


# --- usage ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("fleet list none.toml", "none.toml: cannot be read"),
        ("fleet check none.toml", "none.toml: cannot be read"),
        ("fleet check none.toml --timeout 0", "--timeout 0"),
        ("fleet check none.toml --inputs 0", "cannot be read"),
        ("fleet bench none.toml", "none.toml: cannot be read"),
        ("fleet bench --size 12parsecs", '"12parsecs" is not a size'),
        ("fleet bench --size 1B", "needs a size from 1KiB to 4GiB"),
        ("fleet bench --times 0", "--times 0"),
        ("fleet paint", "paint"),
        ("train --fleet none.toml", "none.toml: cannot be read"),
        ("train --insecure-one-operator", "--insecure-one-operator is for --fleet"),
    ],
)
def test_bad_usage_is_refused(here, arguments, complaint):
    assert complaint in refused(here(*arguments.split()), 2)
    assert not os.listdir()


def test_settings_come_from_variables_too(here, monkeypatch):
    monkeypatch.setenv("DARKNIGHT_FLEET_BENCH_TIMES", "-3")
    assert "--times -3" in refused(here("fleet", "bench"), 2)
    assert "--times -4" in refused(here("fleet", "bench", "--times", "-4"), 2)


@pytest.mark.parametrize("command", ["identity", "list", "check", "bench"])
def test_help_has_an_example_and_the_exit_codes(here, command):
    done = here("fleet", command, "--help")
    assert done.returncode == 0
    assert f"darknight fleet {command}" in done.stdout
    assert "Exit codes: 0" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
