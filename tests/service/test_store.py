"""Sealed checkpoints: whole or not at all, sealed, one receipt for each, and nothing but the newest few."""

import hashlib

import pytest
import torch

from darknight.errors import DarKnightError, TrustError
from darknight.service.sealed_store import SealedStore, newest
from darknight.train import Saving, Store, fit, tensors_from_bytes
from darknight.trust.key_file import DataKey
from darknight.trust.release import Receipt
from train.saved import card, network, weights
from train.test_loop import recipe, toy

pytestmark = pytest.mark.usefixtures("one_thread")

JOB = "ab" * 16


@pytest.fixture
def key():
    return DataKey.fresh()


def store_in(folder, key, receipts=None, *, job=JOB):
    return SealedStore(folder, key, job=job, receipt=(lambda receipt: None) if receipts is None else receipts.append)


def trained(store, *, epochs=2, resume=None):
    model = network()
    fit(model, toy(), recipe(epochs=epochs), saving=Saving(store=store, card=card(), every=0.0), resume=resume)
    return model


def test_a_training_goes_on_from_a_sealed_checkpoint_as_if_it_had_never_stopped(tmp_path, key):
    receipts = []
    expected = trained(store_in(tmp_path, key, receipts))
    store = store_in(tmp_path, key)
    checkpoint = store.open(newest(tmp_path))
    assert checkpoint.finished
    assert all(torch.equal(checkpoint.model[name], value) for name, value in weights(expected).items())
    assert [receipt.number for receipt in receipts] == list(range(1, len(receipts) + 1))
    assert newest(tmp_path) == receipts[-1]
    assert receipts[-1].digest == hashlib.sha256(max(tmp_path.glob("checkpoint-*")).read_bytes()).hexdigest()


def test_the_best_weights_are_in_every_checkpoint_after_them(tmp_path, key):
    trained(store_in(tmp_path, key))
    store = store_in(tmp_path, key)
    checkpoint = store.open(newest(tmp_path))
    tensors, words, _ = tensors_from_bytes(store.best, tmp_path)
    assert tensors.keys() == checkpoint.model.keys()
    assert words["epoch"] == checkpoint.best.epoch


def test_only_the_newest_two_stay(tmp_path, key):
    receipts = []
    trained(store_in(tmp_path, key, receipts))
    assert len(receipts) > 3
    assert len(list(tmp_path.iterdir())) == 2


def test_numbers_go_on_after_a_resume(tmp_path, key):
    receipts = []
    trained(store_in(tmp_path, key, receipts), epochs=1)
    again, more = store_in(tmp_path, key), []
    checkpoint = again.open(newest(tmp_path))
    again._receipt = more.append
    again.save(checkpoint)
    assert more[0].number == receipts[-1].number + 1


def test_the_file_holds_nothing_that_a_plain_checkpoint_holds(tmp_path, key):
    """The same training, saved plainly: there the momentum and the words of the state are found."""
    (tmp_path / "sealed").mkdir()
    trained(store_in(tmp_path / "sealed", key))
    with Store(tmp_path / "plain") as store:
        trained(store)
        momentum = next(iter(store.latest().optimizer.values()))
    needles = [momentum.numpy().tobytes()[:32], b"loss_sum", b"momentum"]

    def found(folder):
        content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
        return [needle in content for needle in needles]

    assert found(tmp_path / "plain") == [True] * 3
    assert found(tmp_path / "sealed") == [False] * 3


@pytest.mark.parametrize("attack", ["flip", "cut", "other key", "other job", "other number", "other step", "missing"])
def test_a_checkpoint_that_is_not_the_one_is_refused(tmp_path, key, attack):
    trained(store_in(tmp_path, key), epochs=1)
    receipt = newest(tmp_path)
    path = max(tmp_path.glob("checkpoint-*"))
    store = store_in(
        tmp_path, DataKey.fresh() if attack == "other key" else key, job="cd" * 16 if attack == "other job" else JOB
    )
    content = bytearray(path.read_bytes())
    if attack == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        receipt = newest(tmp_path)  # a receipt of the host's making
    elif attack == "cut":
        path.write_bytes(content[:-1])
        receipt = newest(tmp_path)
    elif attack == "other number":
        path = path.replace(tmp_path / f"checkpoint-{receipt.number + 1:08}-{receipt.step:08}.sealed")
        receipt = newest(tmp_path)
    elif attack == "other step":
        path = path.replace(tmp_path / f"checkpoint-{receipt.number:08}-{receipt.step + 1:08}.sealed")
        receipt = Receipt(number=receipt.number, step=receipt.step + 1, digest=receipt.digest)
    elif attack == "missing":
        path.unlink()
    with pytest.raises(DarKnightError if attack == "missing" else TrustError):
        store.open(receipt)


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path, key, monkeypatch):
    store = store_in(tmp_path, key)
    trained(store, epochs=1)
    before = newest(tmp_path)
    checkpoint = store_in(tmp_path, key).open(before)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DarKnightError, match="Make room"):
            store.save(checkpoint)
    assert newest(tmp_path) == before
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_name_that_leads_nowhere_is_no_checkpoint(tmp_path):
    """The file is gone when it is opened: when a job ends while its client asks, or because the host wants it so."""
    (tmp_path / "checkpoint-00000001-00000007.sealed").symlink_to("nowhere")
    assert newest(tmp_path) is None
