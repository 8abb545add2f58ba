"""Memory that is kept: a tensor that comes and goes in every step is not fetched from the kernel each time."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import gc, resource, sys
import torch
from darknight.runtime import keep_memory

if sys.argv[1] == "kept":
    assert keep_memory()


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults()
print(faults(), gc.get_freeze_count())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_large_tensors_use_the_same_memory_again():
    def run(what: str) -> tuple[int, int]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, what]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        faults, frozen = map(int, done.stdout.split())
        return faults, frozen

    faults, frozen = run("kept")
    assert faults < 1000
    assert frozen > 10_000  # and Python does not look for garbage in what stays
    faults, frozen = run("not kept")
    assert faults > 10_000  # 64 MiB are 16,384 pages, five times
    assert frozen == 0
