"""One job by itself: what its client is told while it runs, and that a liar among the workers changes nothing."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from client.sealed import sealed
from darknight.data import read_dataset
from darknight.errors import DataError, UsageError
from darknight.fleet import local_fleet
from darknight.service.job import Job, scheme_from_words
from darknight.service.queue import RESULT, WEIGHTS, Entry
from darknight.service.runner import MODEL, PREDICTIONS, SUMMARY, Cancelled, run_job
from darknight.train import Card, tensors_as_bytes, tensors_from_bytes
from darknight.trust.blob import open_bytes
from darknight.trust.bundle import unpacked
from fleet.threads import thread_fleet
from service.enclaves import opened, seal, write_data, write_job

pytestmark = pytest.mark.usefixtures("one_thread")

LIAR = "one-element:passes=grad_weight,after=5,count=1"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    seal(folder, write_data(folder))
    return folder


def entry_of(home, name, job=None):
    """A job that has everything it needs, as the queue keeps it."""
    client = opened(write_job(home, output=name) if job is None else job)
    folder = home / f"{name}-state"
    folder.mkdir()
    shutil.copytree(client.sealed, folder / "data")
    if client.text.weights is not None:
        shutil.copy(client.path / WEIGHTS, folder / WEIGHTS)
    entry = Entry(1, folder, Job.of(client.text, workers=4), "running", keys=client.keys)
    return client, entry


def done(client, entry, start=local_fleet, **fleet):
    """The files of the result, what the client was told, and the names of the workers."""
    fleets = []

    def open_fleet():
        fleets.append(start(entry.job.scheme, workers=4, **fleet))
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


# --- predictions, with labels and without -----------------------------------------------------------------------------
INFER = """
kind = "infer"
output = "{output}"
policy = "policy.toml"
top = {top}

[data]
sealed = "{sealed}"
key = "{sealed}.key"
part = "{part}"

[model]
weights = "{weights}"

