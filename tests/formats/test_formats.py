"""Files and messages of every release so far are opened, and those of others are refused with what to do."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import darknight as dk
from boundaries.house import ROOT
from darknight import errors
from darknight.client.seal import open_with, verify_sealed
from darknight.data import packing, unpack_either
from darknight.runtime import runtime
from darknight.service.sealed_store import SealedStore
from darknight.train import Saving, Store, fit, read_checkpoint, tensor_file
from darknight.trust import blob, key_file, sealing
from darknight.trust.blob import open_bytes
from darknight.trust.key_file import read_key_file
from darknight.trust.release import Receipt
from darknight.trust.sealing import HEAD, MANIFEST
from darknight.wire import codec, handshake, jobs
from darknight.wire.jobs import JobText
from formats.make_fixtures import (
    ABOUT,
    FIXTURES,
    JOB,
    KEY,
    LABEL,
    SECRET,
    STOPPED_AT,
    TOKEN,
    headers,
    job,
    openings,
    seven,
)
from train.saved import SCHEME, card, network, protected
from train.test_loop import recipe, toy

pytestmark = pytest.mark.usefixtures("one_thread")
UPGRADE = ROOT / "docs" / "howto" / "upgrade.md"
RELEASES = sorted(path.name for path in FIXTURES.iterdir())
NEWER = r"made by a newer version of DarKnight; this one reads format 1\. Upgrade DarKnight here"
OLDER = r"of no version that this one knows; it reads format 1\. Use the version that made it"


@pytest.fixture(params=RELEASES)
def kept(request, tmp_path) -> Path:
    """What a release wrote, where a test may change it."""
    folder = tmp_path / request.param
    shutil.copytree(FIXTURES / request.param, folder)
    (folder / "sealed.key").chmod(0o600)  # git keeps no such modes
    return folder


def test_this_release_is_among_them():
    assert dk.__version__ in RELEASES


# --- what is opened --------------------------------------------------------------------------------------------------
def test_a_checkpoint_is_opened_and_the_training_goes_on(kept, tmp_path):
    checkpoint = read_checkpoint(kept / "checkpoint")
    assert (checkpoint.step, len(checkpoint.epochs), checkpoint.finished) == (STOPPED_AT, 1, False)
    data = toy()
    with dk.Runtime(SCHEME, None, seed=3) as runtime, Store(tmp_path / "on") as store:
        model = protected(network(), runtime)
        history = fit(
            model,
            data,
            recipe(),
            runtime=runtime,
            saving=Saving(store=store, card=card(data), every=1e9, extra={}),
            resume=checkpoint,
        )
        assert runtime.state_dict()["run"] != checkpoint.runtime["run"]
    assert [epoch.number for epoch in history.epochs] == [1, 2]
    assert not torch.equal(model.state_dict()["head.weight"], checkpoint.model["head.weight"])


def test_a_sealed_set_is_opened_with_its_key(kept):
    data = verify_sealed(open_with(kept / "sealed", kept / "sealed.key"), progress=lambda more: None)
    assert (data.name, data.shape, data.classes, data.labelled) == ("seven.npz", (1, 2, 3), 3, 7)
    images, labels = seven()
    for part in (data.train, data.test):
        for image, label in zip(part.source.read(part.chosen), part.labels, strict=True):
            (number,) = [at for at in range(7) if (images[at] == image.numpy()[0]).all()]
            assert labels[number] == label


def receipt_of(kept):
    return Receipt.from_words(json.loads((kept / "job" / "receipts.json").read_bytes()))


def sealed_checkpoint(kept, receipt):
    return SealedStore(kept / "job", KEY, job=JOB, receipt=lambda receipt: None).open(receipt)


def test_a_sealed_checkpoint_is_opened_with_its_receipt(kept):
    checkpoint = sealed_checkpoint(kept, receipt_of(kept))
    assert checkpoint.step == STOPPED_AT
    plain = read_checkpoint(kept / "checkpoint").model
    assert all(torch.equal(tensor, plain[name]) for name, tensor in checkpoint.model.items())


def test_a_sealed_blob_is_opened(kept):
    assert open_bytes(KEY, (kept / "blob").read_bytes(), label=LABEL) == SECRET


def test_a_job_is_read(kept):
    assert JobText.decode((kept / "job.json").read_bytes()) == job()


def test_a_recorded_opening_is_understood_by_the_other_side(kept):
    wire, version, protocol = kept / "wire", kept.name, recorded_protocol(kept)
    hellos = [handshake.read_hello((wire / name).read_bytes()) for name in ("hello", "hello-door")]
    assert hellos == [handshake.Hello(version, protocol, None), handshake.Hello(version, protocol, TOKEN)]
    for name, door in (("welcome", None), ("welcome-door", TOKEN)):
        welcome = handshake.read_welcome((wire / name).read_bytes(), protocol)
        assert welcome == handshake.Welcome(version=version, protocol=protocol, door=door, **ABOUT)
    assert handshake.read_welcome((wire / "refusal").read_bytes(), protocol) == "no place is free"


def recorded_protocol(kept) -> int:
    return json.loads((kept / "wire" / "hello").read_bytes())["protocol"]


def test_recorded_headers_are_understood(kept):
    for name in headers(recorded_protocol(kept)).keys() - {"answer", "refused"}:
        codec.check_message(codec.unpack((kept / "wire" / name).read_bytes()))
    answer = codec.unpack((kept / "wire" / "answer").read_bytes())
    assert [kind.value for kind in codec.reply_forms(answer)] == ["forward"]
    assert codec.is_refusal(codec.unpack((kept / "wire" / "refused").read_bytes()))


def test_what_is_sent_in_a_protocol_is_what_was_sent_in_it(kept):
    """Headers that change without a new number would be refused by workers that are up to date by all they know."""
    protocol = recorded_protocol(kept)
    if protocol not in handshake.SPOKEN:
        pytest.skip(f"it spoke protocol {protocol}")
    assert headers(protocol) == {name: (kept / "wire" / name).read_bytes() for name in headers(protocol)}
    told = {name: {**json.loads(frame), "darknight": kept.name} for name, frame in openings(protocol).items()}
    assert told == {name: json.loads((kept / "wire" / name).read_bytes()) for name in openings(protocol)}


def test_the_headers_that_came_with_seeds_are_understood_and_unknown_before():
    """What a later release will keep in its folder; and why it needed a number of its own."""
    for name in ("forward", "backward"):
        header = codec.unpack(headers()[f"{name}-seed"])
        codec.check_message(header)
        assert header.pop("seed") == {"key": bytes(range(32)).hex(), "prime": 2**28 - 57}
        assert codec.pack(header) == headers(1)[name]
    assert headers(1).keys() == headers().keys() - {"forward-seed", "backward-seed"}


# --- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("number", "advice"), [(2, NEWER), (0, OLDER)])
class TestAnotherNumber:
    """Each kind of file or message, with the number of a later version and of one before the first."""

    def test_a_checkpoint(self, kept, number, advice):
        path = kept / "checkpoint" / "state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": number, "unheard": "of"}))
        with pytest.raises(errors.UsageError, match=f"state.json: format {number}, {advice}"):
            read_checkpoint(kept / "checkpoint")

    def test_the_state_of_a_runtime(self, kept, number, advice):
        with dk.Runtime(SCHEME, None, seed=3) as runtime:
            protected(network(), runtime)
            state = read_checkpoint(kept / "checkpoint").runtime
            with pytest.raises(errors.UsageError, match=f"format {number}, {advice}"):
                runtime.load_state_dict({**state, "format": number})
            runtime.load_state_dict(state)

    def test_a_sealed_set(self, kept, number, advice):
        path = kept / "sealed" / MANIFEST
        words = json.loads(path.read_text()) | {"format": f"darknight sealed records {number}", "unheard": "of"}
        path.write_text(json.dumps(words))
        with pytest.raises(
            errors.TrustError, match=f"{MANIFEST}: the sealed set is of format {number}, {advice}"
        ) as no:
            open_with(kept / "sealed", kept / "sealed.key")
        assert no.value.check == "version"

    def test_the_sealed_head_of_a_set(self, kept, number, advice):
        path = kept / "sealed" / HEAD
        path.write_bytes(b"DKB%d" % number + path.read_bytes()[4:])
        with pytest.raises(errors.TrustError, match=f"{HEAD}: sealed data: format {number}, {advice}"):
            open_with(kept / "sealed", kept / "sealed.key")

    def test_a_sealed_checkpoint(self, kept, number, advice):
        (path,) = (kept / "job").glob("checkpoint-*.sealed")
        path.write_bytes(b"DKB%d" % number + path.read_bytes()[4:])
        receipt = replace(receipt_of(kept), digest=hashlib.sha256(path.read_bytes()).hexdigest())
        with pytest.raises(errors.TrustError, match=f"sealed data: format {number}, {advice}"):
            sealed_checkpoint(kept, receipt)

    def test_a_sealed_blob(self, kept, number, advice):
        sealed = (kept / "blob").read_bytes()
        with pytest.raises(errors.TrustError, match=f"sealed data: format {number}, {advice}") as no:
            open_bytes(KEY, b"DKB%d" % number + sealed[4:], label=LABEL)
        assert no.value.check == "version"

    def test_a_key(self, kept, number, advice):
        path = kept / "sealed.key"
        path.write_text(path.read_text().replace("key 1\n", f"key {number}\nunheard of\n", 1))
        with pytest.raises(errors.TrustError, match=f"a key of format {number}, {advice}") as no:
            read_key_file(path)
        assert no.value.check == "version"
        assert path.read_text().split()[-1] not in str(no.value)

    def test_a_job(self, kept, number, advice):
        words = json.loads((kept / "job.json").read_bytes()) | {"format": number, "unheard": "of"}
        with pytest.raises(codec.BadFrame, match=f"a job in format {number}, {advice}"):
            JobText.decode(json.dumps(words).encode())

    @pytest.mark.parametrize("name", ["hello", "welcome", "refusal"])
    def test_a_recorded_opening(self, kept, number, advice, name):
        """The two words that stay as they are in every version are enough to tell who has to change."""
        protocol = handshake.PROTOCOL + 1 if number else 0
        frame = codec.pack({"darknight": "9.9.9", "protocol": protocol, "unheard": "of"})
        read, them, us = (
            (handshake.read_hello, "the enclave", "this worker")
            if name == "hello"
            else (handshake.read_welcome, "the worker", "this enclave")
        )
        with pytest.raises(handshake.Mismatch, match=f"Upgrade {us if number else them}"):
            read(frame)


def test_a_number_that_is_none_is_refused_without_being_shown():
    assert "secret" not in errors.other_format("secret", reads=1)
    assert "no number of a format" in errors.other_format(None, reads=1)


def test_what_the_head_of_a_set_says_has_a_number_of_its_own(kept):
    records = open_with(kept / "sealed", kept / "sealed.key")
    assert b'"format": 1' in records.head
    with pytest.raises(errors.DataError, match=r"of format 3, made by a newer version .* reads format 2\. Upgrade"):
        unpack_either(records.head.replace(b'"format": 1', b'"format": 3'), records)


def test_the_page_about_upgrades_has_the_numbers_of_the_code():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (\d+) \|$", UPGRADE.read_text(), flags=re.MULTILINE)
    assert {name: int(number) for name, number in rows} == {
        "enclave and worker": handshake.PROTOCOL,
        "a job": jobs._FORMAT,
        "enclave and client": jobs.CONFIGURATION,
        "a checkpoint": tensor_file.FORMAT,
        "the state of a runtime": runtime._STATE,
        "a sealed set": sealing._NUMBER,
        "the head of a sealed set": packing._UNLABELLED,
        "sealed checkpoints, results, heads": blob._FORMAT,
        "a key file": key_file._FORMAT,
    }
