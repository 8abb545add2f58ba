"""`python -m darknight.worker` as an operator runs it: a process of its own, TLS, signals, limits, logs."""

import ctypes
import json
import platform
import signal
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from darknight.ops import field
from darknight.types import Forget, Pass
from darknight.wire import LinkClosed, Refused
from darknight.wire.identity import ENCLAVE, Identity, fingerprint
from worker.stations import MIB, OP, PRIME, Program, new_enclave, residues

TIME = 60
TGKILL = {"x86_64": 234, "aarch64": 131}.get(platform.machine(), 0)  # the system call, which libc may not have


class Worker:
    """A program with its files: state, what it logs, the enclave that it allows."""

    def __init__(self, folder, *arguments, command=("-m", "darknight.worker")):
        self.enclave = Identity.load_or_create(folder / "enclave", ENCLAVE)
        self.state = folder / "state"
        self.log = folder / "log"
        with self.log.open("a") as log:
            common = ("--allow-enclave", folder / "enclave" / "certificate.pem", "--state", self.state)
            self.program = Program(*common, *arguments, command=command, stderr=log)

    def memory(self, what):
        """Bytes; what: VmRSS (now) or VmHWM (the most so far)."""
        with open(f"/proc/{self.program.process.pid}/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(what)) * 1024


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worker")
    arguments = ("--operator", "acme", "--memory-limit", "300MiB", "--enclaves", "1", "--metrics", "127.0.0.1:0")
    found = Worker(folder, *arguments, "--log-format", "json", "--log-level", "debug", "--threads", "1")
    yield found
    found.program.end()


def test_it_says_what_an_operator_and_an_enclave_need(worker):
    printed, entry = worker.program.printed, worker.program.entry
    pem = (worker.state / "certificate.pem").read_bytes()
    assert entry.keys() == {"address", "operator", "certificate"}
    assert entry["operator"] == "acme"
    assert worker.program.certificate == pem
    assert "computing     cpu, 1 thread\n" in printed
    assert f"listening     {entry['address']}\n" in printed
    assert f"fingerprint   {fingerprint(pem)}\n" in printed
    assert f"certificate   {worker.state / 'certificate.pem'}\n" in printed
    assert stat.S_IMODE((worker.state / "key.pem").stat().st_mode) == 0o600


def test_its_state_is_its_own_while_it_runs(worker):
    arguments = ["--state", worker.state, "--allow-enclave", worker.state.parent / "enclave" / "certificate.pem"]
    second = [sys.executable, "-m", "darknight.worker", "--listen", "127.0.0.1:0", *arguments]
    done = subprocess.run(second, capture_output=True, text=True, timeout=TIME)
    assert (done.returncode, done.stdout) == (1, "")
    assert "another worker runs with --state" in done.stderr
    limits = Path(f"/proc/{worker.program.process.pid}/limits").read_text()
    (soft, hard) = next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5]
    assert soft == hard


def test_it_serves_the_enclave_that_it_allows_and_no_other(worker):
    with worker.program.connect(worker.enclave) as one:
        assert (one.link.welcome.operator, one.link.welcome.device) == ("acme", "cpu")
        assert one.link.welcome.memory == 300 * MIB
        one.weights(residues(7, 5, seed=1))
        answer = one.forward(residues(3, 5, seed=2), 7).result(TIME)
        expected = field.forward(OP, residues(3, 5, seed=2), residues(7, 5, seed=1), PRIME)
        assert torch.equal(answer.tensors[Pass.FORWARD], expected)
    with pytest.raises(LinkClosed):
        worker.program.connect(new_enclave())


def test_its_memory_stays_within_the_limit_whatever_it_is_asked(worker):
    """Computes what fits, refuses what does not, and the kernel's own count agrees."""
    before = worker.memory("VmRSS")
    done = refused = 0
    with worker.program.connect(worker.enclave) as one:
        one.weights(residues(512, 512))
        for rows in (1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 15, 1 << 18):  # up to 512 MiB
            share = torch.ones(512, dtype=torch.int32).expand(rows, 512)
            try:
                one.forward(share, 512, call=rows).result(TIME)
                done += 1
            except Refused as refusal:
                assert "no room" in str(refusal)  # noqa: PT017
                refused += 1
        for call in range(1, 1000):
            try:
                one.forward(residues(1 << 13, 512), 512, call=call, compute=False).result(TIME)  # 16 MiB each
            except Refused:
                break
        assert 10 <= call <= 19
        one.link.post(Forget(everything=True))
    assert done >= 2
    assert refused >= 2
    # The rest is gRPC's and malloc's, and more where the machine is busy: 40 to 90 MiB.
    assert worker.memory("VmHWM") - before < 300 * MIB + 128 * MIB


