"""What a client keeps of a job: its key, its text, and receipts by which a rollback is refused."""

import os
import stat

import pytest

from darknight.client.job_folder import KEY, RECEIPTS, RELEASED, TEXT, Accepted
from darknight.errors import DataError, TrustError, UsageError
from darknight.trust.release import Receipt
from service.enclaves import opened, seal, write_data, write_job


@pytest.fixture
def home(tmp_path):
    seal(tmp_path, write_data(tmp_path))
    return tmp_path


def receipt(number, step=None, digest="ab"):
    return Receipt(number=number, step=number if step is None else step, digest=digest * 32)


def test_a_job_is_made_once_and_found_again(home):
    first, again = opened(write_job(home)), opened(write_job(home))
    assert first.text == again.text
    assert first.client.public == again.client.public
    assert stat.S_IMODE(os.stat(first.path / KEY).st_mode) == 0o600
    assert opened(write_job(home, output="second")).text.name != first.text.name


def test_a_job_file_that_changed_is_another_job(home):
    opened(write_job(home))
    with pytest.raises(UsageError, match="has changed since"):
        opened(write_job(home, epochs=3))


def test_a_job_of_a_newer_version_is_refused_with_advice(home):
    path = opened(write_job(home)).path / TEXT
    path.write_text(path.read_text().replace('"format":1', '"format":2'))
    with pytest.raises(UsageError, match=r"format 2, made by a newer version .* Upgrade DarKnight here"):
        opened(write_job(home))


def test_a_key_that_others_can_read_is_refused(home):
    folder = opened(write_job(home))
    (folder.path / KEY).chmod(0o644)
    with pytest.raises(TrustError, match="0600"):
        opened(write_job(home))


def test_the_text_holds_no_key(home):
    folder = opened(write_job(home))
    text = (folder.path / TEXT).read_bytes()
    assert folder.keys.data.raw.hex().encode() not in text
    assert folder.client.public.hex().encode() in text


def test_without_a_receipt_any_checkpoint_will_do(home):
    folder = opened(write_job(home))
    assert folder.checked_resume(None) is None
    assert folder.checked_resume(receipt(7)) == receipt(7)


def test_after_a_receipt_only_this_one_or_a_newer_one(home):
    folder = opened(write_job(home))
    folder.keep(receipt(5))
    folder.keep(receipt(4))  # late, and no step back
    assert folder.newest() == receipt(5)
    assert folder.checked_resume(receipt(5)) == receipt(5)
    assert folder.checked_resume(receipt(6)) == receipt(6)
    for claimed in (None, receipt(4), receipt(5, digest="cd"), receipt(5, step=4)):
        with pytest.raises(TrustError) as caught:
            folder.checked_resume(claimed)
        assert caught.value.check == "rollback"


def test_with_a_budget_keys_are_released_once_for_each_checkpoint(home):
    """A host that kills the enclave just before every checkpoint would have steps repeated without end."""
    job = write_job(home)
    job.write_text(job.read_text().replace("save_every", "leakage_budget = 2.0\nsave_every"))
    folder = opened(job)
    for resume in (None, receipt(3), receipt(4)):
        folder.releasing(resume)
        for again in (None, resume):
            with pytest.raises(TrustError) as caught:
                folder.releasing(again)
            assert caught.value.check == "budget"
    (folder.path / RELEASED).unlink()
    folder.releasing(receipt(4))


def test_without_a_budget_keys_are_released_as_often_as_need_be(home):
    folder = opened(write_job(home))
    for resume in (None, None, receipt(3), receipt(3)):
        folder.releasing(resume)


def test_receipts_that_are_damaged_are_no_reason_to_forget_them(home):
    folder = opened(write_job(home))
    for content in (b"", b"{", b"[]", b'{"number": 1}'):
        (folder.path / RECEIPTS).write_bytes(content)
        with pytest.raises(TrustError) as caught:
            folder.checked_resume(None)
        assert caught.value.check == "receipt"


def test_whom_the_user_accepted_is_remembered(home):
    folder = opened(write_job(home))
    assert folder.accepted() is None
    found = Accepted(measurement="ab", configuration="cd", simulated=True)
    folder.accept(found)
    assert folder.accepted() == found


# --- labels -----------------------------------------------------------------------------------------------------------
def test_a_training_on_data_without_labels_is_refused_before_anything_is_made(home):
    seal(home, write_data(home, "bare", labelled=False), "bare-sealed")
    job = write_job(home, output="none", sealed="bare-sealed")
    with pytest.raises(DataError, match=r'bare-sealed: some or all of its examples have no label.*kind = "infer"'):
        opened(job)
    assert not (home / "none").exists()
    (home / "weights.safetensors").write_bytes(b"any")
    text = job.read_text().replace('"train"', '"infer"').partition("[recipe]")
    job.write_text(text[0].replace('name = "small-cnn"', 'weights = "weights.safetensors"') + SCHEME)
    assert opened(job).text.kind == "infer"


SCHEME = "[scheme]\ninputs = 1\ncolluders = 1\n"
