"""`darknight enclave` as an operator and its clients meet it: queue, signals, full disks, missing workers, mistakes."""

import json
import resource
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from darknight.client.jobs import _brought, cancel, fetch, status_of, submit
from darknight.coding import Scheme
from darknight.data import read_dataset
from darknight.errors import ServiceError
from darknight.runtime import Runtime
from darknight.service.queue import CANCELLED, FAILED, FINISHED, JOB, READY, RESULT, RUNNING, STATE, WAITING
from darknight.service.runner import MODEL, PREDICTIONS
from darknight.service.sealed_store import newest
from darknight.train import Card, Recipe, fit, plain, predict, prediction_rows, protected, tensors_from_bytes
from darknight.trust.sealing import HEAD, RECORDS
from darknight.wire.identity import CERTIFICATE_FILE, WORKER, Identity
from fleet.test_on_the_wire import Tap
from fleet.workers import ending, eventually, free_port, real_workers
from service.enclaves import (
    OPERATORS,
    Quiet,
    launch_enclave,
    opened,
    place,
    running_enclave,
    seal,
    write_data,
    write_job,
    write_policy,
)
from service.offices import furnish, open_office
from service.test_protocol_attacks import brought, talk

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = Scheme(inputs=1, colluders=1)
LONG = 1000  # epochs of a job that nobody waits for


# --- a town -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def town(tmp_path_factory):
    """An enclave, a client with its data, and a fleet file of workers that are not there yet."""
    folder = tmp_path_factory.mktemp("town")
    addresses = {operator: f"127.0.0.1:{free_port()}" for operator in OPERATORS}
    entries = []
    for operator, address in addresses.items():
        Identity.load_or_create(folder / operator, WORKER)
        entries.append(f'[[worker]]\naddress = "{address}"\noperator = "{operator}"\n')
        entries.append(f'certificate = "{operator}/{CERTIFICATE_FILE}"\n\n')
    (folder / "fleet.toml").write_text("".join(entries))
    seal(folder, write_data(folder))
    write_policy(folder)
    with running_enclave(folder) as enclave:
        yield SimpleNamespace(folder=folder, enclave=enclave, addresses=addresses)


@pytest.fixture(scope="module")
def lonely(town):
    """What a client is told whose job finds no workers, the status of the job, and the job."""
    folder = opened(write_job(town.folder, output="lonely"))
    with pytest.raises(ServiceError) as caught:
        submit(folder, town_hall(town), Quiet())
    return caught.value, status_of(folder, town_hall(town), Quiet()), folder


@pytest.fixture(scope="module")
def staffed(town, lonely):
    """The town, now that its workers are there."""
    with real_workers(town.folder, {name: {"listen": address} for name, address in town.addresses.items()}):
        yield town


@pytest.fixture(scope="module")
def trained(staffed, lonely):
    """The files of the job that found no workers, submitted again."""
    return submit(lonely[2], town_hall(staffed), Quiet())


def town_hall(town, **options):
    return place(town.folder, town.enclave.address, **options)


def trained_alone(town, *, epochs):
    """The weights of the same training without enclave and workers: in the field, bit for bit the same."""
    data = read_dataset(str(town.folder / "data.npz"), seed=0)
    model = Card.of("small-cnn", data).network(seed=5)
    recipe = Recipe(epochs=epochs, batch_size=9, learning_rate=0.05, seed=5)
    with Runtime(SCHEME, None, seed=5) as runtime, protected(model, runtime):
        fit(model, data, recipe, runtime=runtime)
    return model.state_dict()


def assert_same(files, expected):
    tensors, _, _ = tensors_from_bytes(files[MODEL], MODEL)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


class Submission:
    """A job that is submitted by a client of its own."""

    def __init__(self, job, where):
        self.folder, self.watcher, self._where = opened(job), Quiet(), where
        self._files = self._error = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._files = submit(self.folder, self._where, self.watcher)
        except ServiceError as error:
            self._error = error

    def result(self, seconds=120.0):
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the job is not over"
        if self._error is not None:
            raise self._error
        return self._files

    def state(self):
        return status_of(self.folder, self._where, Quiet())["state"]

    def told(self, kind):
        return [words for words in list(self.watcher.events) if words["kind"] == kind]

    def is_queued(self):
        return eventually(lambda: READY in [words["state"] for words in self.told("state")]) and self.state() == READY


