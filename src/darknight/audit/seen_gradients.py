"""What workers saw of the gradient behind a layer, example by example."""

from __future__ import annotations

import torch
from torch import Tensor

from darknight.audit.recording import Recording, Step


def seen_gradients(recording: Recording, step: Step, layer: str) -> Tensor:
    """(example, *feature) in the order of the batch, residues around zero.

    Gradients in the clear went to every worker, all of them. A masked one is what the worker saw that carried the
    example: its own share, and no other.
    """
    if not recording.scheme.sends_masked_gradients:
        shares = step.seen(0, layer, "backward.share").flatten(0, 1)
    else:
        workers = range(recording.scheme.inputs)
        shares = torch.stack([step.seen(worker, layer, "backward.share") for worker in workers], dim=1).flatten(0, 1)
    shares = shares[: len(step.images)]  # without padding rows
    if recording.prime is None:
        return shares
    residues = shares.to(torch.int64)
    return residues - recording.prime * (residues > recording.prime // 2)
