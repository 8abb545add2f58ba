"""An enclave that is killed at any moment: its job goes on, and ends with the weights of one that never was."""

import random
import threading
import time

import pytest
import torch

from darknight.client.jobs import submit
from darknight.coding import Scheme
from darknight.data import read_dataset
from darknight.models import build_model
from darknight.runtime import Runtime
from darknight.service.runner import MODEL
from darknight.train import Recipe, fit, protected, tensors_from_bytes
from fleet.workers import ending, free_port
from service.enclaves import Quiet, launch_enclave, opened, place, workplace, write_job

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCHS = 2


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    with workplace(tmp_path_factory.mktemp("work")) as folder:
        yield folder


@pytest.fixture(scope="module")
def expected(work):
    """The same training on the plain data, without enclave and workers: in the field, bit for bit the same."""
    data = read_dataset(str(work / "data.npz"), seed=0)
    model = build_model("small-cnn", shape=data.shape, classes=data.classes, seed=5)
    recipe = Recipe(epochs=EPOCHS, batch_size=9, learning_rate=0.05, seed=5)
    with Runtime(Scheme(inputs=1, colluders=1), None, seed=5) as runtime, protected(model, runtime):
        fit(model, data, recipe, runtime=runtime)
    return model.state_dict()


def assert_same(files, expected):
    tensors, _, _ = tensors_from_bytes(files[MODEL], MODEL)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


class Client:
    """Submits a job in a thread, and waits through whatever happens to the enclave."""

    def __init__(self, work, name, port, *, patience=120.0):
        self.watcher = Quiet()
        self._result = []
        folder, where = opened(write_job(work, output=name, epochs=EPOCHS)), place(work, f"127.0.0.1:{port}")
        where = type(where)(address=where.address, policy=where.policy, patience=patience)
        self._thread = threading.Thread(target=self._run, args=(folder, where), daemon=True)
        self._thread.start()

    def _run(self, folder, where):
        try:
            self._result.append(submit(folder, where, self.watcher))
        except Exception as error:
            self._result.append(error)

    def wait_for_training(self):
        while not self.done and not any(event["kind"] == "started" for event in self.watcher.events):
            time.sleep(0.01)

    @property
    def done(self):
        return not self._thread.is_alive()

    def result(self):
        self._thread.join()
        if isinstance(self._result[0], Exception):
            raise self._result[0]
        return self._result[0]


def finish(work, port, client, state="state"):
    """Another enclave on the same port and the same disk, until the client has its result."""
    enclave = launch_enclave(work, port=port, state=state)
    with ending(enclave.process):
        return client.result()


@pytest.fixture(scope="module")
def durations(work, expected):
    """Seconds until a job that nobody disturbs begins to train, and of the training. Its weights are the plain ones."""
    port = free_port()
    enclave = launch_enclave(work, port=port)
    with ending(enclave.process):
        begin = time.monotonic()
        client = Client(work, "undisturbed", port)
        client.wait_for_training()
        started = time.monotonic()
        assert_same(client.result(), expected)
        return started - begin, time.monotonic() - started


def test_kills_at_random_moments(work, expected, durations, full, tally):
    """Every other one while it trains, the others before."""
    count = 20 if full else 2
    moments = random.Random(11)
    resumed = 0
    for number in range(count):
        port = free_port()
        enclave = launch_enclave(work, port=port)
        with ending(enclave.process):
            client = Client(work, f"random-{number}", port)
            if number % 2:
                client.wait_for_training()
            time.sleep(moments.random() * durations[number % 2])
            enclave.process.kill()
            enclave.process.wait()
        assert_same(finish(work, port, client), expected)
        started = [event["done"] for event in client.watcher.events if event["kind"] == "started"]
        resumed += started[-1] > 0
    tally("enclave, killed at a random moment", {"kills": count, "went on after a step": resumed, "wrong weights": 0})


def test_kills_at_every_boundary_of_a_write(work, expected, full, tally, tmp_path):
    """Just before each operation on the disk, from the first byte of the submission to the last of the result."""
    counter = tmp_path / "count"
    port = free_port()
    environment = {"CRASHING_COUNT": str(counter)}
    enclave = launch_enclave(work, port=port, state="counted-state", crash="count", environment=environment)
    with ending(enclave.process):
        first = counter.stat().st_size  # its own start
        assert_same(Client(work, "counted", port).result(), expected)
    total = counter.stat().st_size
    boundaries = range(first, total) if full else range(first + 12, total, (total - first) // 2)
    crashes = 0
    for boundary in boundaries:
        port, state = free_port(), f"state-{boundary}"
        enclave = launch_enclave(work, port=port, state=state, crash=boundary)
        with ending(enclave.process):
            client = Client(work, f"boundary-{boundary}", port)
            while not client.done and enclave.process.poll() is None:
                time.sleep(0.05)
            if not client.done or enclave.process.poll() is not None:
                assert enclave.process.wait() == -9
                crashes += 1
        assert_same(finish(work, port, client, state), expected)
    assert crashes >= len(boundaries) - 2  # the last ones may be after the client has left
    tally("enclave, killed before a write", {"kills": crashes, "boundaries": total - first, "wrong weights": 0})