class Counting(Quiet):
    """How many bytes of each file went out."""

    def __init__(self):
        super().__init__()
        self.sent = {}

    def sending(self, name, size):
        self.sent[name] = []
        return self.sent[name].append


# --- workers that are not there ---------------------------------------------------------------------------------------
def test_a_job_without_workers_fails_and_says_why(lonely, town):
    error, status, _ = lonely
    assert status["state"] == FAILED
    assert "no worker can be used" in status["note"]
    assert "no worker can be used" in str(error)
    for address in town.addresses.values():
        assert address in status["note"]
    assert town.enclave.process.poll() is None


def test_a_job_that_failed_can_be_submitted_again(trained, staffed, lonely):
    assert_same(trained, trained_alone(staffed, epochs=2))
    assert status_of(lonely[2], town_hall(staffed), Quiet())["state"] == FINISHED
    assert "Traceback" not in (staffed.folder / "enclave.log").read_text()


def test_a_job_that_is_over_asks_for_nothing_again(trained, staffed, lonely):
    """The data are gone from the enclave's disk, and are not sent there again to fetch the result once more."""
    watcher = Counting()
    assert submit(lonely[2], town_hall(staffed), watcher).keys() == trained.keys()
    assert watcher.sent == {}
    (path,) = (staffed.folder / "state" / "jobs").glob(f"*-{lonely[2].text.name}")
    assert sorted(each.name for each in path.iterdir()) == [JOB, RESULT, STATE]


# --- the queue --------------------------------------------------------------------------------------------------------
def test_jobs_run_one_after_another_and_can_be_cancelled(staffed, request):
    where = town_hall(staffed)
    first = Submission(write_job(staffed.folder, output="first", epochs=LONG, every=3600.0), where)
    assert eventually(lambda: first.told("step"), 60)
    request.addfinalizer(lambda: cancel(first.folder, where, Quiet()))  # whatever fails here, others need the enclave
    second = Submission(write_job(staffed.folder, output="second", epochs=LONG), where)
    assert second.is_queued()
    third = Submission(write_job(staffed.folder, output="third"), where)
    assert third.is_queued()
    with pytest.raises(ServiceError, match="the job is running"):
        fetch(first.folder, where, Quiet())
    with pytest.raises(ServiceError, match="the job is queued"):
        fetch(third.folder, where, Quiet())

    assert cancel(second.folder, where, Quiet())["state"] == CANCELLED
    with pytest.raises(ServiceError, match="the job is cancelled"):
        second.result()
    assert first.state() == RUNNING
    cancel(first.folder, where, Quiet())
    with pytest.raises(ServiceError, match="the job is cancelled"):
        first.result()
    assert third.result()[MODEL]
    assert not second.told("started")
    assert [words["state"] for words in third.told("state")][-3:] == [READY, RUNNING, FINISHED]
    assert fetch(third.folder, where, Quiet()).keys() == third.result().keys()
    for gone in (first, second):
        (path,) = (staffed.folder / "state" / "jobs").glob(f"*-{gone.folder.text.name}")
        assert sorted(each.name for each in path.iterdir()) == [JOB, STATE], "something of a cancelled job is kept"
        assert cancel(gone.folder, where, Quiet())["state"] == CANCELLED


def test_a_job_that_was_never_submitted_has_no_status(staffed):
    folder = opened(write_job(staffed.folder, output="never"))
    for ask in (status_of, cancel, fetch):
        with pytest.raises(ServiceError, match="no such job"):
            ask(folder, town_hall(staffed), Quiet())


def test_a_cancelled_job_leaves_no_keys_in_memory(tmp_path):
    furnish(tmp_path)
    with open_office(tmp_path) as office:
        folder, conversation = brought(tmp_path, office)
        with conversation:
            conversation.release(folder.text, folder.keys, None)
            entry = office.queue.of(folder.text.name, folder.client.public)
            assert entry.keys is not None
            assert conversation.ask("Cancel", job=folder.text.name)["state"] == CANCELLED
            assert entry.keys is None


