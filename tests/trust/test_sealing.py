"""Sealed sets: what comes out is what went in, and nothing else ever does."""

import copy
import hashlib
import json
import os
import pickle

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from darknight.errors import DataError, TrustError, UsageError
from darknight.trust import blob, sealing
from darknight.trust.key_file import DataKey
from darknight.trust.sealing import HEAD, MANIFEST, RECORDS, Manifest, SealedRecords, write_sealed
from trust import sealed_sets
from trust.sealed_sets import COUNT, HEAD_TEXT, RECORD, STRIDE, made
from trust.weakened import NO_INDEX, NO_MANIFEST, NO_SIZE, NO_TAG, weakened


@pytest.fixture
def one(tmp_path):
    return made(tmp_path / "one")


# --- what went in comes out -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("count", "record"), [(1, 1), (1, 1 << 20), (COUNT, RECORD), (3, (1 << 19) + 1), (700, 3)])
@pytest.mark.parametrize("batch", [1, 1000])
def test_everything_comes_back(tmp_path, count, record, batch):
    one = made(tmp_path / "one", count=count, record=record, batch=batch)
    head, records = one.read()
    assert head == HEAD_TEXT
    assert np.array_equal(records, one.plain)
    assert {path.name for path in one.folder.iterdir()} == {MANIFEST, HEAD, RECORDS}


@pytest.mark.parametrize("head", [b"", b"x", bytes(1 << 20), bytes((1 << 20) + 1)])
def test_a_head_of_any_size_comes_back(tmp_path, head):
    assert made(tmp_path / "one", head=head).opened().head == head


def test_records_come_in_any_order_and_any_number(one):
    records = one.opened()
    generator = np.random.default_rng(1)
    for _ in range(50):
        numbers = generator.integers(0, COUNT, generator.integers(0, 40))
        assert np.array_equal(records.read(numbers), one.plain[numbers])


@pytest.mark.parametrize("numbers", [[-1], [COUNT], [0, 5, COUNT + 3]])
def test_a_number_that_is_none_is_an_index_error(one, numbers):
    with pytest.raises(IndexError, match="outside 0 to 22"):
        one.opened().read(np.array(numbers))


def test_a_batch_reads_its_own_records_and_no_others(one, monkeypatch):
    records, read = one.opened(), []
    real = os.preadv

    def preadv(descriptor, buffers, offset):
        read.append((offset, sum(map(len, buffers))))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    records.read(np.array([17, 4, 5, 6, 2]))
    assert read == [(17 * STRIDE, STRIDE), (4 * STRIDE, 3 * STRIDE), (2 * STRIDE, STRIDE)]


def test_the_format_is_what_its_description_says(one):
    """Opened here once more, by hand, from the words at the top of trust/sealing.py and trust/blob.py."""
    raw = (one.folder / MANIFEST).read_bytes()
    digest = hashlib.sha256(raw).digest()
    key = HKDF(SHA256(), 32, digest, b"darknight records 1").derive(one.key.raw)
    content = (one.folder / RECORDS).read_bytes()
    for index in range(COUNT):
        sealed = content[index * (RECORD + 16) : (index + 1) * (RECORD + 16)]
        associated = digest + index.to_bytes(8, "big") + COUNT.to_bytes(8, "big")
        assert AESGCM(key).decrypt(index.to_bytes(12, "big"), sealed, associated) == one.plain[index].tobytes()
    head, label = (one.folder / HEAD).read_bytes(), b"darknight head 1 " + digest
    assert head[:4] == b"DKB1"
    info = b"darknight blob 1" + len(label).to_bytes(8, "big") + label
    key = HKDF(SHA256(), 32, head[4:36], info).derive(one.key.raw)
    assert AESGCM(key).decrypt(bytes(12), head[36:], bytes(8) + b"\1") == HEAD_TEXT


def test_the_manifest_says_how_much_and_nothing_else(one):
    words = json.loads((one.folder / MANIFEST).read_bytes())
    assert words.keys() == {"format", "id", "count", "record_bytes", "head_bytes"}
    assert (words["count"], words["record_bytes"]) == (COUNT, RECORD)
    assert words["head_bytes"] == (one.folder / HEAD).stat().st_size


