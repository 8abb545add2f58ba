"""How much memory there is, and the kernel's wall."""

import mmap
import resource
import subprocess
import sys

import pytest

from darknight.worker import machine

GIB = 1 << 30


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A machine of 8 GiB, with control groups to be written."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:        8388608 kB\nMemFree: 1 kB\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    return tmp_path


def group(fake, line, files):
    (fake / "proc" / "self" / "cgroup").write_text(line + "\n")
    for name, text in files.items():
        (fake / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (fake / "cgroup" / name).write_text(text + "\n")


@pytest.mark.parametrize(
    ("line", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "max"}, 8),
        ("0::/a/b", {"a/b/memory.max": str(3 * GIB)}, 3),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": str(2 * GIB)}, 2),  # a group above limits too
        ("0::/of/the/host", {"memory.max": str(GIB)}, 1),  # in a container
        ("5:cpu,memory:/x", {"memory/x/memory.limit_in_bytes": str(4 * GIB)}, 4),  # version 1
        ("5:memory:/x", {"memory/memory.limit_in_bytes": "9223372036854771712"}, 8),  # version 1: no limit
        ("5:cpu:/x", {"memory/x/memory.limit_in_bytes": str(GIB)}, 8),
    ],
)
def test_the_least_of_machine_and_control_groups_counts(fake, line, files, expected):
    group(fake, line, files)
    assert machine.available_memory() == expected * GIB


def test_without_control_groups_the_machine_counts(fake):
    assert machine.available_memory() == 8 * GIB


def test_what_malloc_holds_back_is_given_back_when_it_is_in_the_way(monkeypatch):
    """That it helps is shown with a real worker: tests/worker/test_program.py."""
    now, given_back = [100], []
    monkeypatch.setattr(machine, "resident", lambda statm: now[0])
    ceiling = machine.Ceiling(limit=50)
    monkeypatch.setattr(ceiling, "_trim", given_back.append)
    ceiling.make_room(50)
    assert given_back == []  # within the limit, what was freed is better kept: it will be used again
    now[0] = 140
    ceiling.make_room(11)
    assert given_back == [0]


def test_memory_of_this_process_is_counted():
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        before = machine.resident(statm.fileno())
        with mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE) as content:  # malloc might take what it held back
            content[:: mmap.PAGESIZE] = bytes(len(content) // mmap.PAGESIZE)
            assert machine.resident(statm.fileno()) - before > 60 << 20


def test_room_is_made_without_a_descriptor_and_nothing_fails_when_the_file_cannot_be_read(monkeypatch):
    ceiling = machine.Ceiling(limit=0)
    given_back = []
    monkeypatch.setattr(ceiling, "_trim", given_back.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # no further one
    try:
        ceiling.make_room(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert given_back == [0]

    def broken(statm):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(machine, "resident", broken)
    ceiling.make_room(1 << 40)
    assert given_back == [0]


def test_a_worker_takes_as_many_descriptors_as_it_may_have():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] // 2, limits[1]))
    try:
        machine.open_more_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


WALL = """
from darknight.worker.machine import wall_off
wall_off(256 << 20)
content = bytearray(256 << 20)
print("within")
try:
    more = bytearray(1 << 30)
    print("beyond")
except MemoryError:
    print("stopped")
"""


def test_the_kernel_stops_what_no_budget_stopped():
    done = subprocess.run([sys.executable, "-c", WALL], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["within", "stopped"]