def test_memory_is_kept_for_an_enclave_and_given_back_when_the_last_one_has_left(worker):
    with worker.program.connect(worker.enclave) as one:
        one.weights(residues(512, 512))
        one.forward(residues(1 << 11, 512), 512, call=1).result(TIME)  # 4 MiB, and some fifty times that meanwhile
        one.forward(residues(1, 512), 512, call=2).result(TIME)
        kept = worker.memory("VmRSS")
    deadline = time.monotonic() + TIME
    while kept - worker.memory("VmRSS") < 16 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_tensor_value_is_in_its_logs(worker):
    tensors = [residues(7, 5, seed=11), residues(3, 5, seed=12), residues(3, 7, seed=13)]
    with worker.program.connect(worker.enclave) as one:
        one.weights(tensors[0], layer="looked-for")
        tensors.append(one.forward(tensors[1], 7, layer="looked-for").result(TIME).tensors[Pass.FORWARD])
        with pytest.raises(Refused):
            one.forward(tensors[2], 7, layer="looked-for").result(TIME)  # 7 inputs where 5 are due
        with pytest.raises(Refused, match="layer looked-for"):
            one.grad_weight(tensors[2], (3, 5), layer="looked-for", call=77).result(TIME)
        one.link.post(Forget(everything=True))
        with pytest.raises(Refused):
            one.forward(tensors[1], 7).result(TIME)
    logged = worker.log.read_text() + worker.program.printed
    events = [json.loads(line) for line in worker.log.read_text().splitlines()]
    assert {"started", "session opened", "session closed", "refused", "evicted"} <= {event["event"] for event in events}
    assert "looked-for" in logged  # the refusals of these very tasks are there
    values = {str(value) for tensor in tensors for value in tensor.flatten().tolist() if value > 100_000}
    assert len(values) > 50
    assert not [value for value in values if value in logged]


def test_metrics_and_health_then_sigterm_ends_it_well(worker):
    address = next(line.split()[1] for line in worker.program.printed.splitlines() if line.startswith("  metrics"))
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert b'darknight_worker_tasks_total{outcome="done",pass="forward"}' in answer.read()
    with urllib.request.urlopen(address.replace("/metrics", "/healthz"), timeout=10) as answer:
        assert answer.status == 200
    assert worker.program.stop(signal.SIGTERM) == 0
    events = [json.loads(line)["event"] for line in worker.log.read_text().splitlines()]
    assert events[-2:] == ["stopping", "stopped"]


def test_started_again_it_has_the_same_identity_and_ctrl_c_ends_it(worker):
    again = Worker(worker.state.parent)
    try:
        assert again.program.certificate == worker.program.certificate
        assert again.program.stop(signal.SIGINT) == 130
    finally:
        again.program.end()


def test_a_signal_that_reaches_another_thread_ends_it_too(tmp_path):
    """The kernel may hand a signal to any thread; Python's handlers run in the main one, if that ever wakes."""
    found = Worker(tmp_path, "--threads", "1")
    try:
        pid = found.program.process.pid
        others = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) != pid]
        assert others
        assert ctypes.CDLL(None).syscall(TGKILL, pid, min(others), int(signal.SIGTERM)) == 0
        assert found.program.process.wait(TIME) == 0
    finally:
        found.program.end()


# A worker whose tasks never end.
SLOW = """
import sys, torch
from darknight.worker.engine import LocalEngine
from darknight.worker.program import main

def forward(*task):
    print("computing", file=sys.stderr, flush=True)
    while True:
        torch.mm(torch.ones(500, 500), torch.ones(500, 500))

LocalEngine.forward = forward
raise SystemExit(main())
"""


@pytest.fixture
def slow(tmp_path, request):
    """It computes, with a grace of `request.param` seconds; its enclave is connected and waits for an answer."""
    found = Worker(tmp_path, "--grace", request.param, "--threads", "1", command=("-c", SLOW))
    try:
        with found.program.connect(found.enclave) as one:
            one.weights(residues(7, 5))
            found.answer = one.forward(residues(3, 5), 7)
            wait_until(lambda: "computing" in found.log.read_text())
            yield found
    finally:
        found.program.end()


@pytest.mark.parametrize("slow", [600], indirect=True)
def test_it_waits_for_a_task_and_a_second_signal_ends_it_at_once(slow):
    slow.program.process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping" in slow.log.read_text())
    with pytest.raises(TimeoutError):
        slow.answer.result(0.3)
    assert slow.program.process.poll() is None
    assert slow.program.stop(signal.SIGINT, timeout=10) == 130


@pytest.mark.parametrize("slow", [0.3], indirect=True)
def test_a_task_that_outlasts_the_grace_is_cut_off_and_the_end_is_a_good_one(slow):
    assert slow.program.stop(signal.SIGTERM, timeout=20) == 0
    with pytest.raises(LinkClosed):
        slow.answer.result(TIME)
    assert slow.log.read_text().endswith("info stopped tasks_cut_off=1\n")


def wait_until(true):
    deadline = time.monotonic() + TIME
    while not true():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.01)