# --- attacks ----------------------------------------------------------------------------------------------------------
# Each attack, and the protections without which it succeeds.
ATTACKS = {
    sealed_sets.swap_two: (NO_INDEX,),
    sealed_sets.rotate: (NO_INDEX,),
    sealed_sets.duplicate: (NO_INDEX,),
    sealed_sets.record_of_another_set: (NO_MANIFEST,),
    sealed_sets.all_records_of_another_set: (NO_MANIFEST,),
    sealed_sets.head_of_another_set: (NO_MANIFEST,),
    sealed_sets.manifest_of_another_set: (NO_MANIFEST,),
    sealed_sets.manifest_with_another_id: (NO_MANIFEST,),
    sealed_sets.cut_short: (NO_SIZE, NO_TAG),
    sealed_sets.cut_short_and_said_so: (NO_MANIFEST,),
    sealed_sets.cut_within_a_record: (NO_SIZE, NO_TAG),
    sealed_sets.extended: (NO_SIZE,),
    sealed_sets.extended_and_said_so: (NO_MANIFEST, NO_INDEX),
    sealed_sets.one_bit_of_a_record: (NO_TAG,),
    sealed_sets.one_bit_of_the_head: (NO_TAG,),
    sealed_sets.head_cut_short: (NO_SIZE, NO_TAG),
    sealed_sets.head_extended: (NO_SIZE, NO_TAG),
    sealed_sets.records_of_other_sizes: (NO_MANIFEST, NO_TAG),
}
attacks = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)


def two(folder):
    """Two sets of one size under one key: more than an attacker ever gets, as each sealing has a key of its own."""
    key = DataKey.fresh()
    return made(folder / "one", key=key), made(folder / "other", key=key, seed=1, head=HEAD_TEXT[::-1])


@attacks
def test_a_changed_set_is_refused(tmp_path, attack):
    one, other = two(tmp_path)
    attack(one, other)
    with pytest.raises(TrustError) as refusal:
        one.read()
    assert refusal.value.check in ("manifest", "size", "head", "record")
    assert str(one.folder) in str(refusal.value)
    assert_no_data(str(refusal.value), one)


@attacks
def test_without_its_protection_it_would_pass(tmp_path, attack):
    """The control: the attack is a good one, and the test above can fail."""
    with weakened(*ATTACKS[attack]):
        one, other = two(tmp_path)
        assert_right(one)
        before = snapshot(one)
        attack(one, other)
        assert snapshot(one) != before
        one.read()


@pytest.mark.parametrize("weakness", [NO_INDEX, NO_MANIFEST, NO_SIZE, NO_TAG])
def test_what_is_weakened_still_opens_what_it_sealed(tmp_path, weakness):
    with weakened(weakness):
        assert_right(made(tmp_path / "one"))


def assert_right(one):
    head, records = one.read()
    assert head == HEAD_TEXT
    assert np.array_equal(records, one.plain)


def snapshot(one):
    return {path.name: path.read_bytes() for path in one.folder.iterdir()}


def assert_no_data(message, one):
    for row in one.plain:
        assert row.tobytes().hex() not in message
        assert str(row.tolist())[1:-1] not in message
    assert "cats" not in message


def test_untouched_records_still_open(tmp_path):
    """An attack on one record says so when that one is read, and harms no other."""
    one, other = two(tmp_path)
    sealed_sets.duplicate(one, other)
    records = one.opened()
    others = np.array([number for number in range(COUNT) if number != 7])
    assert np.array_equal(records.read(others), one.plain[others])
    with pytest.raises(TrustError, match="record 7") as refusal:
        records.read(np.array([6, 7, 8]))
    assert refusal.value.check == "record"


