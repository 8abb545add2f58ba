"""Sealing with protections taken away, in the code itself: what an attack then achieves is what they are for."""

import os
from contextlib import contextmanager

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from darknight.trust import blob, sealing
from darknight.trust.sealing import _Seal

NO_INDEX, NO_MANIFEST, NO_SIZE, NO_TAG = "no index", "no manifest", "no size", "no tag"


@contextmanager
def weakened(*what):
    """no index: every record under one nonce, and its number not authenticated.
    no manifest: keys, records and the head have nothing to do with it.
    no size: files may be longer or shorter than the manifest says.
    no tag: deciphered, and not verified.
    """
    index_of = (lambda index: 0) if NO_INDEX in what else (lambda index: index)
    cipher_for = _Unverified if NO_TAG in what else blob.cipher_for
    with pytest.MonkeyPatch.context() as patch:
        replace = patch.setattr
        if NO_MANIFEST in what:
            replace(sealing, "cipher_for", lambda key, *, salt, info: cipher_for(key, salt=b"", info=info))
            replace(_Seal, "_associated", lambda self, index: index_of(index).to_bytes(8, "big"))
            replace(sealing, "_HEAD_LABEL", _Alone(b"head"))
        else:
            real = _Seal._associated
            replace(sealing, "cipher_for", cipher_for)
            replace(_Seal, "_associated", lambda self, index: real(self, index_of(index)))
        replace(sealing, "nonce_of", lambda index: blob.nonce_of(index_of(index)))
        replace(blob, "cipher_for", cipher_for)
        if NO_SIZE in what:
            replace(sealing, "_check_size", lambda path, found, *, needed: None)
            replace(sealing, "_fill", _fill_what_is_there)
        yield


def _fill_what_is_there(file, buffer, begin, path):
    os.preadv(file, [buffer], begin)


class _Alone(bytes):
    """A label that swallows what is added to it."""

    def __add__(self, other):
        return self


class _Unverified:
    """AES-GCM without its tag is AES-CTR that begins to count at 2."""

    def __init__(self, key, *, salt, info):
        self._key = HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(key.raw)
        self._real = blob.AESGCM(self._key)
        self.encrypt, self.encrypt_into = self._real.encrypt, self._real.encrypt_into

    def decrypt_into(self, nonce, data, associated, out):
        cipher = Cipher(AES(self._key), CTR(nonce + (2).to_bytes(4, "big"))).decryptor()
        out[:] = cipher.update(bytes(data[:-16]))