def test_a_submission_that_finds_no_room_can_be_made_again(tmp_path):
    furnish(tmp_path)
    folder = opened(write_job(tmp_path))
    with open_office(tmp_path) as office, talk(tmp_path, office.address, folder.client) as conversation:
        trap = office.queue.folder / "jobs" / f"00000001-{folder.text.name}" / f".unfinished-{JOB}"
        trap.mkdir(parents=True)  # in the way of the file
        with pytest.raises(ServiceError, match="cannot write"):
            conversation.ask("Submit", job=folder.text.encode().decode())
        trap.rmdir()
        assert conversation.ask("Submit", job=folder.text.encode().decode())["state"] == WAITING


def test_a_job_of_a_newer_version_is_left_as_it_is_and_named_in_the_log(tmp_path, caplog):
    furnish(tmp_path)
    with open_office(tmp_path) as office:
        folder, conversation = brought(tmp_path, office)
        with conversation:
            path = office.queue.of(folder.text.name, folder.client.public).folder / JOB
    newer = path.read_text().replace('"format":1', '"format":2')
    path.write_text(newer)
    with open_office(tmp_path):
        assert "job 1 is left as it is and not run: a job in format 2, made by a newer version" in caplog.text
    assert path.read_text() == newer


def test_an_end_that_cannot_be_kept_costs_nothing(tmp_path):
    """The disk takes the result, and not that the job is finished: after a restart it can go on from what there is."""
    furnish(tmp_path)
    with open_office(tmp_path) as office:
        folder, conversation = brought(tmp_path, office)
        with conversation:
            conversation.release(folder.text, folder.keys, None)
        entry = office.queue.next(timeout=0)
        (entry.folder / RESULT).write_bytes(b"sealed")
        (entry.folder / f".unfinished-{STATE}").mkdir()  # in the way of the file
        office.queue.over(entry, FINISHED)
        assert entry.state == FINISHED
        assert entry.events.closed
        (entry.folder / f".unfinished-{STATE}").rmdir()
    with open_office(tmp_path) as office, talk(tmp_path, office.address, folder.client) as conversation:
        status = conversation.ask("Status", job=folder.text.name)
        assert status["state"] == WAITING
        assert status["missing"] == {}, "the data were removed, though the job may have to go on"
        assert conversation.release(folder.text, folder.keys, None)["state"] == READY


def test_a_job_folder_that_somebody_spoilt_is_in_nobodys_way(tmp_path):
    furnish(tmp_path)
    with open_office(tmp_path) as office:
        folder, conversation = brought(tmp_path, office)
        conversation.__exit__(None, None, None)
        entry = office.queue.of(folder.text.name, folder.client.public)
        (entry.folder / ".unfinished-trap").mkdir()
    with (
        open_office(tmp_path) as office,
        talk(tmp_path, office.address, folder.client) as conversation,
        pytest.raises(ServiceError, match="no such job"),
    ):
        conversation.ask("Status", job=folder.text.name)


# --- predictions ------------------------------------------------------------------------------------------------------
INFER = """
kind = "infer"
output = "predicted"
policy = "policy.toml"
top = 2

[data]
sealed = "sealed"
key = "sealed.key"
part = "test"

[model]
weights = "trained.safetensors"

[scheme]
inputs = 2
colluders = 1
"""


def test_predictions_are_those_of_the_weights(staffed, trained):
    (staffed.folder / "trained.safetensors").write_bytes(trained[MODEL])
    (staffed.folder / "infer.toml").write_text(INFER)
    files = submit(opened(staffed.folder / "infer.toml"), town_hall(staffed), Quiet())
    rows = json.loads(files[PREDICTIONS])["predictions"]

    data = read_dataset(str(staffed.folder / "data.npz"), seed=0)
    tensors, words, _ = tensors_from_bytes(trained[MODEL], MODEL)
    model = Card.from_words(words["card"], MODEL).network(seed=0)
    model.load_state_dict(tensors)
    expected = rows_of(model, data.test)
    with Runtime(Scheme(inputs=2, colluders=1).for_inference(), None) as runtime, protected(model, runtime):
        exact = rows_of(model, data.test)
    assert rows == exact
    assert len(rows) == len(data.test) > 5
    for mine, theirs in zip(rows, expected, strict=True):  # without shares there is no rounding
        assert mine["label"] == theirs["label"]
        assert mine["classes"][0]["probability"] == pytest.approx(theirs["classes"][0]["probability"], abs=0.02)


