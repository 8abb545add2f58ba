"""Key files: for one account, written once, and never over anything."""

import copy
import os
import pickle
import stat

import pytest

from darknight.errors import DarKnightError, TrustError
from darknight.trust import durable, key_file
from darknight.trust.key_file import DataKey, KeyFile, read_key_file, write_key_file

MANIFEST = bytes(range(32))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data.key"


@pytest.mark.parametrize("manifest", [None, MANIFEST])
def test_a_key_comes_back(path, manifest):
    key = DataKey.fresh()
    write_key_file(path, KeyFile(key=key, manifest=manifest))
    found = read_key_file(path)
    assert found.key.raw == key.raw
    assert found.manifest == manifest
    assert path.read_text().splitlines()[0] == "darknight key 1"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_it_is_for_this_account_alone_whatever_the_umask_is(path, umask):
    before = os.umask(umask)
    try:
        write_key_file(path, KeyFile(key=DataKey.fresh()))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_so_before_anything_is_in_it(path, monkeypatch):
    seen = []
    real = os.fdopen

    def fdopen(descriptor, *rest):
        seen.append((stat.S_IMODE(os.fstat(descriptor).st_mode), os.fstat(descriptor).st_size))
        return real(descriptor, *rest)

    monkeypatch.setattr(os, "fdopen", fdopen)
    write_key_file(path, KeyFile(key=DataKey.fresh()))
    assert seen == [(0o600, 0)]


@pytest.mark.parametrize("there", ["file", "folder", "link", "dangling link"])
def test_what_is_there_stays(path, there):
    elsewhere = path.with_name("elsewhere")
    match there:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "link":
            elsewhere.write_text("precious")
            path.symlink_to(elsewhere)
        case _:
            path.symlink_to(elsewhere)
    with pytest.raises(DarKnightError, match="never overwritten"):
        write_key_file(path, KeyFile(key=DataKey.fresh()))
    if there in ("file", "link"):
        assert path.read_text() == "precious"
    if there == "dangling link":
        assert not elsewhere.exists()


def test_a_key_that_could_not_be_kept_leaves_no_file(path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DarKnightError, match="No space left"):
        write_key_file(path, KeyFile(key=DataKey.fresh()))
    assert not path.exists()


def test_it_is_on_the_disk_when_it_is_written(path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_ino), real(descriptor)))
    write_key_file(path, KeyFile(key=DataKey.fresh()))
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]
    assert key_file.sync_folder is durable.sync_folder


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o601, 0o610, 0o660, 0o644, 0o777])
def test_a_key_that_others_can_open_is_refused(path, mode):
    write_key_file(path, KeyFile(key=DataKey.fresh()))
    path.chmod(mode)
    with pytest.raises(TrustError, match=f"mode {mode:04o}.*chmod 600") as refusal:
        read_key_file(path)
    assert refusal.value.check == "key"
    path.chmod(0o400)
    read_key_file(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-1],
        lambda text: text + "\n",
        lambda text: text.upper(),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("manifest ", "manifest  "),
        lambda text: text + "x" * 5000,
        lambda text: text.replace("a", "é"),
    ],
)
def test_what_is_no_key_file_is_refused_and_not_shown(path, change):
    key = DataKey(bytes([0xAA] * 32))
    write_key_file(path, KeyFile(key=key, manifest=MANIFEST))
    path.write_text(change(path.read_text()), encoding="utf-8", newline="")
    with pytest.raises(TrustError, match="no key file, or is damaged") as refusal:
        read_key_file(path)
    assert "aaaa" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_refused_in_words(path):
    with pytest.raises(TrustError, match="No such file"):
        read_key_file(path)
    path.mkdir(mode=0o700)
    with pytest.raises(TrustError, match="not a regular file"):
        read_key_file(path)
    path.rmdir()
    os.mkfifo(path, 0o600)
    with pytest.raises(TrustError, match="not a regular file"):
        read_key_file(path)


def test_a_key_does_not_wander():
    key = DataKey(bytes(range(32)))
    for secret in (key, KeyFile(key=key, manifest=MANIFEST)):
        assert "hidden" in repr(secret)
        assert key.raw.hex() not in f"{secret} {secret!r}"
        for wander in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="secret"):
                wander(secret)
        with pytest.raises(TypeError, match="compared"):
            assert secret == secret


@pytest.mark.parametrize("raw", [b"", bytes(31), bytes(33), bytearray(32), "x" * 32])
def test_a_key_has_256_bits(raw):
    with pytest.raises(TrustError, match="32 bytes"):
        DataKey(raw)


def test_a_manifest_is_named_by_its_digest():
    with pytest.raises(TrustError, match="SHA-256"):
        KeyFile(key=DataKey.fresh(), manifest=b"short")


def test_keys_are_fresh():
    assert len({DataKey.fresh().raw for _ in range(100)}) == 100
