"""One piece of data, sealed as a whole: a checkpoint, a result, the head of a data set.

    sealed = "DKB1" || salt (32 fresh bytes) || chunk 0 || chunk 1 || ...
    key    = HKDF-SHA256(data key, salt, info = "darknight blob 1" || length of label || label)
    chunk  = AES-256-GCM(key, nonce = index, up to 1 MiB of the data, AAD = index || 1 if it is the last, else 0)

Guarantees: what `open_bytes` returns is what was given to `seal_bytes` with the same key and the same label, whole and
in its order; anything else is a TrustError. The same data sealed twice looks unrelated, and no (key, nonce) is ever
used twice. Contract tests: tests/trust/test_blob.py.
Assumes: the label says what the data is for (which job, which step): with another one it does not open. That it is the
newest of its label is not promised.
Leaks: the size.
"""

from __future__ import annotations

from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from darknight.errors import TrustError, other_format
from darknight.trust.fresh import NONCE_BYTES, fresh_nonce
from darknight.trust.key_file import DataKey

TAG_BYTES = 16
_KIND, _FORMAT = b"DKB", 1
_MAGIC = _KIND + str(_FORMAT).encode()
_INFO = b"darknight blob 1"
_BEGIN = len(_MAGIC) + NONCE_BYTES
_CHUNK = 1 << 20

Bytes = bytes | bytearray | memoryview


def sealed_size(size: int) -> int:
    """Of a blob that holds `size` bytes."""
    return _BEGIN + size + TAG_BYTES * _chunks(size)


def seal_bytes(key: DataKey, data: Bytes, *, label: bytes) -> bytes:
    return b"".join(map(bytes, sealed_pieces(key, data, label=label)))


def sealed_pieces(key: DataKey, data: Bytes, *, label: bytes) -> Iterator[Bytes]:
    """What `seal_bytes` gives, a piece at a time. Each is overwritten by the next."""
    plain = memoryview(data).cast("B")
    salt = fresh_nonce()
    cipher = cipher_for(key, salt=salt, info=_info(label))
    yield _MAGIC + salt
    chunks = _chunks(len(plain))
    buffer = memoryview(bytearray(min(len(plain), _CHUNK) + TAG_BYTES))
    for index in range(chunks):
        chunk = plain[index * _CHUNK : (index + 1) * _CHUNK]
        sealed = buffer[: len(chunk) + TAG_BYTES]
        cipher.encrypt_into(nonce_of(index), chunk, _associated(index, chunks), sealed)
        yield sealed


def open_bytes(key: DataKey, sealed: Bytes, *, label: bytes) -> bytes:
    view = memoryview(sealed).cast("B")
    version = bytes(view[len(_KIND) : len(_MAGIC)])
    if view[: len(_KIND)] == _KIND and version.isdigit() and int(version) != _FORMAT:
        raise TrustError(f"sealed data: {other_format(int(version), reads=_FORMAT)}.", check="version")
    if len(view) < _BEGIN + TAG_BYTES or view[: len(_MAGIC)] != _MAGIC:
        raise TrustError("sealed data: cut short, or of another kind or version. Take another copy.", check="sealed")
    cipher = cipher_for(key, salt=bytes(view[len(_MAGIC) : _BEGIN]), info=_info(label))
    body = view[_BEGIN:]
    chunks = max(1, -(-len(body) // (_CHUNK + TAG_BYTES)))
    size = len(body) - TAG_BYTES * chunks
    # A last chunk that is shorter than its tag is none; and only data without bytes has an empty one.
    if _chunks(max(size, 0)) != chunks or size < 0:
        raise _refused()
    plain = bytearray(size)
    out = memoryview(plain)
    try:
        for index in range(chunks):
            begin = index * (_CHUNK + TAG_BYTES)
            cipher.decrypt_into(
                nonce_of(index),
                body[begin : begin + _CHUNK + TAG_BYTES],
                _associated(index, chunks),
                out[index * _CHUNK : (index + 1) * _CHUNK],
            )
    except InvalidTag as error:
        raise _refused() from error
    return bytes(plain)


def cipher_for(key: DataKey, *, salt: bytes, info: bytes) -> AESGCM:
    """A cipher under a key that is derived for one purpose."""
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(key.raw))


def nonce_of(index: int) -> bytes:
    return index.to_bytes(12, "big")


def _chunks(size: int) -> int:
    return max(1, -(-size // _CHUNK))


def _associated(index: int, chunks: int) -> bytes:
    return index.to_bytes(8, "big") + bytes([index == chunks - 1])


def _info(label: bytes) -> bytes:
    return _INFO + len(label).to_bytes(8, "big") + label


def _refused() -> TrustError:
    return TrustError(
        "sealed data does not open: the key or the label is of something else, or it was changed. Take another copy.",
        check="sealed",
    )
