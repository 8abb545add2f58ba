"""Keys and certificates on disk: made once, never overwritten, and refused when something is wrong with them."""

import copy
import os
import pickle
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from darknight.errors import UsageError
from darknight.wire.identity import ENCLAVE, WORKER, Identity, checked_certificate, fingerprint, read_certificate


@pytest.fixture
def folder(tmp_path):
    Identity.load_or_create(tmp_path / "state", WORKER)
    return tmp_path / "state"


def test_an_identity_is_made_once_and_then_read(tmp_path):
    made = Identity.load_or_create(tmp_path / "a" / "b", WORKER)
    again = Identity.load_or_create(tmp_path / "a" / "b", WORKER)
    assert (made.key, made.certificate) == (again.key, again.certificate)
    assert Identity.create(WORKER).key != made.key


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_key_is_its_owners_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        Identity.load_or_create(tmp_path / "state", WORKER)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "state").iterdir()}
    assert modes == {"key.pem": 0o600, "certificate.pem": 0o644}


def test_the_certificate_is_what_the_other_side_expects():
    for name in (WORKER, ENCLAVE):
        certificate = x509.load_pem_x509_certificate(Identity.create(name).certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == [name]
        assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert isinstance(certificate.public_key().curve, ec.SECP256R1)
        certificate.verify_directly_issued_by(certificate)


def test_a_key_does_not_wander():
    identity = Identity.create(ENCLAVE)
    assert "PRIVATE" not in repr(identity)
    assert "PRIVATE" not in f"{identity} {[identity]}"
    for leave in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="secret"):
            leave(identity)
    with pytest.raises(TypeError, match="secret"):
        identity == identity  # noqa: B015


def test_a_fingerprint_is_the_hash_of_the_certificate():
    identity = Identity.create(WORKER)
    assert re.fullmatch(r"SHA256:([0-9a-f]{2}:){31}[0-9a-f]{2}", identity.fingerprint)
    assert identity.fingerprint == fingerprint(identity.certificate) != fingerprint(Identity.create(WORKER).certificate)
    with pytest.raises(UsageError):
        fingerprint(b"junk")


@pytest.mark.parametrize("gone", ["key.pem", "certificate.pem"])
def test_half_an_identity_is_refused(folder, gone):
    left = next(path for path in folder.iterdir() if path.name != gone)
    content = left.read_bytes()
    (folder / gone).unlink()
    with pytest.raises(UsageError, match=f"{gone} is not"):
        Identity.load_or_create(folder, WORKER)
    assert left.read_bytes() == content
    assert not (folder / gone).exists()


def test_a_key_that_others_can_read_is_refused(folder):
    for mode in (0o640, 0o604, 0o620):
        (folder / "key.pem").chmod(mode)
        with pytest.raises(UsageError, match=f"{mode:04o}.*chmod 600"):
            Identity.load_or_create(folder, WORKER)


def rsa_key():
    return rsa.generate_private_key(65537, 2048)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda: b"", "not a private key"),
        (lambda: b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "not a private key"),
        (lambda: _pem(ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"x")), "without a password"),
        (lambda: _pem(rsa_key(), NoEncryption()), "another kind of key"),
        (lambda: _pem(ec.generate_private_key(ec.SECP384R1()), NoEncryption()), "another kind of key"),
        (lambda: _pem(ec.generate_private_key(ec.SECP256R1()), NoEncryption()), "does not belong to key.pem"),
    ],
)
def test_a_key_that_does_not_fit_is_refused(folder, content, words):
    (folder / "key.pem").write_bytes(content())
    with pytest.raises(UsageError, match=words) as caught:
        Identity.load_or_create(folder, WORKER)
    assert "BEGIN" not in str(caught.value)


def _pem(key, lock):
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock)


def test_a_pipe_in_the_place_of_a_file_does_not_hang(folder):
    (folder / "key.pem").unlink()
    os.mkfifo(folder / "key.pem", 0o600)
    with pytest.raises(UsageError, match="not an ordinary file"):
        Identity.load_or_create(folder, WORKER)


def test_a_folder_that_cannot_be_used_is_said_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot be read or made"):
            Identity.load_or_create(path, WORKER)


def test_what_appears_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    """Another program makes its key between our look and our write."""
    original = Identity.create

    def slow(name):
        (tmp_path / "key.pem").write_text("theirs")
        return original(name)

    monkeypatch.setattr(Identity, "create", slow)
    with pytest.raises(UsageError, match="another program"):
        Identity.load_or_create(tmp_path, WORKER)
    assert (tmp_path / "key.pem").read_text() == "theirs"
    assert not (tmp_path / "certificate.pem").exists()


def test_a_program_that_comes_while_another_makes_the_identity_waits_for_it(tmp_path, monkeypatch):
    """Also when the other one has written one of the two files, or a part of it."""
    half, go_on = threading.Event(), threading.Event()
    original = os.fsync

    def slow(descriptor):
        half.set()
        assert go_on.wait(20)
        original(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Identity.load_or_create, tmp_path, WORKER)
        assert half.wait(20)
        second = pool.submit(Identity.load_or_create, tmp_path, WORKER)
        with pytest.raises(TimeoutError):
            second.result(0.1)
        go_on.set()
        assert first.result(20).fingerprint == second.result(20).fingerprint


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    def broken(descriptor):
        if len(list(tmp_path.iterdir())) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(UsageError, match="No space left"):
        Identity.load_or_create(tmp_path, WORKER)
    assert list(tmp_path.iterdir()) == []


def test_a_certificate_file_holds_one_certificate_and_nothing_else(tmp_path):
    one, two = Identity.create(WORKER), Identity.create(WORKER)
    path = tmp_path / "certificate.pem"
    path.write_bytes(b"  words before it\n" + one.certificate)
    assert read_certificate(path) == one.certificate
    for content, words in [
        (b"", "not a certificate"),
        (b"junk", "not a certificate"),
        (one.certificate[:200], "not a certificate"),
        (one.certificate.replace(b"\nM", b"\nN", 1), "not a certificate"),
        (one.certificate + two.certificate, "2 certificates"),
        (one.key, "private key"),
        (one.key + one.certificate, "private key"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UsageError, match=words) as caught:
            read_certificate(path)
        assert str(path) in str(caught.value)
    with pytest.raises(UsageError, match="No such file"):
        read_certificate(tmp_path / "missing")
    with pytest.raises(UsageError, match="directory"):
        read_certificate(tmp_path)


def test_inline_certificates_are_checked_in_the_same_way():
    one = Identity.create(WORKER).certificate
    assert checked_certificate(one, "worker 1") == one
    with pytest.raises(UsageError, match="worker 1"):
        checked_certificate(b"junk", "worker 1")
