"""darknight verify: what it prints, and the exit code for everything that a file can be."""

import json
import os
import subprocess

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cli.command import darknight, refused
from darknight.cli.app import run
from darknight.trust.simulation import Pretence, SoftwarePlatform
from trust.foundry import NOW as SNP_NOW
from trust.foundry import Foundry
from trust.samples import FILES, OUTDATED_NOW, SGX_NOW, SGX_STATUS, TDX_NOW, folder_in
from trust.samples import SNP_NOW as SAMPLE_NOW

DATA = bytes(range(64))


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, which is quicker, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("DARKNIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments):
        capfd.readouterr()
        code = run(["verify", *map(str, arguments)])
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return subprocess.CompletedProcess(arguments, code, said.out, said.err)

    return command


@pytest.fixture
def simulated(tmp_path):
    """Writes simulated evidence, and returns the arguments that judge it."""

    def write(**pretence):
        platform = SoftwarePlatform(tmp_path / "platform", pretence=Pretence(**pretence))
        evidence = platform.evidence(DATA)
        (tmp_path / "quote").write_bytes(evidence.quote)
        (tmp_path / "collateral").write_bytes(evidence.collateral)
        (tmp_path / "root.pem").write_bytes(platform.root_certificate)
        (tmp_path / "policy.toml").write_text(
            f'measurements = ["{platform.measurement.hex()}"]\ninsecure_simulated_root = "root.pem"\n'
        )
        return "quote", "--collateral", "collateral"

    return write


ROOT = ("--insecure-simulated-root", "root.pem")


def words_of(done):
    return " ".join(done.stdout.replace("│", " ").split())


@pytest.mark.parametrize("format", ["sgx", "tdx"])
def test_simulated_evidence_holds_with_the_insecure_setting_alone(here, simulated, format):
    arguments = simulated(format=format)
    done = here(*arguments, *ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    said = words_of(done)
    assert f"SIMULATED {format.upper()} quote" in said
    assert "SIMULATED: a program signed this" in said
    assert "no measurement was compared" in said
    assert max(map(len, done.stdout.splitlines())) <= 80
    without = here(*arguments)
    assert without.returncode == 1
    assert "darknight: error: refused. genuine: " in without.stderr
    assert "SIMULATED" in without.stderr


def test_a_policy_names_the_program(here, simulated, tmp_path):
    arguments = simulated()
    done = here(*arguments, "--policy", "policy.toml")
    assert done.returncode == 0
    assert "the measurement is one of the policy's" in words_of(done)
    assert "no measurement was compared" not in words_of(done)
    policy = (tmp_path / "policy.toml").read_text()
    (tmp_path / "policy.toml").write_text(f'measurements = ["{"00" * 32}"]\n' + policy.splitlines()[1])
    done = here(*arguments, "--policy", "policy.toml")
    assert done.returncode == 1
    assert "measurement: the measurement is not one of the policy's" in done.stderr


def test_json_has_everything(here, simulated):
    done = here(*simulated(), *ROOT, "--json", "--report-data", DATA.hex())
    words = json.loads(done.stdout)
    assert (done.returncode, words["holds"], words["simulated"], words["format"]) == (0, True, True, "sgx")
    assert words["report_data"] == DATA.hex()
    done = here(*simulated(debug=True), *ROOT, "--json")
    words = json.loads(done.stdout)
    assert (done.returncode, words["holds"], words["debug"]) == (1, False, True)
    assert "debug" in [finding["check"] for finding in words["findings"] if not finding["holds"]]


@pytest.mark.parametrize(
    ("pretence", "more", "code"),
    [
        ({"status": "OutOfDate"}, (), 1),
        ({"status": "OutOfDate"}, ("--allow-status", "SWHardeningNeeded"), 1),
        ({"status": "OutOfDate"}, ("--allow-status", "SWHardeningNeeded", "--allow-status", "OutOfDate"), 0),
        ({"debug": True}, (), 1),
        ({"days": -1}, (), 1),
        ({}, ("--now", "1"), 1),
        ({}, ("--now", "4000000000"), 1),
        ({}, ("--report-data", DATA[::-1].hex()), 1),
        ({}, ("--certs", "root.pem"), 0),  # not used, which it says
    ],
)
def test_what_holds_and_what_does_not(here, simulated, pretence, more, code):
    done = here(*simulated(**pretence), *ROOT, *more)
    assert done.returncode == code, done.stderr
    assert done.stdout
    assert done.stderr.startswith("darknight: error: refused. ") == (code == 1)


def test_an_intel_quote_cannot_be_judged_without_collateral(here, simulated):
    quote, *_ = simulated()
    done = here(quote, *ROOT)
    assert done.returncode == 1
    assert "no collateral was given" in done.stderr
    assert "MRENCLAVE" in done.stdout


def test_snp_with_its_chain_and_its_revocation_list(here, tmp_path):
    foundry = Foundry(product="Turin")
    (tmp_path / "report").write_bytes(foundry.report(vmpl=2))
    (tmp_path / "root.pem").write_bytes(foundry.root.public_bytes(Encoding.PEM))
    paths = []
    for name, content in zip(("vcek", "ask", "ark", "crl"), (*foundry.chain, foundry.crl()), strict=True):
        (tmp_path / name).write_bytes(content)
        paths += ["--certs", name]
    usual = ("report", *ROOT, "--now", SNP_NOW)
    done = here(*usual, *paths[:6])
    assert (done.returncode, done.stderr) == (0, "")
    assert "revocation not checked" in words_of(done)
    assert "VMPL 2" in words_of(done)
    done = here(*usual, *paths)
    assert done.returncode == 0
    assert "revocation not checked" not in words_of(done)
    (tmp_path / "crl").write_bytes(foundry.crl(revoked=[65537]))
    assert "revocation: a certificate of the chain is revoked" in here(*usual, *paths).stderr
    (tmp_path / "policy.toml").write_text("highest_vmpl = 1\n")
    assert "vmpl: VMPL 2" in here(*usual, *paths[:6], "--policy", "policy.toml").stderr
    done = here(*usual)
    assert (done.returncode, "chain: 0 VCEK certificates" in done.stderr) == (1, True)
    done = here("report", *paths[:6], "--now", SNP_NOW)
    assert (done.returncode, "AMD's root" in done.stderr) == (1, True)


UNREADABLE = {
    "gone": (("gone",), "gone cannot be read: No such file"),
    "a folder": ((".",), "cannot be read: Is a directory"),
    "empty": (("empty",), "too few for a quote"),
    "words": (("words",), "neither an SGX or TDX quote"),
    "truncated": (("short",), "cut off"),
    "endless": (("/dev/zero",), "/dev/zero is not a file of at most"),
    "no collateral": (("quote", "--collateral", "gone"), "gone cannot be read"),
    "collateral that is none": (("quote", "--collateral", "words"), "the collateral cannot be read"),
    "endless collateral": (("quote", "--collateral", "/dev/zero"), "is not a file of at most"),
    "endless certificates": (("quote", "--certs", "/dev/zero"), "is not a file of at most"),
    "a root that is none": (("quote", "--collateral", "collateral", ROOT[0], "words"), "certificates"),
    "no policy": (("quote", "--policy", "gone"), "gone"),
    "a policy that is none": (("quote", "--policy", "words"), "not a TOML file"),
    "no number": (("quote", "--now", "noon"), "--now"),
    "another age": (("quote", "--now", "-5"), "Unix seconds"),
    "no status": (("quote", "--allow-status", "Fine"), "unknown TCB status Fine; use some of UpToDate"),
    "revoked": (("quote", "--allow-status", "Revoked"), "unknown TCB status Revoked"),
    "no report data": (("quote", "--report-data", "12"), "needs 128 hexadecimal digits"),
    "an unknown flag": (("quote", "--trust-me"), "--trust-me"),
    "nothing": ((), "quote"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_bad_usage(here, simulated, tmp_path, case):
    arguments, complaint = UNREADABLE[case]
    simulated()
    (tmp_path / "empty").touch()
    (tmp_path / "words").write_text("These are no bytes of any machine. " * 9)
    (tmp_path / "short").write_bytes((tmp_path / "quote").read_bytes()[:2000])
    assert complaint in refused(here(*arguments), 2)


def test_a_pipe_that_nobody_fills_does_not_hold_it_up(here):
    os.mkfifo("pipe")
    assert "too few" in refused(here("pipe"), 2)


def test_certificates_that_are_none_are_unreadable(here, tmp_path):
    (tmp_path / "report").write_bytes(Foundry().report())
    (tmp_path / "words").write_text("no certificate")
    assert "neither, in PEM or DER" in refused(here("report", "--certs", "words"), 2)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=6000))
def test_random_bytes_are_unreadable(here, tmp_path, content):
    (tmp_path / "random").write_bytes(content)
    refused(here("random"), 2)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_parts_of_a_quote_are_unreadable(here, simulated, tmp_path, data):
    if not (tmp_path / "quote").exists():
        simulated(format="tdx")
    whole = (tmp_path / "quote").read_bytes()
    (tmp_path / "part").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(here("part", "--collateral", "collateral", *ROOT), 2)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_end_in_a_verdict_or_a_complaint(here, simulated, tmp_path, data):
    """Some bytes are others. A quote is then refused or unreadable; collateral has spaces that mean nothing."""
    if not (tmp_path / "quote").exists():
        simulated()
    name = data.draw(st.sampled_from(["quote", "collateral"]))
    content = bytearray((tmp_path / name).read_bytes())
    # Behind the quote's signatures comes PEM text, some of whose bytes mean nothing, such as its line ends.
    last = content.index(b"-----BEGIN") if name == "quote" else len(content)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, last - 1))] = data.draw(st.integers(0, 255))
    if bytes(content) == (tmp_path / name).read_bytes():
        return
    (tmp_path / "damaged").write_bytes(content)
    files = {"quote": "quote", "collateral": "collateral", name: "damaged"}
    done = here(files["quote"], "--collateral", files["collateral"], *ROOT)
    assert done.returncode in ((1, 2) if name == "quote" else (0, 1, 2))
    assert len(done.stderr.splitlines()) == (done.returncode != 0)


