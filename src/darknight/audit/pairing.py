"""Which rebuilt image is which true one. An attack that rebuilds a batch does not learn the order."""

from __future__ import annotations

import torch
from torch import Tensor


def paired(rebuilt: Tensor, truth: Tensor) -> Tensor:
    """(row, *feature) and (row, *feature) -> the rebuilt ones in the order of the true ones, the most alike first.

    Kind to the attack, and so is guessing measured in the same way: among many images some always look alike.
    """
    left, right = (_standard(side.flatten(1).to(torch.float64)) for side in (rebuilt, truth))
    likeness = left @ right.T
    order = torch.zeros(len(truth), dtype=torch.int64)
    for _ in range(len(truth)):
        mine, theirs = divmod(int(likeness.argmax()), len(truth))
        order[theirs] = mine
        likeness[mine], likeness[:, theirs] = -2.0, -2.0
    return rebuilt[order]


def _standard(rows: Tensor) -> Tensor:
    rows = rows - rows.mean(dim=1, keepdim=True)
    lengths: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / lengths.clamp_min(1e-12)
