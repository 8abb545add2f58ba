"""Memory that is kept: a tensor that comes and goes in every step is not fetched from the kernel each time."""

import os
import resource
import subprocess
import sys

import pytest

from darknight import memory
from darknight.memory import free_bytes, is_short, large_page_settings

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")

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
found = faults()
content = torch.ones(32 << 20)
large = next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages"))
print(found, gc.get_freeze_count(), large)
"""


def run(what, **options):
    """Page faults of 320 MiB, objects that Python leaves alone, and MiB in large pages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, what]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, **options)
    faults, frozen, large = map(int, done.stdout.split())
    return faults, frozen, large // 1024


def test_large_tensors_use_the_same_memory_again():
    faults, frozen, _ = run("kept")
    assert faults < 1000
    assert frozen > 10_000  # and Python does not look for garbage in what stays
    faults, frozen, _ = run("not kept")
    assert frozen == 0
    if large_page_settings()["own"] != "always":
        assert faults > 10_000  # 64 MiB are 16,384 pages, five times


@pytest.mark.skipif(large_page_settings()["own"] != "madvise", reason="large pages are not given to whoever asks")
def test_kept_memory_is_in_large_pages():
    _, _, large = run("kept")
    assert large > 64  # of the tensor's 128 MiB: how many there are is the kernel's choice
    _, _, large = run("not kept")
    assert large == 0


def test_where_addresses_are_limited_none_are_set_aside():
    def limited():
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))

    faults, _, large = run("kept", preexec_fn=limited)
    assert faults < 1000
    assert large == 0


def test_memory_is_short_when_three_quarters_are_taken(monkeypatch):
    said = "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    {} kB\n"
    for free, short in ((249, True), (250, False), (900, False)):
        monkeypatch.setattr(memory, "_text", lambda _, free=free: said.format(free))
        assert free_bytes() == free << 10
        assert is_short() is short
    monkeypatch.setattr(memory, "_text", lambda _: "")  # a system that does not say
    assert not is_short()
    with pytest.raises(LookupError, match="MemAvailable"):
        free_bytes()
