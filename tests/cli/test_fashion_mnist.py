"""Fashion-MNIST as Debian packages it (dataset-fashion-mnist), from its files to a model in one command."""

import json
from pathlib import Path

import pytest

from cli.command import darknight

PACKAGE = Path("/usr/share/datasets/fashion-mnist")

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not PACKAGE.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"),
]


def test_one_epoch_of_private_training(tmp_path):
    flags = [
        "--model",
        "mlp",
        "--epochs",
        "1",
        "--learning-rate",
        "0.05",
        "--batch-size",
        "256",
        "--no-clear",
        "--no-picture",
        "--json",
    ]
    done = darknight("train", "--data", str(PACKAGE), *flags, "--output", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["examples"] == {"train": 60_000, "test": 10_000}
    assert summary["private"]["accuracy"] > 0.8
    assert summary["private"]["integrity"]["failed"] == 0
    assert summary["private"]["leakage"]["nats_per_example"] == 0