def test_help_has_examples_and_the_exit_codes(here):
    done = here("--help")
    assert done.returncode == 0
    said = words_of(done)
    assert "darknight verify report.bin --certs vcek.der" in said
    for words in ("0 everything holds", "1 something does not", "2 bad usage", "130 interrupted"):
        assert words in said
    assert max(map(len, done.stdout.splitlines())) <= 80


class TestSamples:
    def judged(self, here, shared, name, now, *more):
        folder = folder_in(shared)
        quote, collateral, certificates = FILES[name]
        arguments = [folder / quote, "--now", now, *more]
        arguments += [] if collateral is None else ["--collateral", folder / collateral]
        for each in certificates:
            arguments += ["--certs", folder / each]
        return here(*arguments)

    @pytest.mark.parametrize(
        ("name", "now", "more", "code", "words"),
        [
            ("sgx", SGX_NOW, (), 1, f"TCB status is {SGX_STATUS}"),
            ("sgx", SGX_NOW, ("--allow-status", SGX_STATUS), 0, "INTEL-SA-00615"),
            ("tdx", TDX_NOW, (), 0, "dynamic platform, cached keys, SMT"),
            ("tdx", 1_780_000_000, (), 1, "expired"),
            ("tdx outdated", OUTDATED_NOW, (), 1, "No matching TCB level"),
            ("snp", SAMPLE_NOW, (), 0, "revocation not checked"),
            ("snp debug", SAMPLE_NOW, (), 1, "debug mode"),
            ("snp tampered", SAMPLE_NOW, (), 1, "no certificate leads from the root to the leaf"),
        ],
    )
    def test_they_are_judged_as_their_readme_says(self, here, shared, name, now, more, code, words):
        done = self.judged(here, shared, name, now, *more)
        assert done.returncode == code
        assert words in words_of(done)
        assert "no measurement was compared" in words_of(done)

    @pytest.mark.parametrize(
        ("name", "now", "more"),
        [("sgx", SGX_NOW, ("--allow-status", SGX_STATUS)), ("tdx", TDX_NOW, ()), ("snp", SAMPLE_NOW, ())],
    )
    def test_a_changed_bit_is_refused(self, here, shared, tmp_path, name, now, more):
        """A few; tests/trust/test_samples.py has all of them."""
        quote, collateral, certificates = FILES[name]
        folder = folder_in(shared)
        arguments = ["changed", "--now", now, *more]
        arguments += [] if collateral is None else ["--collateral", folder / collateral]
        for each in certificates:
            arguments += ["--certs", folder / each]
        content = (folder / quote).read_bytes()
        for bit in (0, 17, 8 * 13 + 3, 8 * 100, 8 * 300 + 7, 8 * 431 + 7):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            (tmp_path / "changed").write_bytes(changed)
            assert here(*arguments).returncode in (1, 2), bit
        (tmp_path / "changed").write_bytes(content)
        assert here(*arguments).returncode == 0


def test_so_it_is_at_the_command_line(simulated, tmp_path):
    arguments = simulated()
    done = darknight("verify", *arguments, "--policy", "policy.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "SIMULATED" in done.stdout