def rows_of(model, part):
    found = [row for batch in predict(model, part, top=2) for row in prediction_rows(batch, lambda n: n, None, top=2)]
    return plain(found)


# --- signals ----------------------------------------------------------------------------------------------------------
def test_sigterm_finishes_the_step_saves_and_the_job_goes_on(staffed):
    """No checkpoint is due for an hour: the one that is there was written because of the signal."""
    port, epochs = free_port(), 8
    job = write_job(staffed.folder, output="stopped", epochs=epochs, every=3600.0)
    enclave = launch_enclave(staffed.folder, port=port, state="stopped-state")
    with ending(enclave.process):
        client = Submission(job, place(staffed.folder, f"127.0.0.1:{port}", patience=120.0))
        assert eventually(lambda: client.told("step"), 60)
        enclave.process.send_signal(signal.SIGTERM)
        assert enclave.process.wait(60) == 130
    (path,) = (staffed.folder / "stopped-state" / "jobs").iterdir()
    saved = newest(path)
    assert saved.number == 1
    assert client.told("step")[-1]["step"] <= saved.step < 4 * epochs
    assert not list(path.glob(".unfinished-*"))
    with running_enclave(staffed.folder, port=port, state="stopped-state"):
        assert_same(client.result(), trained_alone(staffed, epochs=epochs))
    assert client.told("started")[-1]["done"] == saved.step