[scheme]
inputs = 2
colluders = 1
"""


def write_weights(home, name, card, favourite=None):
    """A network of random weights, that says what it takes. favourite: the class that it always predicts."""
    tensors = card.network(seed=3).state_dict()
    if favourite is not None:
        list(tensors.values())[-1][favourite] += 100
    content, _ = tensors_as_bytes(tensors, {"card": card.words()})
    (home / f"{name}.safetensors").write_bytes(content)
    return f"{name}.safetensors"


def predicted(home, name, sealed_as, *, part="all", weights=None, top=2):
    weights = weights or write_weights(home, "random", Card.of("mlp", read_dataset(str(home / "data.npz"), seed=0)))
    job = home / f"{name}.toml"
    job.write_text(INFER.format(output=name, sealed=sealed_as, part=part, weights=weights, top=top))
    client, entry = entry_of(home, name, job)
    files, told, _ = done(client, entry, thread_fleet)
    return json.loads(files[PREDICTIONS])["predictions"], json.loads(files[SUMMARY]), told, entry


@pytest.fixture(scope="module")
def bare(home):
    """The same images without labels."""
    seal(home, write_data(home, "bare", labelled=False), "bare-sealed")
    return home


def test_without_labels_predictions_are_the_same_and_no_accuracy_is_told(bare):
    rows, summary, told, entry = predicted(bare, "unlabelled", "bare-sealed", part="test")
    known, counted, _, labelled = predicted(bare, "labelled", "sealed", part="all")
    assert {row["label"] for row in rows} == {None}
    assert [row["example"] for row in rows] == list(range(44))
    assert "accuracy" not in json.dumps(summary)
    assert "accuracy" not in json.dumps(told)
    assert (summary["examples"], counted["examples"], counted["labelled"]) == (44, 44, 44)
    assert 0 <= counted["accuracy"] <= 1
    # The labelled set was split, so its rows come in another order.
    data = read_dataset(str(bare / "data.npz"), seed=0)
    chosen = torch.cat([data.train.chosen, data.test.chosen]).tolist()
    assert [rows[at]["classes"] for at in chosen] == [row["classes"] for row in known]
    # And the host does not see which of the two it was.
    assert (entry.folder / RESULT).stat().st_size == (labelled.folder / RESULT).stat().st_size


def test_one_part_is_the_test_part(bare):
    rows, _, _, _ = predicted(bare, "everything", "bare-sealed", part="all")
    assert len(rows) == 44
    with pytest.raises(UsageError, match='part = "train": the data have one part'):
        predicted(bare, "nothing", "bare-sealed", part="train")


def test_parts_are_counted_where_they_have_labels(home):
    with np.load(home / "data.npz") as data:
        np.savez(home / "half.npz", train_x=data["x"][:20], train_y=data["y"][:20], test_x=data["x"][20:])
    sealed(str(home / "half.npz"), home / "half-sealed")
    rows, summary, _, _ = predicted(home, "half", "half-sealed", part="all")
    assert [row["label"] is None for row in rows] == [False] * 20 + [True] * 24
    right = sum(row["label"] == row["classes"][0]["class"] for row in rows[:20])
    assert (summary["labelled"], summary["accuracy"]) == (20, right / 20)


def test_a_training_without_labels_is_refused_before_a_worker_is_asked(bare, monkeypatch):
    monkeypatch.setattr("darknight.client.job_folder._check_labels", lambda *anything: None)  # of an earlier release
    _, entry = entry_of(bare, "untrained", write_job(bare, output="untrained", sealed="bare-sealed"))
    with pytest.raises(DataError, match=r"no label.*Seal the data with labels"):
        run_job(entry, lambda: pytest.fail("workers were asked for"))


def write_table(home, name, classes):
    """36 columns, as the images have pixels, and classes with names."""
    lines = [",".join([*(f"p{at}" for at in range(36)), "label"])]
    lines += [",".join([*(str((row * at) % 7) for at in range(36)), classes[row % len(classes)]]) for row in range(24)]
    (home / f"{name}.csv").write_text("\n".join(lines) + "\n")
    sealed(str(home / f"{name}.csv"), home / f"{name}-sealed")
    return read_dataset(str(home / f"{name}.csv"), seed=0)


def test_labels_follow_the_names_of_the_model(home):
    """Classes that a file numbers otherwise are the same classes; and one that the model does not have is told."""
    data = write_table(home, "table", ["red", "green", "blue"])
    names = ("red", "green", "blue")
    assert data.label_names != names
    card = replace(Card.of("mlp", data), label_names=names)
    weights = write_weights(home, "named", card)
    rows, summary, _, _ = predicted(home, "named", "table-sealed", weights=weights, top=1)
    expected = [data.label_names[at] for part in (data.train, data.test) for at in part.labels.tolist()]
    assert [row["label"] for row in rows] == expected
    right = sum(row["label"] == row["classes"][0]["class"] for row in rows)
    assert summary["accuracy"] == right / 24
    write_table(home, "other", ["red", "green", "violet"])
    with pytest.raises(DataError, match="none of the model's"):
        predicted(home, "other", "other-sealed", weights=weights)
    with np.load(home / "data.npz") as images:
        np.savez(home / "more.npz", x=images["x"], y=np.arange(44) % 4)
    sealed(str(home / "more.npz"), home / "more-sealed")
    with pytest.raises(DataError, match="classes that the model does not know"):
        predicted(home, "more", "more-sealed")


def test_the_size_of_a_result_does_not_show_how_long_the_name_of_a_label_is(home):
    """A label is written once more than the classes that are predicted, in its full length."""
    names = ["a" * 2000, "b", "c"]
    sizes = set()
    for name, rare in (("long", 1), ("short", 0)):
        data = write_table(home, name, [names[1 - rare]] * 11 + [names[rare]])
        card = replace(Card.of("mlp", data), classes=3, label_names=tuple(names))
        weights = write_weights(home, name, card, favourite=0)
        rows, _, _, entry = predicted(home, f"{name}-result", f"{name}-sealed", weights=weights, top=1)
        assert sum(row["label"] == names[1 - rare] for row in rows) == 22
        assert {row["classes"][0]["class"] for row in rows} == {names[0]}
        sizes.add((entry.folder / RESULT).stat().st_size)
    assert len(sizes) == 1
