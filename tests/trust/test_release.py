"""Keys are bound to everything that was said: a change of any part of it, and the envelope does not open."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from darknight.errors import TrustError
from darknight.trust.fresh import fresh_key, fresh_nonce
from darknight.trust.keys import EnclaveKey
from darknight.trust.release import JobKeys, Offer, Receipt, Terms, request_message
from darknight.trust.transcript import DIGEST_BYTES, transcript

KEY = EnclaveKey()
OFFER = Offer(nonce=bytes(32), key=KEY.public, certificate=b"certificate", configuration=b"configuration")
RECEIPT = Receipt(number=4, step=17, digest="ab" * 32)
TERMS = Terms(offer=OFFER, job=b"job", manifest=b"m" * 32, resume=RECEIPT, client=b"c" * 32)


def test_keys_come_out_as_they_went_in():
    keys = JobKeys(data=fresh_key(), job=fresh_key())
    opened = JobKeys.opened(keys.sealed(TERMS), TERMS, KEY)
    assert opened.data.raw == keys.data.raw
    assert opened.derived("result").raw == keys.derived("result").raw
    assert "hidden" in repr(keys)


OTHERS = [
    replace(TERMS, job=b"job2"),
    replace(TERMS, manifest=b"n" * 32),
    replace(TERMS, resume=None),
    replace(TERMS, resume=replace(RECEIPT, number=3)),
    replace(TERMS, resume=replace(RECEIPT, step=16)),
    replace(TERMS, resume=replace(RECEIPT, digest="cd" * 32)),
    replace(TERMS, client=b"d" * 32),
    replace(TERMS, offer=replace(OFFER, nonce=b"n" * 32)),
    replace(TERMS, offer=replace(OFFER, certificate=b"Certificate")),
    replace(TERMS, offer=replace(OFFER, configuration=b"Configuration")),
    replace(TERMS, offer=replace(OFFER, key=EnclaveKey().public)),
]


@pytest.mark.parametrize("other", OTHERS, ids=range(len(OTHERS)))
def test_terms_that_differ_anywhere_do_not_open(other):
    keys = JobKeys(data=fresh_key(), job=fresh_key())
    with pytest.raises(TrustError) as caught:
        JobKeys.opened(keys.sealed(TERMS), other, KEY)
    assert caught.value.check == "envelope"


def test_every_part_of_the_offer_is_in_the_report_data():
    assert len(OFFER.report_data) == DIGEST_BYTES == 64
    for field in fields(Offer):
        value = getattr(OFFER, field.name)
        assert replace(OFFER, **{field.name: bytes([value[0] ^ 1]) + value[1:]}).report_data != OFFER.report_data


def test_every_part_of_a_request_is_signed():
    base = (OFFER, "Status", 3, b"c" * 32, b"{}")
    others = [
        (replace(OFFER, nonce=fresh_nonce()), *base[1:]),
        (OFFER, "Cancel", *base[2:]),
        (OFFER, "Status", 4, *base[3:]),
        (OFFER, "Status", 3, b"d" * 32, b"{}"),
        (OFFER, "Status", 3, b"c" * 32, b"{ }"),
    ]
    assert len({request_message(*each) for each in (base, *others)}) == 6


@given(st.lists(st.binary(max_size=6), min_size=1, max_size=5), st.lists(st.binary(max_size=6), min_size=1, max_size=5))
def test_a_transcript_is_of_its_parts_and_no_others(one, two):
    assert (transcript("label", *one) == transcript("label", *two)) == (one == two)
    assert transcript("label", *one) != transcript("labe", b"l", *one)


def test_each_purpose_has_its_own_key():
    keys = JobKeys(data=fresh_key(), job=fresh_key())
    purposes = ("checkpoint", "result", "weights", "client")
    assert len({keys.derived(purpose).raw for purpose in purposes} | {keys.data.raw}) == 5


@pytest.mark.parametrize(
    "words",
    [
        None,
        {},
        {"number": 1},
        {"number": 1, "step": 1, "digest": "ab"},
        {"number": 0, "step": 1, "digest": "ab" * 32},
        {"number": True, "step": 1, "digest": "ab" * 32},
        {"number": 1, "step": -1, "digest": "ab" * 32},
    ],
)
def test_a_receipt_that_is_none_is_refused(words):
    with pytest.raises(TrustError):
        Receipt.from_words(words)
    assert Receipt.from_words(RECEIPT.words()) == RECEIPT