# --- a disk that is full ----------------------------------------------------------------------------------------------
def room(town, size):
    """The largest file that the enclave can write."""
    resource.prlimit(town.enclave.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("size", [4096, 0], ids=["no room for a checkpoint", "no room for anything"])
def test_a_full_disk_fails_the_job_and_costs_no_checkpoint(staffed, size, request):
    request.addfinalizer(lambda: room(staffed, resource.RLIM_INFINITY))
    folder = opened(write_job(staffed.folder, output=f"full-{size}", epochs=4))

    class Fills(Quiet):
        def event(self, words):
            super().event(words)
            if words["kind"] == "checkpoint" and words["receipt"]["number"] == 2:
                room(staffed, size)

    watcher = Fills()
    with pytest.raises(ServiceError, match=r"failed: the enclave cannot write .*File too large\. Make room there"):
        submit(folder, town_hall(staffed), watcher)
    assert status_of(folder, town_hall(staffed), Quiet())["state"] == FAILED
    (path,) = (staffed.folder / "state" / "jobs").glob(f"*-{folder.text.name}")
    last = [words["receipt"] for words in watcher.events if words["kind"] == "checkpoint"][-1]
    assert newest(path).words() == last
    assert not list(path.glob(".unfinished-*"))
    room(staffed, resource.RLIM_INFINITY)
    again = Quiet()
    assert_same(submit(folder, town_hall(staffed), again), trained_alone(staffed, epochs=4))
    assert next(words["done"] for words in again.events if words["kind"] == "started") == last["step"]


# --- mistakes ---------------------------------------------------------------------------------------------------------
RUNS = """
import json, sys
from darknight.cli.app import run
for arguments in json.loads(sys.argv[1]):
    print(run(arguments), flush=True)
    print("--- end", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def complaints(town):
    """(exit code, lines on stderr) of commands that cannot work, all run by one process."""
    fleet, simulated = ["--fleet", "fleet.toml"], ["--insecure-simulated-platform", "platform"]
    commands = {
        "no fleet file": ["--fleet", "nowhere.toml", *simulated],
        "no workers in it": ["--fleet", "policy.toml", *simulated],
        "taken port": [*fleet, *simulated, "--listen", town.enclave.address, "--state", "other-state"],
        "no port": [*fleet, *simulated, "--listen", "nonsense", "--state", "other-state"],
        "state in use": [*fleet, *simulated, "--listen", "127.0.0.1:0"],
        "state is a file": [*fleet, *simulated, "--listen", "127.0.0.1:0", "--state", "policy.toml"],
        "no TEE": [*fleet, "--listen", "127.0.0.1:0", "--state", "other-state"],
        "collateral of a simulation": [*fleet, *simulated, "--collateral", "policy.toml"],
    }
    commands["state in use"] += ["--state", "state"]
    arguments = json.dumps([["enclave", *flags] for flags in commands.values()])
    ended = subprocess.run(
        [sys.executable, "-c", RUNS, arguments],
        cwd=town.folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    errors = [part.strip().splitlines() for part in ended.stderr.split("--- end\n")]
    return dict(zip(commands, zip(map(int, ended.stdout.split()), errors, strict=False), strict=True))


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("no fleet file", "nowhere.toml: cannot be read"),
        ("no workers in it", "policy.toml: unknown"),
        ("taken port", "the port is taken"),
        ("no port", "cannot listen at nonsense"),
        ("state in use", "is in use by another enclave. Choose another --state."),
        ("state is a file", "the queue cannot be in policy.toml: "),
        ("no TEE", "no TEE here"),
        ("collateral of a simulation", "a software platform makes its own"),
    ],
)
def test_a_mistake_is_told_in_one_line(complaints, mistake, words):
    code, lines = complaints[mistake]
    assert code == 2
    assert words in lines[-1]
    assert lines[-1].startswith("darknight: error: ")
    assert [line for line in lines[:-1] if "SIMULATED" not in line] == []


# --- uploads ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def large(tmp_path):
    """A client whose records are several pieces long."""
    furnish(tmp_path)
    images = np.random.default_rng(3).random((60, 1, 96, 96)) + 1
    np.savez(tmp_path / "large.npz", x=images, y=np.arange(60) % 3)
    seal(tmp_path, tmp_path / "large.npz", "large")
    return opened(write_job(tmp_path, sealed="large"))


@pytest.mark.parametrize("restarted", [False, True], ids=["same enclave", "another process"])
def test_an_upload_that_broke_off_goes_on_where_it_was(tmp_path, large, restarted):
    size = (large.sealed / RECORDS).stat().st_size
    assert size > 4 << 20
    with ExitStack() as stack:
        office = stack.enter_context(open_office(tmp_path))
        begun = office.queue.folder / "jobs" / f"00000001-{large.text.name}" / f"upload-{RECORDS}"
        with Tap(office.address) as tap, talk(tmp_path, tap.address, large.client) as conversation:
            sent = []

            def cut(count):
                sent.append(count)
                if len(sent) == 3:
                    assert eventually(lambda: begun.exists() and begun.stat().st_size >= 1 << 20)
                    tap.__exit__()

            large_upload = {"job": large.text.name, "offset": 0}
            conversation.ask("Submit", job=large.text.encode().decode())
            conversation.upload(large.sealed / HEAD, more=lambda count: None, **large_upload)
            with pytest.raises(ServiceError, match="does not answer"):
                conversation.upload(large.sealed / RECORDS, more=cut, **large_upload)
        if restarted:
            stack.close()
            office = stack.enter_context(open_office(tmp_path))
        watcher = Counting()
        with talk(tmp_path, office.address, large.client) as conversation:
            missing = conversation.ask("Status", job=large.text.name)["missing"]
            assert 1 << 20 <= missing[RECORDS] < size
            assert HEAD not in missing
            assert _brought(large, conversation, watcher)["missing"] == {}
            assert watcher.sent[RECORDS][0] >= 1 << 20, "it began anew"
            assert sum(watcher.sent[RECORDS]) == size
            assert HEAD not in watcher.sent
            conversation.release(large.text, large.keys, None)  # opens the head, and looks at the size of the records
        entry = office.queue.next(timeout=0)
        assert (entry.data / RECORDS).read_bytes() == (large.sealed / RECORDS).read_bytes()