def test_a_set_that_changes_while_it_is_used_is_refused(tmp_path):
    one, other = two(tmp_path)
    records = one.opened()
    sealed_sets.all_records_of_another_set(one, other)
    with pytest.raises(TrustError, match="record 0"):
        records.read(np.arange(3))
    os.truncate(one.folder / RECORDS, 5 * STRIDE)
    with pytest.raises(TrustError, match="announces"):
        records.read(np.arange(3))
    (one.folder / RECORDS).unlink()
    with pytest.raises(DataError, match="cannot be read"):
        records.read(np.arange(3))


def test_every_flipped_bit_is_refused(one, full, tally):
    """In the manifest, the head and the records: all of them with --full, else of each byte one."""
    flips = 0
    for name in (MANIFEST, HEAD, RECORDS):
        path = one.folder / name
        content = path.read_bytes()
        for place in range(len(content)):
            for bit in range(8) if full else [place % 8]:
                changed = bytearray(content)
                changed[place] ^= 1 << bit
                path.write_bytes(changed)
                with pytest.raises(TrustError):
                    one.read()
                flips += 1
        path.write_bytes(content)
    assert_right(one)
    tally("sealed data, flipped bits", {"flipped": flips, "accepted": 0})


def test_another_key_opens_nothing(one):
    with pytest.raises(TrustError, match="key is of another set") as refusal:
        one.opened(key=DataKey.fresh())
    assert refusal.value.check == "head"
    close = bytearray(one.key.raw)
    close[31] ^= 1
    with pytest.raises(TrustError, match="key is of another set"):
        one.opened(key=DataKey(bytes(close)))


def test_another_set_under_the_same_key_is_not_the_one_that_is_meant(tmp_path):
    one, other = two(tmp_path)
    assert one.opened(manifest=one.digest).manifest.digest == one.digest
    with pytest.raises(TrustError, match="another sealed set") as refusal:
        other.opened(manifest=one.digest)
    assert refusal.value.check == "manifest"
    other.opened()  # the control: without saying which is meant, it opens


