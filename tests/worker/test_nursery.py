"""The nursery: workers that serve, are started again on request, and outlive nobody."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from darknight.types import Pass
from darknight.wire.grpc_link import connect
from darknight.wire.recording import Recording, recording_pair
from darknight.wire.shared_memory import Host
from darknight.worker import nursery
from worker.stations import Enclave, new_enclave, residues

TIME = 60
NURSERY = [sys.executable, "-m", "darknight.worker.nursery"]


def wait_until(true):
    deadline = time.monotonic() + TIME
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)


def alive(pid):
    """Does the process run? One that is dead and not yet collected by its parent does not."""
    return state(pid) not in ("Z", "")


def state(pid):
    """The kernel's letter for it: R, S, T (stopped), Z (dead) ...; nothing if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def order(count, certificate, *, parent=None, names=(), record_fd=None, hostile=None):
    workers = [
        {
            "operator": f"simulated-{j}",
            "shared_memory": names[j] if names else None,
            "record_fd": record_fd if j == 0 else None,
            "threads": 1,
            "memory_limit": 256 << 20,
            "hostile": hostile,
        }
        for j in range(count)
    ]
    return {"workers": workers, "allow_enclave": certificate.decode(), "parent": parent or os.getpid()}


class Nursery:
    def __init__(self, first, **more):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(NURSERY, **pipes, **more)
        self.tell(first)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def tell(self, line):
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def hear_all(self, count):
        found = [self.hear() for _ in range(count)]
        return {line["worker"]: line for line in found}


def served(report, enclave, **more):
    """An enclave's link to a worker that was reported, after one task."""
    found = Enclave(
        connect(report["address"], certificate=report["certificate"].encode(), identity=enclave, timeout=TIME, **more)
    )
    found.weights(residues(7, 5))
    found.forward(residues(3, 5), 7).result(TIME)
    return found


def test_workers_serve_are_reported_when_they_die_and_start_again_on_request():
    enclave = new_enclave()
    names = [f"@darknight-test-{os.getpid()}-{j}" for j in range(2)]
    ours, theirs = recording_pair()
    recording, host = Recording(ours), Host()
    with Nursery(
        order(2, enclave.certificate, names=names, record_fd=theirs.fileno()), pass_fds=[theirs.fileno()]
    ) as running:
        theirs.close()
        first = running.hear_all(2)
        with served(first[0], enclave, host=host, shared_memory=names[0]), served(first[1], enclave) as one:
            assert one.link.welcome.operator == "simulated-1"
            recording.wait_for(1, TIME)  # what worker 0 saw, and no other
            kinds = ["weights", "forward.share", "forward.reply"]
            assert [record.kind for record in recording.records] == kinds

            running.process.send_signal(signal.SIGINT)  # as Ctrl-C does to all processes of a terminal
            for worker in (0, 1):
                os.kill(first[worker]["pid"], signal.SIGINT)
            assert one.forward(residues(3, 5), 7).result(TIME).tensors.keys() == {Pass.FORWARD}

            os.kill(first[0]["pid"], signal.SIGKILL)
            assert running.hear() == {"worker": 0, "exited": -signal.SIGKILL}
            running.tell({"restart": 0})
            again = running.hear()
            assert again["worker"] == 0
            assert again["certificate"] != first[0]["certificate"]  # the old key died with the old process
            running.tell({"restart": 1})  # this one still runs: it is ended, and nobody is told that it died
            other = running.hear()
            assert other["worker"] == 1
            wait_until(lambda: not alive(first[1]["pid"]))
        with served(again, enclave, host=host, shared_memory=names[0]), served(other, enclave):
            recording.wait_for(2, TIME)
            running.process.stdin.close()
            assert running.process.wait(TIME) == 0
            assert not alive(again["pid"])
            assert not alive(other["pid"])
            assert running.process.stdout.read() == ""
    recording.close()
    host.close()


def test_a_worker_that_dies_while_it_is_being_replaced_is_replaced():
    """The nursery finds both pieces of news at once; it must not take the new process for the dead one."""
    with Nursery(order(1, new_enclave().certificate)) as running:
        old = running.hear()
        running.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(running.process.pid) == "T")
        running.tell({"restart": 0})
        os.kill(old["pid"], signal.SIGKILL)
        wait_until(lambda: not alive(old["pid"]))
        running.process.send_signal(signal.SIGCONT)
        new = running.hear()
        assert (new["worker"], "exited" in new) == (0, False)
        running.tell({"restart": 0})  # it still listens
        wait_until(lambda: not alive(new["pid"]))
        os.kill(running.hear()["pid"], signal.SIGTERM)
        assert running.hear() == {"worker": 0, "exited": -signal.SIGTERM}


def test_no_worker_outlives_a_nursery_that_is_killed():
    with Nursery(order(2, new_enclave().certificate)) as running:
        pids = [report["pid"] for report in running.hear_all(2).values()]
        assert all(map(alive, pids))
        running.process.kill()
        wait_until(lambda: not any(map(alive, pids)))


# Starts a nursery as dk.local_fleet does, leaves the pipe to a process that goes on, and says who is who.
PARENT = f"""
import json, os, subprocess, sys
nursery = subprocess.Popen({NURSERY!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
order = json.loads(sys.argv[1])
order["parent"] = os.getpid()
nursery.stdin.write(json.dumps(order) + chr(10))
nursery.stdin.flush()
workers = [json.loads(nursery.stdout.readline())["pid"] for _ in order["workers"]]
heir = subprocess.Popen(["sleep", "600"], pass_fds=[nursery.stdin.fileno()], stdout=subprocess.DEVNULL)
print(json.dumps({{"nursery": nursery.pid, "workers": workers, "heir": heir.pid}}), flush=True)
nursery.wait()
"""


def test_no_worker_outlives_a_parent_that_is_killed_though_its_child_holds_the_pipe():
    command = [sys.executable, "-c", PARENT, json.dumps(order(2, new_enclave().certificate))]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    found = json.loads(parent.stdout.readline())
    try:
        assert all(map(alive, found["workers"]))
        parent.kill()
        parent.wait()
        wait_until(lambda: not any(map(alive, [found["nursery"], *found["workers"]])))
        assert alive(found["heir"])  # the pipe was never closed
    finally:
        os.kill(found["heir"], signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense\n", "not JSON"),
        ("[1]\n", "not a JSON object"),
        ('{"workers": []}\n', "other keys than workers, allow_enclave, parent"),
        ('{"workers": [{"operator": "a"}], "allow_enclave": "", "parent": 1}\n', "a worker with other keys"),
        (json.dumps(order(1, b"", hostile="noise")) + "\n", "never where data is real"),
        (json.dumps(order(1, b"", hostile=7)) + "\n", "hostile plan is not a text"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_in_words(text, words):
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    lines = nursery._Lines(reading)
    lines.read()
    os.close(reading)
    with pytest.raises(nursery._OrderError, match=words):
        nursery._order(next(lines))
