"""Attacks on what workers see. Each must fail on a sound scheme and succeed on a broken one."""

from darknight.audit.linear_decoder import Reconstruction, best_linear_decoder
from darknight.audit.worker_view import WorkerView, record_worker_view

__all__ = ["Reconstruction", "WorkerView", "best_linear_decoder", "record_worker_view"]
