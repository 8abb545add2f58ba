"""Sealing a dataset: what is made, where it may go, and what its order shows."""

import json
import os
import stat
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from client.sealed import sealed
from darknight.client.seal import Destination, key_beside, open_with, seal_dataset, verify_sealed
from darknight.data import read_dataset, unpack_dataset
from darknight.errors import TrustError, UsageError
from darknight.trust import fresh
from darknight.trust.key_file import DataKey, KeyFile, write_key_file
from darknight.trust.sealing import HEAD, MANIFEST, RECORDS
from data import makers


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return sealed("digits", tmp_path_factory.mktemp("digits") / "sealed")


def test_a_folder_and_a_key_are_all_that_is_made(digits):
    assert {path.name for path in digits.folder.parent.iterdir()} == {"sealed", "sealed.key"}
    assert {path.name for path in digits.folder.iterdir()} == {MANIFEST, HEAD, RECORDS}
    assert stat.S_IMODE(digits.key.stat().st_mode) == 0o600
    assert digits.key_file.manifest == digits.manifest.digest
    assert sum(digits.done) == 1797
    assert len(digits.done) > 0


def test_every_record_is_looked_at(digits):
    done = []
    data = verify_sealed(open_with(digits.folder, digits.key), progress=done.append)
    assert sum(done) == 1797
    assert data.name == "digits"
    assert torch.equal(data.test.labels, digits.data.test.labels)


@pytest.mark.parametrize("index", [0, 900, 1796])
def test_one_bad_record_is_found(tmp_path, index):
    made = sealed("digits", tmp_path / "sealed")
    path = made.folder / RECORDS
    content = bytearray(path.read_bytes())
    content[index * 272] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(TrustError, match=f"record {index}:"):
        verify_sealed(open_with(made.folder, made.key), progress=lambda more: None)


def test_a_key_opens_its_own_set_alone(tmp_path, digits):
    other = sealed("digits", tmp_path / "other")
    with pytest.raises(TrustError, match="another sealed set") as refusal:
        open_with(digits.folder, other.key)
    assert refusal.value.check == "manifest"
    lying = tmp_path / "lying.key"
    write_key_file(lying, KeyFile(key=DataKey.fresh(), manifest=digits.manifest.digest))
    with pytest.raises(TrustError, match="does not open"):
        open_with(digits.folder, lying)


def test_each_sealing_has_a_key_of_its_own(tmp_path, digits):
    again = sealed("digits", tmp_path / "again")
    assert again.key_file.key.raw != digits.key_file.key.raw
    assert again.manifest.id != digits.manifest.id


# --- without labels, and of earlier releases --------------------------------------------------------------------------
def test_data_without_labels_are_sealed_and_looked_at(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (70, 3, 4, 5), dtype=np.uint8)
    np.savez(tmp_path / "bare.npz", x=x)
    made, done = sealed(str(tmp_path / "bare.npz"), tmp_path / "sealed"), []
    data = verify_sealed(open_with(made.folder, made.key), progress=done.append)
    assert (len(data), data.labelled, data.train, sum(done), sum(made.done)) == (70, 0, None, 70, 70)
    assert torch.equal(data.test.examples(torch.arange(70)), torch.from_numpy(x).float() / 255)
    path = made.folder / RECORDS
    content = bytearray(path.read_bytes())
    content[41 * (60 + 16)] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrustError, match="record 41:"):
        verify_sealed(open_with(made.folder, made.key), progress=lambda more: None)


def test_who_stores_them_does_not_see_that_there_are_no_labels(tmp_path):
    """The same images with labels and without: manifests that differ by their id, and files of one size."""
    x = np.random.default_rng(0).integers(0, 256, (1500, 1, 4, 5), dtype=np.uint8)
    np.savez(tmp_path / "bare.npz", x=x)
    np.savez(tmp_path / "labelled.npz", x=x, y=np.arange(1500) % 3)
    both = [sealed(str(tmp_path / f"{name}.npz"), tmp_path / name) for name in ("bare", "labelled")]
    words = [json.loads((each.folder / MANIFEST).read_bytes()) for each in both]
    assert words[0].pop("id") != words[1].pop("id")
    assert words[0] == words[1]
    sizes = [{path.name: path.stat().st_size for path in each.folder.iterdir()} for each in both]
    assert sizes[0] == sizes[1]


