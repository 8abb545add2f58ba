"""What a Ray of our own started is found by its folder, however it hides, and ended; nothing else is."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from darknight.worker.ray_processes import end_processes_of, no_longer_than, processes_of

# An agent of Ray: no sign of the folder in its command line, a log in it, a child without either; then an orphan.
AGENT = """
import os, subprocess, sys, time
folder = sys.stdin.readline().strip()
if os.fork():
    os._exit(0)
log = open(f"{folder}/agent.log", "w")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], stdout=subprocess.DEVNULL)
print(os.getpid(), child.pid, flush=True)
time.sleep(120)
"""


@pytest.fixture
def folder(tmp_path):
    """Reached by another name than its own, as temporary folders are on some machines."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    return str(tmp_path / "link")


@pytest.fixture
def agent(folder):
    """The numbers of an agent that is an orphan, and of its child."""
    process = subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(f"{folder}\n")
    process.stdin.close()
    pids = [int(number) for number in process.stdout.readline().split()]
    process.stdout.close()
    assert process.wait() == 0
    yield pids
    end_processes_of(folder)


@pytest.fixture
def bystander():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    yield process
    process.kill()
    process.wait()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_orphan_that_hides_is_found_with_its_child(folder, agent, bystander):
    assert all(folder.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in agent)
    assert processes_of(folder) == set(agent)


def test_they_are_ended_and_a_bystander_is_not(folder, agent, bystander):
    with Path(folder, "driver.log").open("w"):  # as we have ourselves
        end_processes_of(folder)
    assert not any(map(runs, agent))
    assert bystander.poll() is None


def test_a_folder_that_was_deleted_still_tells_them(folder, agent):
    Path(folder, "agent.log").unlink()
    assert processes_of(folder) == set(agent)


def test_a_folder_whose_name_begins_alike_is_another(folder, agent, tmp_path):
    assert processes_of(str(tmp_path / "rea")) == set()


def test_what_ends_in_time_is_left_to_end(folder, agent):
    with no_longer_than(60.0, folder):
        pass
    assert all(map(runs, agent))


def test_what_does_not_end_in_time_is_killed(folder, agent):
    with no_longer_than(0.05, folder):
        end = time.monotonic() + 30
        while any(map(runs, agent)):
            assert time.monotonic() < end
            time.sleep(0.02)
