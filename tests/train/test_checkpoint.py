"""Checkpoints as files: what is in them, and that nothing damaged, foreign or newer is taken for one."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from darknight.errors import DarKnightError, DataError, UsageError
from darknight.train import Card, Store, read_checkpoint, read_model
from darknight.train.tensor_file import read_tensors, write_tensors
from train.saved import StopAfter, card, network, train, weights
from train.test_interrupt import interrupt
from train.test_loop import recipe, toy

pytestmark = pytest.mark.usefixtures("one_thread")
FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A training that was stopped in its second epoch: the folder of its checkpoints, and the weights."""
    folder, model = tmp_path_factory.mktemp("saved"), network()
    with pytest.raises(KeyboardInterrupt):
        train(folder, model, recipe(optimizer="adamw"), progress=[StopAfter(6, interrupt)])
    return folder, weights(model)


@pytest.fixture
def copy(saved, tmp_path):
    """One checkpoint to be damaged."""
    shutil.copytree(saved[0] / "step-00000006", tmp_path / "step-00000006")
    return tmp_path / "step-00000006"


def test_what_is_in_a_checkpoint(saved):
    folder, model = saved
    assert sorted(path.name for path in folder.iterdir()) == ["best.json", "best.safetensors", "step-00000006"]
    assert sorted(path.name for path in (folder / "step-00000006").iterdir()) == sorted(FILES)
    plain = load_file(folder / "step-00000006" / "model.safetensors")  # any program can read the weights
    assert all(torch.equal(plain[name], model[name]) for name in model)
    words = json.loads((folder / "step-00000006" / "state.json").read_text())
    assert words["format"] == 1
    state = words["state"]
    assert state["step"] == 6
    assert [epoch["number"] for epoch in state["epochs"]] == [1]
    assert state["recipe"]["optimizer"] == "adamw"
    assert state["card"]["train_examples"] == 30
    assert state["finished"] is False


def test_a_checkpoint_is_read_as_it_was_written(saved):
    checkpoint = read_checkpoint(saved[0] / "step-00000006")
    assert checkpoint.recipe == recipe(optimizer="adamw")
    assert {name.split("/")[0] for name in checkpoint.optimizer} == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(checkpoint.model[name], tensor) for name, tensor in saved[1].items())


def complaint_about(checkpoint) -> str:
    """Empty if it can be read."""
    try:
        read_checkpoint(checkpoint)
    except DarKnightError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_and_every_cut_is_noticed(copy, name, full):
    path = copy / name
    whole = path.read_bytes()
    places = range(len(whole)) if full else torch.linspace(0, len(whole) - 1, 150).long().unique().tolist()
    noticed = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x11
        path.write_bytes(damaged)
        if complaint := complaint_about(copy):
            assert str(path) in complaint
            noticed += 1
        else:  # white space between the names of the JSON
            assert json.loads(damaged) == json.loads(whole)
        if place % 7 == 0:
            path.write_bytes(whole[:place])
            if name == "state.json" and whole[place:].isspace():  # the end of its last line: nothing is missing
                assert complaint_about(copy) == ""
                continue
            with pytest.raises(DataError, match=name):
                read_checkpoint(copy)
    assert noticed >= len(places) - 3
    path.write_bytes(whole)
    assert read_checkpoint(copy).step == 6


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(copy, name):
    (copy / name).unlink()
    with pytest.raises(DataError, match=f"{name}: there is no such file"):
        read_checkpoint(copy)


