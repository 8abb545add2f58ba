"""A recorded training is a real one, and what it says of steps, places and shares is true."""

import pytest
import torch

from darknight.audit import Scene, default_scheme, record_training
from darknight.audit.broken import Fault, broken_sent, broken_shares, quantised
from darknight.coding import Scheme
from darknight.data import Dataset, Tensors, read_dataset
from darknight.errors import DataError
from darknight.models import build_model
from darknight.nn import protect_
from darknight.runtime import Runtime

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = Scheme(inputs=3, colluders=1)
RATE = 0.1


@pytest.fixture(scope="module")
def digits():
    return read_dataset("digits", seed=0)


def network():
    return build_model("mlp", shape=(1, 8, 8), classes=10, seed=0)


@pytest.fixture(scope="module")
def recording(digits):
    """Two epochs of two steps; the second batch of an epoch is smaller and does not fill its last virtual batch."""
    settings = {"batch_size": 12, "epochs": 2, "learning_rate": RATE, "seed": 5}
    images, labels = digits.train_x[:19], digits.train_y[:19]
    return record_training(SCHEME, model=network(), images=images, labels=labels, **settings)


def test_the_steps_are_those_of_the_same_training_without_workers(recording):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    assert [(step.epoch, len(step.examples)) for step in recording.steps] == [(0, 12), (0, 7), (1, 12), (1, 7)]
    with Runtime(SCHEME, None, seed=5) as runtime:
        protect_(model, runtime)
        for step in recording.steps:
            assert all(torch.equal(step.before[name], value) for name, value in model.state_dict().items())
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(step.images), step.labels).backward()
            optimizer.step()
            assert all(torch.equal(step.after[name], value) for name, value in model.state_dict().items())


def test_examples_are_named_rightly(recording, digits):
    for first, second in (recording.steps[:2], recording.steps[2:]):
        assert torch.cat([first.examples, second.examples]).sort().values.tolist() == list(range(19))
    for step in recording.steps:
        assert torch.equal(step.images, digits.train_x[step.examples])
        assert torch.equal(step.labels, digits.train_y[step.examples])
        assert step.place(4) == (1, 1)


def test_only_the_first_and_the_last_layer_are_kept(recording):
    assert recording.layers == ("layers.1", "layers.5")
    for view in recording.views:
        assert {record.layer for record in view} == set(recording.layers)
        assert {record.kind for record in view} == {"weights", "forward.share", "backward.share"}
        assert sum(record.kind == "forward.share" for record in view) == 8


def test_a_data_worker_and_the_carrier_of_r_hold_the_image(recording):
    """So the pairing of shares with images is right: their difference is the image that was sent."""
    prime, carrier = recording.prime, SCHEME.inputs + SCHEME.colluders
    sent = recording.sent()
    assert len(sent.shares) == 2 * 19
    assert sorted(sent.examples.tolist()) == sorted(2 * list(range(19)))
    masks = {
        (number, group): mask
        for number, step in enumerate(recording.steps)
        for group, mask in enumerate(step.seen(carrier, recording.layers[0], "forward.share"))
    }
    rebuilt = []
    for number, step in enumerate(recording.steps):
        for worker in range(SCHEME.inputs):
            for position in range(worker, len(step.examples), SCHEME.inputs):
                group, place = step.place(position)
                assert place == worker
                share = step.seen(worker, recording.layers[0], "forward.share")[group]
                difference = (share.to(torch.int64) - masks[number, group]) % prime
                rebuilt.append(torch.where(difference > prime // 2, difference - prime, difference))
    got, wanted = torch.stack(rebuilt).double(), sent.images.flatten(1).double()
    assert float(torch.corrcoef(torch.stack([got.flatten(), wanted.flatten()]))[0, 1]) > 0.9999


def test_a_worker_has_a_part_of_what_was_sent(recording):
    sent = recording.sent()
    mine = sent.of(1)
    assert len(mine.shares) == int((sent.workers == 1).sum()) == 2 * (4 + 2)
    assert torch.equal(mine.images, sent.images[sent.workers == 1])


def test_broken_shares_stand_in_the_same_places(recording):
    bare = broken_sent(recording, Fault.NO_NOISE, seed=0)
    sent = recording.sent()
    assert torch.equal(bare.examples, sent.examples)
    assert bare.shares.shape == (len(sent.shares), *sent.images.shape[1:])
    field = SCHEME.arithmetic
    for step, shares in (
        (step, broken_shares(step.images, SCHEME, Fault.NO_NOISE, seed=0)) for step in recording.steps
    ):
        whole = len(step.images) // 3
        expected = quantised(step.images, field)[: 3 * whole].view(whole, 3, 1, 8, 8) % field.prime
        assert torch.equal(shares[:3, :whole].transpose(0, 1), expected.to(torch.int32))


def test_each_fault_does_what_it_says(digits):
    images = digits.train_x[:12]

    def shares(fault, scheme=SCHEME, seed=0, images=images):
        return broken_shares(images, scheme, fault, seed=seed).to(torch.float64)

    reused = shares(Fault.REUSED_NOISE)[SCHEME.inputs + 1]  # the carrier of r has nothing but noise
    assert all(torch.equal(reused[0], other) for other in reused)
    assert torch.equal(reused, shares(Fault.REUSED_NOISE, images=images.flip(0))[SCHEME.inputs + 1])
    assert abs(float(reused.mean()) / SCHEME.arithmetic.prime - 0.5) < 0.2
    assert not shares(Fault.NO_NOISE, Scheme(inputs=2, colluders=2))[-2:].any()
    weak = shares(Fault.WEAK_NOISE)
    assert 1.5 < float(weak[-1].std() / images.abs().max()) < 2.5


def test_a_scene_needs_examples_and_scales_large_ones_down(digits):
    few = Tensors(digits.train_x[:100], digits.train_y[:100])
    with pytest.raises(DataError, match="100 training examples; an audit needs 128"):
        Scene(Dataset(name="few", train=few, test=few, classes=10), quick=True)
    large = Tensors(torch.rand(128, 3, 40, 20), torch.zeros(128, dtype=torch.int64))
    scene = Scene(Dataset(name="large", train=large, test=large, classes=1), quick=True)
    assert scene.shape == (3, 32, 20)
    table = Tensors(torch.rand(128, 6), torch.zeros(128, dtype=torch.int64))
    scene = Scene(Dataset(name="table", train=table, test=table, classes=2), quick=True)
    assert (scene.shape, scene.model_name) == ((1, 1, 6), "mlp")


def test_a_recording_is_made_once(digits, monkeypatch):
    made = []
    monkeypatch.setattr(
        "darknight.audit.scene.record_training", lambda scheme, **kwargs: made.append(kwargs) or object()
    )
    scene = Scene(digits, quick=True)
    first = scene.recording(default_scheme())
    assert scene.recording(default_scheme()) is first
    assert scene.recording(default_scheme(), examples=96) is not first
    assert [len(each["images"]) for each in made] == [480, 96]
