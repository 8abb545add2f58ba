"""Evidence as words, and back: strictly, and never more than its limits."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darknight.errors import TrustError
from darknight.trust.evidence import MAX_QUOTE_BYTES, Evidence
from trust.forge import Forger
from trust.foundry import Foundry


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    forger = Forger(tmp_path_factory.mktemp("root"))
    return Evidence.of(forger.quote(), collateral=b"{}", certificates=(b"one", b"two"))


def test_there_and_back(evidence):
    assert Evidence.from_words(json.loads(json.dumps(evidence.to_words()))) == evidence
    bare = Evidence.of(Foundry().report())
    assert (bare.format, bare.collateral, bare.certificates) == ("snp", None, ())
    assert Evidence.from_words(json.loads(json.dumps(bare.to_words()))) == bare


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "tdx"),
        ("format", "SGX"),
        ("format", 3),
        ("format", ["sgx"]),
        ("quote", None),
        ("quote", ""),
        ("quote", "!!!!"),
        ("quote", "QUJD"),
        ("quote", 7),
        ("quote", "A" * (2 * MAX_QUOTE_BYTES)),
        ("collateral", "a"),
        ("collateral", {}),
        ("certificates", None),
        ("certificates", "QUJD"),
        ("certificates", [None]),
        ("certificates", ["QUJD"] * 17),
        ("certificates", ["QUJ\nD"]),
        ("certificates", ["QUI"]),
        ("certificates", ["QUJ="]),  # bits behind the last byte
    ],
)
def test_what_is_not_evidence_is_refused(evidence, key, value):
    with pytest.raises(TrustError) as refusal:
        Evidence.from_words({**evidence.to_words(), key: value})
    assert refusal.value.check == "format"


def test_fields_are_neither_missing_nor_more(evidence):
    words = evidence.to_words()
    for wrong in ({**words, "note": 1}, {key: words[key] for key in list(words)[1:]}, [], None, "x", list(words)):
        with pytest.raises(TrustError, match="exactly the fields"):
            Evidence.from_words(wrong)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "quote", "collateral", "certificates"]), inner)
        ),
    )
)
def test_any_json_is_evidence_or_refused(words):
    with pytest.raises(TrustError):
        Evidence.from_words(words)
