"""dk.connect: three workers that were started by hand, on three ports, under TLS, and a fleet file."""

import logging
import os
import re
import signal
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from darknight.coding.scheme import Scheme
from darknight.errors import FleetError, UsageError
from darknight.fleet.remote import connect
from darknight.nn import protect_, unprotect_
from darknight.runtime import Runtime
from darknight.wire.identity import CERTIFICATE_FILE, WORKER, Identity
from darknight.worker.budget import OVERHEAD
from fleet.workers import announced, ending, eventually, free_port, launch, real_workers

SCHEME = Scheme(inputs=1, colluders=1)
OPERATORS = ("north", "south", "east")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Three workers; the first one tells how it is, and the last one offers shared memory."""
    folder = tmp_path_factory.mktemp("site")
    door = f"@darknight-test-{os.getpid()}"
    metrics = f"127.0.0.1:{free_port()}"
    flags = {"north": {"metrics": metrics}, "south": {}, "east": {"shared_memory": door}}
    with real_workers(folder, flags) as workers:
        yield SimpleNamespace(folder=folder, workers=workers, metrics=metrics)


def fleet_file(site, *entries, name="fleet.toml"):
    path = site.folder / name
    path.write_text("\n".join(entries or [worker.entry for worker in site.workers]))
    return path


def steps(fleet, count=3):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Runtime(SCHEME, fleet, seed=3) as runtime:
        protect_(model, runtime)
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(4, 1, 6, 6)).square().mean().backward()
            optimizer.step()
        assert not runtime.ledger.missed  # nobody was waited for in vain
        unprotect_(model)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_training_gives_the_bits_of_the_enclave_alone(site):
    """Also the enclave that connects a second time finds its place free."""
    for _ in range(2):
        with connect(fleet_file(site), patience=60) as fleet:
            assert fleet.operators == OPERATORS
            assert fleet.names == tuple(worker.address for worker in site.workers)
            assert all(fleet.ready(worker) for worker in range(3))
            assert torch.equal(steps(fleet), steps(None))
    assert fleet.closed


def held_bytes(site):
    """What the first worker keeps, as it says itself."""
    with urllib.request.urlopen(f"http://{site.metrics}/metrics", timeout=30) as answer:
        (held,) = re.findall(r"^darknight_worker_held_bytes (\S+)$", answer.read().decode(), re.MULTILINE)
    return float(held)


def test_after_a_step_a_worker_holds_the_weights_alone_and_in_the_end_nothing(site):
    wide, examples = nn.Linear(500, 3), torch.randn(64, 500)
    share, weights, answer = examples.nbytes, wide.weight.nbytes, 4 * max(3 * 500, 64 * 3)
    alone = weights + answer + 2 * OVERHEAD  # the latest answer counts until the next one
    assert alone < share / 4
    with connect(fleet_file(site), patience=60) as fleet, Runtime(SCHEME, fleet) as runtime:
        protect_(wide, runtime)
        for _ in range(3):
            loss = wide(examples).square().mean()
            assert held_bytes(site) >= share + weights  # the control: in the middle of a step it has its share
            loss.backward()
            del loss
            assert eventually(lambda: weights <= held_bytes(site) <= alone)
        runtime.close()
        assert eventually(lambda: held_bytes(site) == 0)


def test_a_fleet_that_is_too_small_says_so(site):
    few = pytest.raises(FleetError, match="1 workers; this scheme needs 3")
    with connect(fleet_file(site, site.workers[0].entry)) as fleet, few:
        Runtime(SCHEME, fleet)


def test_patience_and_one_operator_are_passed_on(site):
    with connect(fleet_file(site), insecure_one_operator=True, patience=30) as fleet:
        assert fleet.insecure_one_operator
        assert torch.equal(steps(fleet, 1), steps(None, 1))
    with pytest.raises(UsageError, match="patience=-1"):
        connect(fleet_file(site), patience=-1)


def test_a_worker_of_another_operator_is_refused_and_the_others_are_used(site, caplog):
    """If the file could be wrong about operators, one of them could hold two shares under two names."""
    first, second, third = (worker.entry for worker in site.workers)
    path = fleet_file(site, first, second.replace('"south"', '"north-2"'), third)
    with caplog.at_level(logging.WARNING, "darknight.fleet"), connect(path) as fleet:
        assert [fleet.ready(worker) for worker in range(3)] == [True, False, True]
        assert "its operator is 'south'; the fleet file says 'north-2'" in fleet.trouble(1)
    assert "worker 1" in caplog.text
    assert "is not there yet: it says that its operator is 'south'" in caplog.text


def test_a_worker_with_another_certificate_is_refused(site):
    """The addresses of two workers are exchanged: each has a good certificate, but not the one of its entry."""
    first, second, third = site.workers
    swapped = [
        first.entry.replace(first.address, second.address),
        second.entry.replace(second.address, first.address),
        third.entry,
    ]
    with connect(fleet_file(site, *swapped)) as fleet:
        assert [fleet.ready(worker) for worker in range(3)] == [False, False, True]
        assert "it has another certificate than SHA256:" in fleet.trouble(0)


def test_an_enclave_that_workers_do_not_know_is_refused_by_all(site):
    path = fleet_file(site, "[enclave]\nidentity = 'stranger'", *(worker.entry for worker in site.workers))
    with pytest.raises(FleetError, match="no worker can be used") as error:
        connect(path)
    for worker in site.workers:
        assert worker.address in str(error.value)
    assert str(error.value).count("--allow-enclave") == 3
    assert (site.folder / "stranger" / CERTIFICATE_FILE).exists()  # made on the first call; to be given to operators


def test_if_nobody_is_there_each_is_listed_with_its_reason(site):
    entry = site.workers[0].entry.replace(site.workers[0].address, f"127.0.0.1:{free_port()}")
    with pytest.raises(FleetError, match="nothing listens there"):
        connect(fleet_file(site, entry))


def test_shared_memory_is_used_where_the_file_names_it(site):
    """A worker that serves nobody at that door cannot be used: without the door it would be reached all the same."""
    third = site.workers[2].entry
    path = fleet_file(site, third.replace("@darknight-test-", "@darknight-nobody-"), site.workers[0].entry)
    with connect(path) as fleet:
        assert [fleet.ready(worker) for worker in range(2)] == [False, True]
        assert "darknight-nobody" in fleet.trouble(0)
        assert fleet.elsewhere == 1.0  # all that were reached
    with connect(fleet_file(site)) as fleet:
        assert fleet.elsewhere == pytest.approx(2 / 3)


def test_a_worker_that_comes_later_joins_and_if_it_dies_the_others_go_on(site):
    folder, port = site.folder, free_port()
    certificate = Identity.load_or_create(folder / "west", WORKER).certificate.decode()
    entry = f"[[worker]]\naddress = '127.0.0.1:{port}'\noperator = 'west'\ncertificate = '''{certificate}'''\n"
    path = fleet_file(site, entry, *(worker.entry for worker in site.workers[:2]))
    with connect(path, patience=60) as fleet:
        assert [fleet.ready(worker) for worker in range(3)] == [False, True, True]
        assert "nothing listens there" in fleet.trouble(0)
        process = launch(folder, "west", listen=f"127.0.0.1:{port}")
        with ending(process):
            announced(process)
            assert eventually(lambda: fleet.ready(0), 120)
            assert torch.equal(steps(fleet), steps(None))
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert torch.equal(steps(fleet, 1), steps(None, 1))
            assert not fleet.ready(0)
