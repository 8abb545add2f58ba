"""The software platform: genuine formats, and a root that nobody trusts by accident."""

import copy
import os
import pickle
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

import darknight.trust.simulation as simulation
from darknight.errors import TrustError, UsageError
from darknight.trust.policy import Policy
from darknight.trust.simulated_authority import KEY_FILE, ROOT_FILE, Authority
from darknight.trust.simulation import SIMULATED_REGISTERS, Pretence, SoftwarePlatform, simulated_measurement
from darknight.trust.verify import attested, judge

DATA = bytes(range(64))
BOTH = pytest.mark.parametrize("format", ["sgx", "tdx"])


def policy_for(platform, **more):
    registers = {number: frozenset({value}) for number, value in enumerate(SIMULATED_REGISTERS)}
    tdx = len(platform.measurement) == 48
    more = {"measurements": frozenset({platform.measurement}), "rtmr": registers if tdx else {}, **more}
    return Policy(insecure_simulated_root=platform.root_certificate, **more)


def platform_in(folder, **pretence):
    return SoftwarePlatform(folder, pretence=Pretence(**pretence))


def accepted(platform, **policy):
    now = int(time.time())
    return attested(platform.evidence(DATA), policy=policy_for(platform, **policy), now=now, report_data=DATA)


@BOTH
def test_its_evidence_holds_with_its_root_and_is_called_simulated(tmp_path, format):
    platform = platform_in(tmp_path, format=format)
    found = accepted(platform)
    assert found.simulated
    assert found.measurement == platform.measurement == simulated_measurement(format)
    assert any("SIMULATED" in note for note in found.verdict.notes)
    assert (platform.name, platform.simulated) == ("simulation", True)


@BOTH
def test_it_is_refused_under_the_vendors_root(tmp_path, format):
    platform = platform_in(tmp_path, format=format)
    evidence, now = platform.evidence(DATA), int(time.time())
    assert not judge(evidence, policy=None, now=now).holds
    without = replace(policy_for(platform), insecure_simulated_root=None)
    with pytest.raises(TrustError, match="refused"):
        attested(evidence, policy=without, now=now, report_data=DATA)


@BOTH
@pytest.mark.parametrize(
    ("pretence", "check"),
    [({"debug": True}, "genuine"), ({"status": "OutOfDate"}, "tcb"), ({"days": -1}, "genuine")],
)
def test_what_it_pretends_badly_is_refused(tmp_path, format, pretence, check):
    with pytest.raises(TrustError) as refusal:
        accepted(platform_in(tmp_path, format=format, **pretence))
    assert refusal.value.check == check


@BOTH
def test_a_status_can_be_allowed(tmp_path, format):
    platform = platform_in(tmp_path, format=format, status="OutOfDate")
    assert accepted(platform, allow_status=frozenset({"OutOfDate"})).verdict.status == "OutOfDate"


def test_the_root_outlives_the_program_and_nothing_else_does(tmp_path):
    first, second = SoftwarePlatform(tmp_path), SoftwarePlatform(tmp_path)
    assert first.root_certificate == second.root_certificate == (tmp_path / ROOT_FILE).read_bytes()
    policy, now = policy_for(first), int(time.time())
    assert attested(second.evidence(DATA), policy=policy, now=now, report_data=DATA)
    other = SoftwarePlatform(tmp_path / "other")
    with pytest.raises(TrustError, match="genuine"):
        attested(other.evidence(DATA), policy=policy, now=now, report_data=DATA)


def test_its_key_is_nobody_elses(tmp_path):
    before = os.umask(0)
    try:
        SoftwarePlatform(tmp_path / "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / KEY_FILE).stat().st_mode) == 0o600
    assert b"PRIVATE" not in (tmp_path / "new" / ROOT_FILE).read_bytes()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted([KEY_FILE, ROOT_FILE])


def test_its_authority_does_not_wander(tmp_path):
    authority = Authority(tmp_path)
    assert "hidden" in repr(authority)
    for wander in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="secret"):
            wander(authority)


def test_a_lost_certificate_comes_back_and_a_damaged_key_does_not(tmp_path):
    root = SoftwarePlatform(tmp_path).root_certificate
    (tmp_path / ROOT_FILE).unlink()
    assert SoftwarePlatform(tmp_path).root_certificate == root
    assert (tmp_path / ROOT_FILE).read_bytes() == root
    for damage in (b"", b"x", root):
        (tmp_path / KEY_FILE).write_bytes(damage)
        with pytest.raises(UsageError, match="damaged"):
            SoftwarePlatform(tmp_path)


def test_two_keys_that_do_not_belong_together(tmp_path):
    SoftwarePlatform(tmp_path)
    other = SoftwarePlatform(tmp_path / "other").root_certificate
    content = (tmp_path / KEY_FILE).read_bytes()
    (tmp_path / KEY_FILE).write_bytes(content[: content.index(b"-----BEGIN CERT")] + other)
    with pytest.raises(UsageError, match="damaged"):
        SoftwarePlatform(tmp_path)


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be read or made"):
        SoftwarePlatform(tmp_path / "file")


def test_whoever_starts_together_shares_one_root(tmp_path):
    for attempt in range(10):
        folder, together = tmp_path / str(attempt), Barrier(8)

        def start(_, folder=folder, together=together):
            together.wait()
            return Authority(folder).root_certificate

        with ThreadPoolExecutor(8) as threads:
            (root,) = set(threads.map(start, range(8)))
        assert root == (folder / ROOT_FILE).read_bytes()
        assert len(list(folder.iterdir())) == 2


def test_the_measurement_is_of_names_and_contents(tmp_path, monkeypatch):
    package = tmp_path / "package"
    (package / "trust").mkdir(parents=True)
    monkeypatch.setattr(simulation, "__file__", str(package / "trust" / "simulation.py"))

    def measured(**files):
        for path in package.rglob("*.*"):
            path.unlink()
        for name, content in files.items():
            (package / name.replace("_", ".")).write_text(content)
        return simulated_measurement()

    usual = measured(a_py="x", b_so="y")
    assert measured(b_so="y", a_py="x") == usual
    assert measured(a_py="x", b_so="y", c_txt="z") == usual
    others = [measured(a_py="x"), measured(a_py="y", b_so="x"), measured(a_py="xb.soy"), measured(c_py="x", b_so="y")]
    assert len({usual, *others}) == 5


def test_the_measurement_is_of_this_package(tmp_path):
    files = Path(simulation.__file__).parents[1].rglob("*.py")
    assert sum(1 for _ in files) > 200
    assert len(simulated_measurement()) == 32
    assert len(simulated_measurement("tdx")) == 48
    for wrong in (lambda: simulated_measurement("snp"), lambda: Pretence(format="snp")):
        with pytest.raises(UsageError, match="use sgx or tdx"):
            wrong()


def test_report_data_has_64_bytes(tmp_path):
    with pytest.raises(UsageError, match="needs 64"):
        SoftwarePlatform(tmp_path).evidence(bytes(32))
