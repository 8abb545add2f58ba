"""The policy file: everything in it is understood, or it is refused with the file's name and the remedy."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darknight.errors import UsageError
from darknight.trust.policy import Policy, read_policy

WHOLE = f"""
measurements = ["{"aB" * 32}", "{"cd" * 48}"]
signers = ["{"01" * 32}"]
configurations = ["{"02" * 32}"]
product = 7
minimum_svn = 3
chip_ids = ["{"03" * 64}", "{"04" * 16}"]
allow_status = ["SWHardeningNeeded"]
highest_vmpl = 2
revocation_lists = ["lists/milan.crl"]
require_revocation = true
insecure_simulated_root = "root.pem"

[rtmr]
1 = ["{"05" * 48}"]
2 = ["{"06" * 48}", "{"07" * 48}"]

[minimum_tcb]
snp = 8
microcode = 115
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "policy.toml"
        path.write_text(text)
        return path

    return write


def test_everything_that_can_be_said(written, tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "milan.crl").write_bytes(b"list")
    (tmp_path / "root.pem").write_bytes(b"root")
    policy = read_policy(written(WHOLE))
    assert policy == Policy(
        measurements=frozenset({b"\xab" * 32, b"\xcd" * 48}),
        signers=frozenset({b"\x01" * 32}),
        configurations=frozenset({b"\x02" * 32}),
        product=7,
        minimum_svn=3,
        chip_ids=frozenset({b"\x03" * 64, b"\x04" * 16}),
        allow_status=frozenset({"SWHardeningNeeded"}),
        highest_vmpl=2,
        revocation_lists=(b"list",),
        require_revocation=True,
        insecure_simulated_root=b"root",
        rtmr={1: frozenset({b"\x05" * 48}), 2: frozenset({b"\x06" * 48, b"\x07" * 48})},
        minimum_tcb={"snp": 8, "microcode": 115},
    )
    assert set(Policy.__dataclass_fields__) == set(tomllib.loads(WHOLE))


def test_an_empty_policy_compares_nothing(written):
    assert read_policy(written("")) == Policy()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("measurement = []", "unknown key measurement; known are allow_status, chip_ids"),
        ("simulated_root = 'x'", "unknown key simulated_root"),
        ("measurements = 'ab'", "measurements needs texts"),
        ("measurements = [1]", "measurements needs texts"),
        ("measurements = ['xy']", "hexadecimal"),
        ("measurements = ['abc']", "hexadecimal"),
        ("measurements = ['0xab']", "hexadecimal"),
        ("measurements = ['abcd']", "measurements: each value has 64 or 96"),
        ("measurements = ['']", "each value has 64 or 96"),
        ("signers = ['ab']", "signers: each value has 64 or 96"),
        ("chip_ids = ['ab']", "chip_ids: each value has 32 or 128"),
        ("configurations = ['ab']", "configurations: each value has 64"),
        ("allow_status = ['Revoked']", "unknown TCB status Revoked; use some of UpToDate"),
        ("allow_status = ['uptodate']", "unknown TCB status"),
        ("allow_status = 'OutOfDate'", "needs texts"),
        ("product = '7'", "product needs a whole number"),
        ("product = -1", "0 or more"),
        ("minimum_svn = true", "minimum_svn needs a whole number"),
        ("minimum_svn = -1", "0 or more"),
        ("highest_vmpl = 4", "from 0 to 3"),
        ("require_revocation = 1", "needs true or false"),
        ("rtmr = ['ab']", "needs a table, [rtmr]"),
        ("[rtmr]\n4 = ['ab']", "RTMR 0 to 3"),
        ("[rtmr]\n1 = []", "needs a value"),
        ("[rtmr]\n1 = ['abcd']", "rtmr 1: each value has 96"),
        ("[minimum_tcb]\nfirmware = 1", "unknown part firmware; use some of fmc"),
        ("[minimum_tcb]\nsnp = 256", "from 0 to 255"),
        ("[minimum_tcb]\nsnp = '1'", "needs a whole number"),
        ("revocation_lists = ['gone.crl']", "gone.crl cannot be read: No such file"),
        ("insecure_simulated_root = 'gone.pem'", "gone.pem cannot be read"),
        ("insecure_simulated_root = 7", "needs texts"),
        ("measurements = [", "not a TOML file"),
        pytest.param("a = " + "[" * 20_000, "policy.toml", id="nested"),
    ],
)
def test_mistakes_are_named(written, text, complaint):
    with pytest.raises(UsageError) as refusal:
        read_policy(written(text))
    assert complaint in str(refusal.value)
    assert "policy.toml" in str(refusal.value)


def test_files_that_are_none(tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_policy(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a TOML file"):
        read_policy(tmp_path / "binary")
    (tmp_path / "huge").write_bytes(b"#" * (2 << 20))
    with pytest.raises(UsageError, match="more than"):
        read_policy(tmp_path / "huge")


@given(st.text(max_size=60))
def test_any_text_is_a_policy_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        assert read_policy(path) == Policy()
    except UsageError as error:
        assert "any.toml" in str(error)  # noqa: PT017 - either of two outcomes