def rewrite(path, change):
    """Change the state, with a digest that fits."""
    state = json.loads(path.read_text())["state"]
    change(state)
    text = json.dumps(state, sort_keys=True)
    path.write_text(json.dumps({"format": 1, "sha256": hashlib.sha256(text.encode()).hexdigest(), "state": state}))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("step"),
        lambda state: state.update(step=-1),
        lambda state: state.update(step=True),
        lambda state: state.update(step=9),
        lambda state: state.update(step=3),
        lambda state: state.update(step="6"),
        lambda state: state.update(loss_sum=None),
        lambda state: state.update(finished=1),
        lambda state: state.update(epochs=[]),
        lambda state: state.update(epochs=[{"number": 1}]),
        lambda state: state["epochs"][0].update(accuracy="1"),
        lambda state: state["epochs"][0].update(number=2),
        lambda state: state.update(best=None),
        lambda state: state["best"].update(accuracy=2.0),
        lambda state: state.update(recipe=[]),
        lambda state: state["recipe"].update(epochs=0),
        lambda state: state["recipe"].update(epochs=1),
        lambda state: state["recipe"].pop("seed"),
        lambda state: state["card"].update(classes=0),
        lambda state: state["card"].update(shape=[1, 4, "6"]),
        lambda state: state["card"].update(label_names=[1, 2, 3]),
        lambda state: state["card"].update(normalisation={"mean": [0.0]}),
        lambda state: state["card"].pop("model"),
        lambda state: state["card"].update(description=["ReLU"]),
        lambda state: state.update(runtime=[]),
        lambda state: state.update(extra=None),
        lambda state: state.update(files={}),
        lambda state: state["files"].update({"model.safetensors": state["files"]["optimizer.safetensors"]}),
    ],
)
def test_a_state_that_makes_no_sense_is_refused_with_its_name(copy, change):
    rewrite(copy / "state.json", change)
    with pytest.raises(DataError, match=r"step-00000006"):
        read_checkpoint(copy)


def test_files_of_two_checkpoints_do_not_mix(copy, tmp_path):
    train(tmp_path / "other", network(), recipe(optimizer="adamw"))
    shutil.copy(tmp_path / "other" / "step-00000008" / "model.safetensors", copy)
    with pytest.raises(DataError, match="from another checkpoint"):
        read_checkpoint(copy)


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        (2, "format 2, made by a newer version .* Upgrade DarKnight here"),
        (0, "format 0, of no version that this one knows; .* Use the version that made it"),
        ("1", "no number of a format"),
        (None, "no number of a format"),
    ],
)
def test_other_versions_are_refused_with_advice(copy, version, advice):
    path = copy / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    with pytest.raises(UsageError, match=advice):
        read_checkpoint(copy)


def test_other_versions_of_a_tensor_file_too(tmp_path):
    path = tmp_path / "best.safetensors"
    save_file({"a": torch.zeros(1)}, path, metadata={"darknight": '{"format": 9}', "sha256": "x"})
    with pytest.raises(UsageError, match="format 9"):
        read_model(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 8, b"\xff" * 64, b"\x80\x02csomething", (10**6).to_bytes(8, "little") + b"{}", b"[" * 200_000],
)
def test_something_else_is_no_file_of_tensors(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"model\.safetensors"):
        read_tensors(path)


def test_something_else_is_no_state(copy):
    for content in (
        b"",
        b"[" * 200_000,
        b"[]",
        b"{}",
        b'{"format": 1}',
        b'{"format": 1, "state": {"a": NaN}}',
        b"\xff",
    ):
        (copy / "state.json").write_bytes(content)
        with pytest.raises((DataError, UsageError), match=r"state\.json"):
            read_checkpoint(copy)


def test_weights_of_somebody_else_are_refused_with_advice(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "resnet.safetensors")
    with pytest.raises(DataError, match="not a file of DarKnight"):
        read_model(tmp_path / "resnet.safetensors")


def test_a_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    torch.save({"a": Bomb()}, tmp_path / "model.safetensors")
    with pytest.raises(DataError):
        read_model(tmp_path)