@pytest.mark.parametrize(
    "change",
    [
        {"format": "darknight sealed things 1"},
        {"format": "darknight sealed records 1 "},
        {"count": 0},
        {"count": -1},
        {"count": True},
        {"count": 23.0},
        {"count": "23"},
        {"count": 1 << 41},
        {"record_bytes": 1 << 31},
        {"head_bytes": 1 << 33},
        {"id": "AB" * 32},
        {"id": "ab" * 31},
        {"id": 7},
        {"name": "cats"},
    ],
)
def test_a_manifest_that_is_none_is_refused_before_anything_is_read(one, change, monkeypatch):
    sealed_sets.announce(one, **change)
    (one.folder / HEAD).unlink()  # nobody looks for it
    with pytest.raises(TrustError, match="manifest") as refusal:
        one.opened()
    assert refusal.value.check == "manifest"


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", "[" * 4000, "\xff", "{" + " " * 5000 + "}"])
def test_neither_is_something_else_a_manifest(one, text):
    (one.folder / MANIFEST).write_bytes(text.encode("latin-1"))
    with pytest.raises(TrustError, match="manifest"):
        one.opened()


def test_there_is_one_way_to_write_a_manifest(one):
    raw = (one.folder / MANIFEST).read_bytes()
    words = json.loads(raw)
    assert Manifest.from_bytes(raw).to_bytes() == raw
    for other in (json.dumps(words), json.dumps(words, indent=2), raw.decode() + "\n", raw.decode().replace(": ", ":")):
        with pytest.raises(TrustError):
            Manifest.from_bytes(other.encode())


@pytest.mark.parametrize("name", [MANIFEST, HEAD, RECORDS])
def test_a_file_that_is_missing_or_no_file_is_a_data_error(one, name):
    (one.folder / name).unlink()
    with pytest.raises(DataError, match=name):
        one.opened()
    os.mkfifo(one.folder / name)  # nobody writes to it: who waits for it waits for ever
    with pytest.raises(DataError, match="not a regular file"):
        one.opened()
    (one.folder / name).unlink()
    (one.folder / name).mkdir()
    with pytest.raises(DataError, match=name):
        one.opened()


# --- keys and nonces --------------------------------------------------------------------------------------------------
def test_no_key_and_nonce_are_used_twice(tmp_path, monkeypatch):
    """Not within a set, not in two sets under one data key, not for the same data again."""
    used = []
    real = blob.cipher_for

    def cipher_for(key, *, salt, info):
        derived = HKDF(SHA256(), 32, salt, info).derive(key.raw)
        return Watched(real(key, salt=salt, info=info), derived)

    class Watched:
        def __init__(self, cipher, derived):
            self._cipher, self._derived = cipher, derived

        def encrypt(self, nonce, *rest):
            used.append((self._derived, nonce))
            return self._cipher.encrypt(nonce, *rest)

        def encrypt_into(self, nonce, *rest):
            used.append((self._derived, nonce))
            return self._cipher.encrypt_into(nonce, *rest)

    monkeypatch.setattr(blob, "cipher_for", cipher_for)
    monkeypatch.setattr(sealing, "cipher_for", cipher_for)
    key = DataKey.fresh()
    for name in ("one", "again"):
        made(tmp_path / name, key=key, head=bytes((1 << 20) + 5))
    assert len(used) == 2 * (COUNT + 2)
    assert len(set(used)) == len(used)
    with weakened(NO_INDEX):  # and this would notice
        monkeypatch.setattr(sealing, "cipher_for", cipher_for)
        made(tmp_path / "weak", key=key)
    assert len(set(used)) < len(used)


def test_the_same_data_sealed_twice_has_nothing_in_common(tmp_path):
    key = DataKey.fresh()
    one, again = made(tmp_path / "one", key=key), made(tmp_path / "again", key=key)
    assert np.array_equal(one.plain, again.plain)
    for name in (RECORDS, HEAD):
        first, second = ((each.folder / name).read_bytes() for each in (one, again))
        same = sum(a == b for a, b in zip(first, second, strict=True)) / len(first)
        assert same < 0.1  # 1 in 256, but for the four letters at the beginning of the head


def test_equal_records_look_different(tmp_path):
    folder = tmp_path / "zeros"
    folder.mkdir()
    zeros = np.zeros((50, 64), dtype=np.uint8)
    write_sealed(folder, DataKey.fresh(), count=50, record_bytes=64, head=b"", records=[zeros])
    content = (folder / RECORDS).read_bytes()
    assert len({content[at : at + 16] for at in range(0, len(content), 16)}) == len(content) // 16


def test_an_opened_set_does_not_wander(one):
    records = one.opened()
    for wander in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="secret"):
            wander(records)
    assert "hidden" in repr(records)
    assert one.key.raw.hex() not in repr(records) + str(records)


# --- writing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "batches",
    [[], [(COUNT - 1, RECORD)], [(COUNT, RECORD), (1, RECORD)], [(COUNT, RECORD + 1)], [(COUNT * RECORD,)]],
)
def test_records_that_are_not_as_announced_are_no_set(tmp_path, batches):
    """Neither more nor fewer nor others; and without its manifest, what was written opens nowhere."""
    records = (np.zeros(shape, dtype=np.uint8) for shape in batches)
    key = DataKey.fresh()
    with pytest.raises(ValueError, match="records"):
        write_sealed(tmp_path, key, count=COUNT, record_bytes=RECORD, head=b"", records=records)
    with pytest.raises(DataError, match=MANIFEST):
        SealedRecords(tmp_path, key, manifest=None)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1 << 41, 5), (5, (1 << 30) + 1)])
def test_a_set_that_is_too_large_is_refused_in_words(tmp_path, sizes):
    with pytest.raises(UsageError, match="can be sealed"):
        write_sealed(tmp_path, DataKey.fresh(), count=sizes[0], record_bytes=sizes[1], head=b"", records=[])
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(one):
    before = snapshot(one)
    with pytest.raises(FileExistsError):
        write_sealed(one.folder, one.key, count=1, record_bytes=1, head=b"", records=[np.zeros((1, 1), np.uint8)])
    assert snapshot(one) == before
