"""Predictions of a trained model."""

import pytest
import torch

from darknight.data import Tensors
from darknight.errors import UsageError
from darknight.train import predict
from train.test_loop import model_for, toy

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("batch_size", [None, 1, 4, 100])
def test_the_most_probable_classes_come_first_for_every_example(batch_size):
    data = toy()
    model = model_for(data).train()
    batches = list(predict(model, data.train, top=2, batch_size=batch_size))
    assert model.training
    assert [batch.first for batch in batches] == list(range(0, 30, batch_size or 256))
    classes = torch.cat([batch.classes for batch in batches])
    probabilities = torch.cat([batch.probabilities for batch in batches])
    with torch.no_grad():
        expected = model.eval()(data.train_x).double().softmax(dim=1).sort(dim=1, descending=True)
    assert torch.equal(classes, expected.indices[:, :2])
    torch.testing.assert_close(probabilities, expected.values[:, :2], rtol=1e-5, atol=1e-7)
    assert torch.equal(torch.cat([batch.labels for batch in batches]), data.train_y)
    assert all(batch.seconds > 0 for batch in batches)


def test_there_are_no_more_ranks_than_classes_and_labels_may_be_missing():
    data = toy()
    unknown = Tensors(data.test_x, torch.full((9,), -1))
    (batch,) = predict(model_for(data), unknown, top=10)
    assert batch.classes.shape == (9, 3)
    assert set(batch.labels.tolist()) == {-1}


def test_a_model_that_fails_keeps_its_mode():
    model = model_for(toy()).train()
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(predict(model, toy().test, top=1))
    assert model.training


@pytest.mark.parametrize("change", [{"top": 0}, {"batch_size": 0}])
def test_sizes_that_make_no_sense_are_refused(change):
    with pytest.raises(UsageError, match=r"needs a whole number of at least 1"):
        list(predict(model_for(toy()), toy().test, **{"top": 1, **change}))
