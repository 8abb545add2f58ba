"""Run with Lightning: mixed precision, accumulation and its checkpoint, on a protected model."""

import sys
import tempfile

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import darknight as dk

sys.path.insert(0, sys.argv[1])
from lightning_trainer import Digits

torch.manual_seed(0)
model, data = Digits(), TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,)))
with tempfile.TemporaryDirectory() as folder, dk.Runtime(dk.Scheme(inputs=3, colluders=1), None) as runtime:
    report = dk.protect_(model, runtime)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=16))
    trainer.save_checkpoint(f"{folder}/kept.ckpt")
    assert all(row.calls for row in report.masked)
    plain = Digits.load_from_checkpoint(f"{folder}/kept.ckpt", weights_only=True)
dk.unprotect_(model)
assert all(torch.equal(plain.state_dict()[name], value) for name, value in model.state_dict().items())
print("all of it works")
