"""One job by itself: what its client is told while it runs, and that a liar among the workers changes nothing."""

import json
import shutil

import pytest
import torch

from darknight.errors import UsageError
from darknight.fleet import local_fleet
from darknight.service.job import Job, scheme_from_words
from darknight.service.queue import RESULT, Entry
from darknight.service.runner import MODEL, SUMMARY, Cancelled, run_job
from darknight.train import tensors_from_bytes
from darknight.trust.blob import open_bytes
from darknight.trust.bundle import unpacked
from service.enclaves import opened, seal, write_data, write_job

pytestmark = pytest.mark.usefixtures("one_thread")

LIAR = "one-element:passes=grad_weight,after=5,count=1"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    seal(folder, write_data(folder))
    return folder


def entry_of(home, name):
    """A job that has everything it needs, as the queue keeps it."""
    client = opened(write_job(home, output=name))
    folder = home / f"{name}-state"
    folder.mkdir()
    shutil.copytree(client.sealed, folder / "data")
    entry = Entry(1, folder, Job.of(client.text, workers=4), "running", keys=client.keys)
    return client, entry


def done(client, entry, **fleet):
    """The files of the result, what the client was told, and the names of the workers."""
    fleets = []

    def open_fleet():
        fleets.append(local_fleet(entry.job.scheme, workers=4, **fleet))
        return fleets[0]

    run_job(entry, open_fleet)
    entry.events.close()
    label = f"{entry.name} result".encode()
    files = unpacked(
        open_bytes(client.keys.derived("result"), (entry.folder / RESULT).read_bytes(), label=label), entry.folder
    )
    return files, list(entry.events.after(0, lambda: False)), fleets[0].names


def test_a_liar_is_named_to_the_client_while_the_job_goes_on_to_the_same_weights(home, monkeypatch):
    honest, told, _ = done(*entry_of(home, "honest"))
    assert not [event for event in told if event["kind"] == "integrity"]
    monkeypatch.setenv("DARKNIGHT_INSECURE_HOSTILE", "1")
    files, told, names = done(*entry_of(home, "lied-to"), hostile={1: LIAR})
    (event,) = [event for event in told if event["kind"] == "integrity"]
    assert event["evidence"]["kind"] == "grad_weight"
    assert event["evidence"]["worker"] == names[1]
    ended = [event["ledger"] for event in told if event["kind"] == "epoch"][-1]
    assert len(ended["integrity"]["blamed"]) == 1
    assert json.loads(files[SUMMARY])["ledger"]["integrity"]["blamed"] == ended["integrity"]["blamed"]
    expected, found = (tensors_from_bytes(each[MODEL], home)[0] for each in (honest, files))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_job_that_its_client_cancels_ends_after_the_step(home):
    _, entry = entry_of(home, "cancelled")
    entry.cancelled = True
    with pytest.raises(Cancelled):
        run_job(entry, lambda: local_fleet(entry.job.scheme))
    assert not (entry.folder / RESULT).exists()


@pytest.mark.parametrize(
    "words",
    [{}, {"inputs": 1}, {"inputs": True, "colluders": 1}, {"inputs": 1, "colluders": 1, "noise": 3}, {"paper": False}],
)
def test_a_scheme_that_is_none_is_refused(words):
    with pytest.raises(UsageError):
        scheme_from_words(words)
