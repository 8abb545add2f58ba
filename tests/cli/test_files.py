"""A file is there complete or not at all."""

import errno
import os
from pathlib import Path

import pytest

from darknight.cli.files import OutputFolder
from darknight.errors import DarKnightError


def test_a_folder_is_made_and_a_file_replaced(tmp_path):
    folder = OutputFolder(tmp_path / "a" / "b")
    assert folder.write("x.json", b"old") == tmp_path / "a" / "b" / "x.json"
    folder.write("x.json", b"new")
    assert (tmp_path / "a" / "b" / "x.json").read_bytes() == b"new"
    assert os.listdir(tmp_path / "a" / "b") == ["x.json"]


def full(_descriptor):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_old_file_and_leaves_no_half(tmp_path, monkeypatch):
    folder = OutputFolder(tmp_path)
    folder.write("x.json", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DarKnightError, match=r"x\.json: No space left on device\. Choose another --output"):
        folder.write("x.json", b"new")
    assert os.listdir(tmp_path) == ["x.json"]
    assert (tmp_path / "x.json").read_bytes() == b"old"


def test_a_device_is_no_folder(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(DarKnightError, match="cannot write"):
        OutputFolder(Path(tmp_path / "full"))
