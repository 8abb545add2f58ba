"""An ordinary PyTorch training script, and three lines of DarKnight in it.

python examples/plain_script.py            # every convolution and matrix product on workers that learn nothing
python examples/plain_script.py --plain    # the same script without DarKnight
"""

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import darknight as dk


@contextmanager
def privately(model: nn.Module) -> Iterator[None]:
    """All that DarKnight adds. In earnest, dk.connect("fleet.toml") takes the place of dk.local_fleet."""
    scheme = dk.Scheme(inputs=4, colluders=1)
    with dk.local_fleet(scheme) as fleet, dk.Runtime(scheme, fleet) as runtime:
        report = dk.protect_(model, runtime)
        yield
        print(report)
    dk.unprotect_(model)


def train(model: nn.Module, loader: DataLoader, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    epochs = itertools.chain.from_iterable(loader for _ in itertools.count())
    for step, (images, labels) in enumerate(itertools.islice(epochs, steps), start=1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without DarKnight")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 10)
    )
    with nullcontext() if options.plain else privately(model):
        train(model, loader, options.steps)
    with torch.no_grad():
        right = (model(images).argmax(1) == torch.tensor(digits.target)).float().mean()
    print(f"accuracy {right:.3f}")


if __name__ == "__main__":
    main()
