"""Attacks on what workers see. Each must fail on a sound scheme and succeed on a broken one."""

from darknight.audit.attack import Attack
from darknight.audit.finding import Finding, Must, Outcome, Picture
from darknight.audit.linear_decoder import Reconstruction, best_linear_decoder
from darknight.audit.recording import Recording, Step, record_training
from darknight.audit.scene import Scene, default_scheme
from darknight.audit.suite import Attacked, Audit, run_audit, verdict
from darknight.audit.worker_view import WorkerView, record_worker_view

__all__ = [
    "Attack",
    "Attacked",
    "Audit",
    "Finding",
    "Must",
    "Outcome",
    "Picture",
    "Reconstruction",
    "Recording",
    "Scene",
    "Step",
    "WorkerView",
    "best_linear_decoder",
    "default_scheme",
    "record_training",
    "record_worker_view",
    "run_audit",
    "verdict",
]
