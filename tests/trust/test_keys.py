"""The enclave's key opens only what was sealed to it, in the same conversation; the client's key signs exact bytes."""

import pickle

import pytest

from darknight.errors import TrustError
from darknight.trust.fresh import fresh_key
from darknight.trust.keys import PUBLIC_BYTES, ClientKey, EnclaveKey, check_signature, seal_to


def test_what_is_sealed_to_a_key_opens_with_it_and_the_same_info():
    key = EnclaveKey()
    assert len(key.public) == PUBLIC_BYTES
    envelope = seal_to(key.public, b"secret", info=b"this conversation")
    assert b"secret" not in envelope
    assert key.open(envelope, info=b"this conversation") == b"secret"


@pytest.mark.parametrize("attack", ["other info", "other key", "flipped", "cut", "empty"])
def test_anything_else_does_not_open(attack):
    key = EnclaveKey()
    envelope = bytearray(seal_to(key.public, b"secret", info=b"here"))
    opener, info = (EnclaveKey() if attack == "other key" else key), b"there" if attack == "other info" else b"here"
    if attack == "flipped":
        envelope[-1] ^= 1
    elif attack == "cut":
        envelope = envelope[:-1]
    elif attack == "empty":
        envelope = bytearray()
    with pytest.raises(TrustError) as caught:
        opener.open(bytes(envelope), info=info)
    assert caught.value.check == "envelope"


def test_both_halves_of_the_hybrid_are_needed():
    """A key that shares one half with the right one does not open: neither X25519 nor ML-KEM alone is the secret."""
    right, wrong = EnclaveKey(), EnclaveKey()
    for public in (right.public[:1184] + wrong.public[1184:], wrong.public[:1184] + right.public[1184:]):
        envelope = seal_to(public, b"secret", info=b"")
        for key in (right, wrong):
            with pytest.raises(TrustError):
                key.open(envelope, info=b"")


@pytest.mark.parametrize("public", [b"", b"x" * 32, b"\xff" * (PUBLIC_BYTES - 1), b"\xff" * PUBLIC_BYTES])
def test_a_key_that_is_none_is_refused(public):
    with pytest.raises(TrustError) as caught:
        seal_to(public, b"secret", info=b"")
    assert caught.value.check == "key"


def test_a_signature_is_of_one_key_over_exact_bytes():
    key, other = ClientKey(fresh_key()), ClientKey(fresh_key())
    signature = key.sign(b"message")
    check_signature(key.public, b"message", signature)
    for public, message, given in (
        (other.public, b"message", signature),
        (key.public, b"messagE", signature),
        (key.public, b"message", signature[:-1] + bytes([signature[-1] ^ 1])),
        (key.public, b"message", b""),
        (b"", b"message", signature),
    ):
        with pytest.raises(TrustError) as caught:
            check_signature(public, message, given)
        assert caught.value.check == "signature"


@pytest.mark.parametrize("key", [EnclaveKey(), ClientKey(fresh_key())], ids=["enclave", "client"])
def test_keys_do_not_wander(key):
    assert "hidden" in repr(key)
    with pytest.raises(TypeError):
        pickle.dumps(key)
    with pytest.raises(TypeError):
        _ = key == key
