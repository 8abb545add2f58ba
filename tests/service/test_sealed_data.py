"""Training on sealed data is training on the data: the same batches, the same card, the same weights."""

import numpy as np
import pytest
import torch

from client.sealed import sealed
from darknight.data import read_dataset
from darknight.errors import TrustError
from darknight.models import build_model
from darknight.service.sealed_data import open_dataset
from darknight.train import Card, Recipe, fit
from darknight.train.batches import order_of, training_batch
from data import makers

FORMATS = ("cifar10-python", "cifar10-binary", "mnist-gz", "npz", "npz-compressed", "png", "csv")


def opened(made):
    return open_dataset(made.folder, made.key_file.key, manifest=made.manifest.digest)


@pytest.mark.parametrize("name", FORMATS)
def test_batches_and_card_are_those_of_the_files(tmp_path, name):
    settings = {"image_size": 40, "seed": 5} if name == "png" else {"seed": 5}
    source = makers.MAKERS[name](tmp_path / "set").source
    data = read_dataset(source, **settings)
    again = opened(sealed(source, tmp_path / "sealed", **settings))
    assert Card.of("mlp", again) == Card.of("mlp", data)
    assert again.augmentation == data.augmentation
    recipe = Recipe(epochs=2, batch_size=3, learning_rate=0.1, seed=2, augment=data.augmentation)
    for epoch in range(2):
        orders = [order_of(recipe, epoch, len(each.train)) for each in (data, again)]
        for index, (chosen, chosen_again) in enumerate(zip(*orders, strict=True)):
            x, labels = training_batch(data, recipe, chosen, epoch, index)
            x_again, labels_again = training_batch(again, recipe, chosen_again, epoch, index)
            assert x.numpy().tobytes() == x_again.numpy().tobytes()
            assert torch.equal(labels, labels_again)
    everything = torch.arange(len(data.test))
    assert torch.equal(again.test.examples(everything), data.test.examples(everything))
    assert torch.equal(again.test.labels, data.test.labels)


def test_the_weights_are_the_same_bits(tmp_path):
    made = sealed("digits", tmp_path / "sealed", seed=4, test_share=0.3)

    def trained(data):
        model = build_model("mlp", shape=(1, 8, 8), classes=10, seed=1)
        fit(model, data, Recipe(epochs=2, batch_size=48, learning_rate=0.05, seed=9))
        return b"".join(value.numpy().tobytes() for value in model.state_dict().values())

    weights = trained(read_dataset("digits", seed=4, test_share=0.3))
    assert trained(opened(made)) == weights
    assert trained(read_dataset("digits", seed=5, test_share=0.3)) != weights  # and another split is noticed


def test_a_changed_record_stops_the_batch_that_has_it_and_no_other(tmp_path):
    made = sealed("digits", tmp_path / "sealed")
    data = opened(made)
    place = int(data.train.chosen[7])
    path = made.folder / "records"
    content = bytearray(path.read_bytes())
    content[place * (256 + 16) + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrustError, match=f"record {place}"):
        data.train.examples(torch.tensor([5, 6, 7]))
    data.train.examples(torch.tensor([5, 6, 8]))


def test_a_place_names_the_record_and_nothing_else(tmp_path):
    made = sealed("digits", tmp_path / "sealed")
    data = opened(made)
    assert data.train.place(3) == f"{made.folder}, record {int(data.train.chosen[3])}"


def test_only_the_set_that_is_meant_opens(tmp_path):
    made = sealed("digits", tmp_path / "sealed")
    with pytest.raises(TrustError, match="another sealed set"):
        open_dataset(made.folder, made.key_file.key, manifest=bytes(32))
    assert np.array_equal(opened(made).train.labels, made.data.train.labels)