def test_tied_weights_views_and_odd_kinds_of_tensors_survive(tmp_path):
    base = torch.arange(12.0)
    tensors = {
        "a": base,
        "b": base,
        "turned": base.view(3, 4).T,
        "half": base.to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "single": torch.tensor(7),
        "true": torch.tensor([True, False]),
    }
    digest = write_tensors(tmp_path / "x.safetensors", tensors, {"colour": "blue"})
    found, words, again = read_tensors(tmp_path / "x.safetensors")
    assert (words["colour"], again) == ("blue", digest)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == tensors[name].dtype for name in found)


def test_which_weights_a_path_means(saved, tmp_path):
    folder = saved[0]
    assert read_model(folder)[2] == folder / "best.safetensors"
    assert read_model(folder / "step-00000006")[2] == folder / "step-00000006" / "model.safetensors"
    assert read_model(folder / "best.safetensors")[2] == folder / "best.safetensors"
    shutil.copytree(folder, tmp_path / "run" / "checkpoints")
    assert read_model(tmp_path / "run")[2] == tmp_path / "run" / "checkpoints" / "best.safetensors"
    (tmp_path / "run" / "checkpoints" / "best.safetensors").unlink()
    assert read_model(tmp_path / "run")[2].parent.name == "step-00000006"
    for nothing in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match=r"no checkpoint\. Give a file or a folder"):
            read_model(nothing)


def test_a_damaged_newest_one_names_the_one_before(tmp_path):
    train(tmp_path, network(), every=0.0)
    newest = sorted(tmp_path.glob("step-*"))[-1]
    (newest / "state.json").write_text("{")
    with Store(tmp_path) as store:
        with pytest.raises(DataError, match=rf"Remove .*{newest.name} to go on with step-00000007"):
            store.latest()
        shutil.rmtree(newest)
        assert store.latest().step == 7


def test_names_are_sorted_as_numbers(tmp_path):
    for name in ("step-00000009", "step-00000010", "step-00000010-2", "step-00000010-10", "step-100000000", "other"):
        (tmp_path / name).mkdir()
    with Store(tmp_path) as store:
        names = [path.name for path in store.checkpoints()]
    assert names == ["step-00000009", "step-00000010", "step-00000010-2", "step-00000010-10", "step-100000000"]


def test_two_trainings_cannot_have_one_folder(tmp_path):
    with Store(tmp_path), pytest.raises(UsageError, match="in use by another training"):
        Store(tmp_path)
    with Store(tmp_path):
        pass


def test_clear_removes_what_is_ours(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    (tmp_path / "copy" / "notes.txt").touch()
    with Store(tmp_path / "copy") as store:
        store.clear()
        assert store.latest() is None
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["notes.txt"]


# --- cards ------------------------------------------------------------------------------------------------------------
DESCRIPTION = {"layers": [{"type": "Flatten"}, {"type": "Linear", "in_features": 24, "out_features": 3}]}


def test_a_card_of_a_model_with_a_name_is_as_earlier_versions_wrote_and_read_it():
    words = card().words()
    assert sorted(words) == [
        *("classes", "data", "label_names", "labels", "model", "normalisation", "shape", "test_examples"),
        "train_examples",
    ]
    assert Card.from_words(words, Path("here")) == card()
    assert Card.from_words({**words, "description": None}, Path("here")) == card()


def test_a_card_with_a_description_builds_the_same_model_again():
    described = Card.of("net.toml", toy(), DESCRIPTION)
    found = Card.from_words(json.loads(json.dumps(described.words())), Path("here"))
    assert found == described
    assert list(found.network(seed=1).state_dict()) == ["1.weight", "1.bias"]
    assert torch.equal(found.network(seed=1)[1].weight, described.network(seed=1)[1].weight)
    with pytest.raises(UsageError, match="its description differ"):
        found.check_same(Card.of("net.toml", toy()), Path("here"))


def test_a_card_whose_description_is_bad_builds_nothing():
    bad = Card.of("net.toml", toy(), {"layers": [{"type": "os.system"}]})
    with pytest.raises(UsageError, match="needs a type, one of"):
        Card.from_words(bad.words(), Path("here")).network(seed=0)
