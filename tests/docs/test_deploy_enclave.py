"""The manual for whoever runs an enclave: its walkthrough runs as written, its policies and flags are real."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import warm
from darknight.client import job_file
from darknight.client.job_file import read_job_file
from darknight.coding import Scheme
from darknight.service.job import recipe_from_words
from darknight.trust.policy import Policy, read_policy
from darknight.trust.quote import read_quote
from docs.walkthrough import blocks, walked
from service.offices import furnish, open_office

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "deploy-enclave.md"
UNIT = ROOT / "deploy" / "enclave" / "darknight-enclave.service"
SCRIPT = ROOT / "deploy" / "enclave" / "fetch_collateral.py"


# --- the walkthrough -------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def walk(tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("walk")
    return walked(PAGE, folder, ports=("7001", "7002", "7003", "7700")), folder


def test_the_commands_run_as_written(walk):
    done, folder = walk
    assert done.returncode == 0, done.stdout
    assert json.loads((folder / "result" / "summary.json").read_text())["ledger"]["integrity"]["failed"] == 0
    assert (folder / "result" / "model.safetensors").stat().st_size > 1000
    assert re.search(r"^job [0-9a-f]{32} is finished$", done.stdout, flags=re.MULTILINE)


def test_it_says_simulated_wherever_it_is(walk):
    done, folder = walk
    assert "measurement" in done.stdout
    assert "(SIMULATED)" in done.stdout
    assert "SIMULATED evidence: it protects nothing" in done.stdout
    assert re.search(r"^SIMULATED +True$", (folder / "enclave.txt").read_text(), flags=re.MULTILINE)


def test_the_policy_that_is_printed_is_the_one_that_the_page_writes(walk):
    done, folder = walk
    printed = done.stdout.split("# a policy for clients that want to try it:\n")[1].splitlines()[:3]
    assert printed == (folder / "policy.toml").read_text().splitlines()


def test_the_other_policy_got_nothing(walk):
    _, folder = walk
    (refused,) = (folder / "refused.txt").read_text().strip().splitlines()
    assert refused.startswith("darknight: error: the evidence is refused. measurement:")
    assert not list((folder / "refused").glob("*.safetensors"))
    assert len(list((folder / "queue" / "jobs").iterdir())) == 2  # the two that were accepted


def test_data_without_labels_were_predicted_with_and_not_trained_on(walk):
    _, folder = walk
    assert len(json.loads((folder / "predicted" / "predictions.json").read_text())["predictions"]) == 20
    assert "accuracy" not in json.loads((folder / "predicted" / "summary.json").read_text())
    (refused,) = (folder / "untrained.txt").read_text().strip().splitlines()
    assert "new.sealed: some or all of its examples have no label" in refused
    assert not (folder / "untrained").exists()


# --- policies --------------------------------------------------------------------------------------------------------
def policies(folder: Path) -> dict[str, Policy]:
    """Each policy of the page, by its section; values that are cut short get the digits that the comment promises."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE):
        for block in re.findall(r"```toml\n(measurements.*?)```", section, flags=re.DOTALL):
            text = re.sub(
                r'"([0-9a-f]{4})\.\.\."\](.*?)(\d+) digits', lambda m: f'"{m[1] * (int(m[3]) // 4)}"]{m[2]}', block
            )
            path = folder / "policy.toml"
            path.write_text(text)
            (folder / "genoa.crl").touch()
            found[section.splitlines()[0]] = read_policy(path)
    return found


def test_there_is_a_policy_for_each_platform_and_none_is_lax(tmp_path):
    found = policies(tmp_path)
    assert list(found) == ["SGX, under Gramine", "TDX", "SEV-SNP"]
    for policy in found.values():
        assert policy.measurements
        assert policy.insecure_simulated_root is None
        assert not policy.allow_status
        assert len(next(iter(policy.configurations))) == 32
    assert [len(next(iter(policy.measurements))) for policy in found.values()] == [32, 48, 48]
    assert set(found["TDX"].rtmr) == {1, 2}
    assert found["SEV-SNP"].minimum_tcb
    assert found["SEV-SNP"].require_revocation


def test_the_key_for_workers_is_where_manifest_and_unit_have_it():
    (block,) = [block for block in blocks(PAGE, "toml") if block.startswith("[enclave]")]
    under_gramine, in_a_guest = re.findall(r'"(/[^"]+)"', block)
    assert tomllib.loads(block) == {"enclave": {"identity": under_gramine}}
    manifest = (ROOT / "deploy" / "enclave" / "darknight.manifest.template").read_text()
    assert f'{{ type = "encrypted", path = "{under_gramine}"' in manifest
    (runtime,) = re.findall(r"^RuntimeDirectory=(\S+)", UNIT.read_text(), flags=re.MULTILINE)
    assert in_a_guest == f"/run/{runtime}/identity"


def test_the_job_file_of_the_page_has_everything_that_one_may_say(tmp_path):
    (block,) = [block for block in blocks(PAGE, "toml") if block.startswith("kind")]
    (tmp_path / "job.toml").write_text(block)
    file = read_job_file(tmp_path / "job.toml")
    said = tomllib.loads(block)
    assert (set(said), set(said["data"])) == (job_file._TOP, job_file._DATA)
    assert set(said["model"]) | {"layers"} == job_file._MODEL
    assert recipe_from_words(file.recipe).epochs == 8
    assert Scheme(**file.scheme).workers == 6


# --- what the page names ---------------------------------------------------------------------------------------------
def known_flags(*program: str) -> set[str]:
    done = warm.run([*program, "--help"], cwd=ROOT, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0
    return set(re.findall(r"(?<![\w-])(--[a-z-]+)", done.stdout))


def test_every_flag_of_the_text_exists():
    used = set(re.findall(r"`(--[a-z-]+)", PAGE.read_text())) - {"--insecure-", "--target"}
    known = known_flags("-m", "darknight.cli", "enclave")
    known |= known_flags("-m", "darknight.cli", "submit")
    known |= known_flags(str(SCRIPT))
    known |= {"--allow-enclave"}  # of a worker; tests/docs/test_operate_workers.py
    assert len(used) > 5
    assert used <= known


def test_every_error_in_the_table_is_one_that_is_raised():
    table = PAGE.read_text().split("| it says |")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(messages) > 8
    constants = [
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    # A finding is put together: "the measurement" is not "one of the policy's".
    constants.append("the measurement is not one of the policy's")
    assert [message for message in messages if not any(message in constant for constant in constants)] == []


# --- collateral ------------------------------------------------------------------------------------------------------
def test_a_quote_for_collateral_is_the_enclaves_own(tmp_path):
    spec = importlib.util.spec_from_file_location("fetch_collateral", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    furnish(tmp_path)
    with open_office(tmp_path) as office:
        facts = read_quote(script.quote_of(office.address))
        assert facts.measurement == office.platform.measurement
        kept = tmp_path / "quote.bin"
        done = subprocess.run(
            [sys.executable, str(SCRIPT), office.address, str(kept), "--save-quote"], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert read_quote(kept.read_bytes()).measurement == facts.measurement
    kept.write_bytes(b"what was there")
    done = warm.run([str(SCRIPT), office.address, str(kept)], cwd=tmp_path, env=os.environ)
    assert done.returncode == 1
    assert "stays as it was" in done.stderr
    assert kept.read_bytes() == b"what was there"
