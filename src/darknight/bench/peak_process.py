"""The process whose peak memory is measured: two training steps, plain or protected. Run by `bench.peak`.

python -m darknight.bench.peak_process protected resnet152 8 224    # kind, model, batch, size
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from darknight.bench.ceiling import SCHEMES
from darknight.bench.links import fleet_over
from darknight.bench.steps import examples, network, step_of
from darknight.nn import protect_
from darknight.runtime import Runtime, keep_memory

_STEPS = 2
_PATIENCE = 3600.0  # seconds for a worker: one that is late would leave its work to the enclave
_STATUS = Path("/proc/self/status")


def main(kind: str, model: str, batch: str, size: str) -> None:
    torch.set_num_threads(1)
    keep_memory()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    images, labels = examples(int(batch), int(size))
    private = network(model, int(size))
    with ExitStack() as stack:
        if kind == "protected":
            fleet = stack.enter_context(fleet_over("shm", SCHEMES["field"], patience=_PATIENCE))
            protect_(private, stack.enter_context(Runtime(SCHEMES["field"], fleet)))
        step = step_of(private, images, labels, training=True)
        for _ in range(_STEPS):
            step()
        print(json.dumps({"before": before, "peak": _status("VmHWM"), "shared": _status("RssShmem")}))


def _status(name: str) -> int:
    """Bytes, from what the kernel says about this process."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(f"no {name} in {_STATUS}")


if __name__ == "__main__":
    main(*sys.argv[1:])
