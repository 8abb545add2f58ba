"""Memory that is kept: a tensor that comes and goes in every step is not fetched from the kernel each time."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
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
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_large_tensors_use_the_same_memory_again():
    def run(what: str) -> int:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", SCRIPT, what]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    assert run("kept") < 1000
    assert run("not kept") > 10_000  # 64 MiB are 16,384 pages, five times
