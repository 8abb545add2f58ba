"""Whether a backward pass is under way."""

from __future__ import annotations

import torch


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward pass there recomputes activations."""
    return torch._C._current_graph_task_id() != -1
