"""A LightningModule and its Trainer as ever, and three lines of DarKnight in the script.

pip install lightning
python examples/lightning_trainer.py            # every convolution and matrix product on workers that learn nothing
python examples/lightning_trainer.py --plain    # the same script without DarKnight
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

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


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 16, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss)
        print(f"step {self.global_step + 1} loss {loss.item():.6f}")
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.log("accuracy", (self(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without DarKnight")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    training, validation = random_split(TensorDataset(images, torch.tensor(digits.target)), [1500, 297])
    model = Digits()
    with tempfile.TemporaryDirectory() as output:
        trainer = lightning.Trainer(
            max_epochs=options.epochs,
            accelerator="cpu",
            gradient_clip_val=1.0,
            default_root_dir=output,
            logger=False,
            enable_progress_bar=False,
        )
        with nullcontext() if options.plain else privately(model):
            trainer.fit(model, DataLoader(training, batch_size=64, shuffle=True), DataLoader(validation, batch_size=99))
    print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