def test_a_set_of_the_first_release_opens(tmp_path):
    """sealed_1.json was written before there were sets without labels."""
    words = json.loads(Path(__file__).with_name("sealed_1.json").read_text())
    (tmp_path / "sealed").mkdir()
    for name in (MANIFEST, HEAD, RECORDS):
        (tmp_path / "sealed" / name).write_bytes(b64decode(words[name]))
    key = tmp_path / "sealed.key"
    key.write_text(words["key"])
    key.chmod(0o600)
    data = verify_sealed(open_with(tmp_path / "sealed", key), progress=lambda more: None)
    assert (data.name, data.shape, data.classes, data.labelled) == ("seven.npz", (1, 2, 3), 3, 7)
    for part in (data.train, data.test):
        first = part.source.read(part.chosen)[:, 0, 0, 0] // 30
        assert torch.equal(part.labels, (first % 3).long())
    x = np.arange(42, dtype=np.uint8).reshape(7, 2, 3) * 5
    np.savez(tmp_path / "seven.npz", x=x, y=np.arange(7) % 3)
    again = read_dataset(str(tmp_path / "seven.npz"), seed=0)
    assert torch.equal(again.train_x, data.train_x)
    assert torch.equal(again.test_x, data.test_x)


# --- where it goes ----------------------------------------------------------------------------------------------------
def test_the_key_is_never_in_the_folder(tmp_path):
    folder = tmp_path / "sealed"
    for key in (folder / "key", folder / "below" / "key", folder, tmp_path / "x" / ".." / "sealed" / "key"):
        with pytest.raises(UsageError, match="handed over together"):
            Destination(folder=folder, key=key)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="handed over together"):
        Destination(folder=folder, key=tmp_path / "link" / "sealed" / "key")
    assert key_beside(folder) == tmp_path / "sealed.key"


@pytest.mark.parametrize("what", ["file", "empty folder", "dangling link"])
@pytest.mark.parametrize("name", ["sealed", "sealed.key"])
def test_what_is_there_is_refused(tmp_path, name, what):
    path = tmp_path / name
    match what:
        case "file":
            path.touch()
        case "empty folder":
            path.mkdir()
        case _:
            path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=f"{name} is there already"):
        Destination(folder=tmp_path / "sealed", key=tmp_path / "sealed.key")


def test_a_place_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        Destination(folder=tmp_path / "nowhere" / "sealed", key=tmp_path / "key")
    with pytest.raises(UsageError, match="there is no folder"):
        Destination(folder=tmp_path / "sealed", key=tmp_path / "nowhere" / "key")


# --- what the order shows ---------------------------------------------------------------------------------------------
def by_class(folder):
    """Pictures, class after class, as folders have them; and of two classes only."""
    return makers.pictures(folder, per_class=40, size=(9, 8)).source


def place_against_class(made):
    """Does the number of a record say something about the class in it?"""
    records = open_with(made.folder, made.key)
    data = unpack_dataset(records.head, records)
    return spearmanr(data.train.chosen, data.train.labels)


def test_where_a_record_is_says_nothing_about_its_class(tmp_path, monkeypatch):
    source = by_class(tmp_path / "set")
    assert place_against_class(sealed(source, tmp_path / "sealed", image_size=8)).pvalue > 1e-6
    # In the order of the files, which is what a reader without an order of its own would keep, it says everything.
    monkeypatch.setattr("darknight.client.seal.fresh_order", np.arange)
    bare = place_against_class(sealed(source, tmp_path / "bare", image_size=8))
    assert bare.pvalue < 1e-12
    assert bare.statistic > 0.8


def test_the_order_is_another_each_time(tmp_path, digits):
    def order(made):
        records = open_with(made.folder, made.key)
        return unpack_dataset(records.head, records).train.chosen.tolist()

    again = sealed("digits", tmp_path / "again")
    assert order(again) != order(digits)
    assert sorted(order(again)) != order(again)
    assert fresh.fresh_order is not np.arange


def test_the_manifest_is_all_that_tells_two_sets_apart(tmp_path):
    """Sets of one size with other images, labels and names: files of one size, manifests that differ by their id."""
    one = sealed(makers.table(tmp_path / "one").source, tmp_path / "sealed-one")
    path = makers.table(tmp_path / "a-much-longer-name-of-a-table").path
    path.write_text(path.read_text().replace("red", "a very long name of a colour"))
    two = sealed(str(path), tmp_path / "sealed-two")
    words = [json.loads((each.folder / MANIFEST).read_bytes()) for each in (one, two)]
    assert words[0].pop("id") != words[1].pop("id")
    assert words[0] == words[1]
    sizes = [{path.name: path.stat().st_size for path in each.folder.iterdir()} for each in (one, two)]
    assert sizes[0] == sizes[1]


def test_progress_comes_as_it_is_written(tmp_path):
    data = read_dataset("digits", seed=0)
    seen = []

    def progress(more):
        seen.append((more, os.path.lexists(tmp_path / "sealed"), (tmp_path / "sealed.key").exists()))

    seal_dataset(data, Destination(folder=tmp_path / "sealed", key=tmp_path / "sealed.key"), progress=progress)
    assert seen
    assert not any(folder or key for _, folder, key in seen)
