"""Private training on CIFAR-10 is as accurate as training in the clear: ten epochs of three kinds of network."""

import math

import pytest
import torch
from torch import nn

import darknight as dk
from darknight.data import read_dataset
from darknight.models.mobilenet import MobileNetV2
from darknight.models.resnet import ResNet
from darknight.models.vgg import VGG
from darknight.train import Recipe, fit

pytestmark = pytest.mark.full

IMAGE = (3, 32, 32)
NETWORKS = {  # far below 40 million multiplications: five private trainings have to fit into make test-all
    "vgg": lambda: VGG(IMAGE, 10, stages=((8,), (16, 16), (32, 32)), batch_norm=True, wide_head=False),
    "resnet": lambda: ResNet(IMAGE, 10, blocks=(1, 1, 1), width=8, small_images=True),
    "mobilenet": lambda: MobileNetV2(
        IMAGE, 10, stages=((1, 8, 1, 1), (4, 16, 1, 2), (4, 32, 1, 2)), stem=8, last=96, dropout=0.0
    ),
}
SEEDS = {"vgg": 3, "resnet": 1, "mobilenet": 1}
SCHEME = dk.Scheme(inputs=4, colluders=1)
STUDENT_2 = 4.303  # two-sided 95 %, two degrees of freedom


def trained(name: str, data, seed: int, runtime: dk.Runtime | None) -> float:
    recipe = Recipe(
        epochs=10, batch_size=128, learning_rate=0.1, weight_decay=5e-4, nesterov=True, schedule="one-cycle", seed=seed
    )
    model = network(name, seed)
    if runtime is not None:
        dk.protect_(model, runtime)
    return fit(model, data, recipe, runtime=runtime).accuracy


def network(name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[name]()


@pytest.mark.parametrize("name", NETWORKS)
def test_private_accuracy_is_not_worse_by_more_than_a_point_and_a_half(name, shared, capsys):
    file = shared / "data" / "cifar10_small.npz"
    if not file.is_file():
        pytest.skip("there is no data/cifar10_small.npz in DARKNIGHT_SHARED")
    data = read_dataset(str(file), seed=0)
    pairs = []
    for seed in range(SEEDS[name]):
        clear = trained(name, data, seed, None)
        with dk.local_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet, seed=seed) as runtime:
            pairs.append((clear, trained(name, data, seed, runtime)))
    losses = [100 * (clear - private) for clear, private in pairs]
    mean = sum(losses) / len(losses)
    with capsys.disabled():
        text = ", ".join(f"{100 * clear:.2f}/{100 * private:.2f}" for clear, private in pairs)
        print(f"\n{name}: clear/private {text}; mean loss {mean:+.2f} points", end="")
        if len(losses) == 3:
            error = math.sqrt(sum((loss - mean) ** 2 for loss in losses) / 2 / 3)
            print(f", paired 95 % interval {mean - STUDENT_2 * error:+.2f} to {mean + STUDENT_2 * error:+.2f}", end="")
        print()
    assert mean <= 1.5
    assert min(private for _, private in pairs) > 0.4  # it learns: guessing gives 0.1
