"""/metrics and /healthz: the numbers of tasks that really ran, and nothing that an enclave named."""

import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from darknight.wire import Refused
from worker.stations import new_enclave, residues, running


def get(address, path):
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_numbers_are_those_of_what_happened():
    enclave = new_enclave()
    with running(enclave, metrics=("127.0.0.1", 0)) as worker:
        address = worker.station.metrics_address
        with worker.connect(enclave) as one:
            one.weights(residues(7, 5), layer="secret-layer-name")
            one.forward(residues(3, 5), 7, layer="secret-layer-name").result(20)
            with pytest.raises(Refused):
                one.forward(residues(3, 6), 7, layer="secret-layer-name").result(20)
            with pytest.raises(Refused):
                one.grad_weight(residues(3, 7), (3, 5), layer="secret-layer-name", call=99).result(20)
            status, text = get(address, "/metrics")
        found = samples(text)
        assert status == 200
        assert found["darknight_worker_tasks_total", "done", "forward"] == 1
        assert found["darknight_worker_tasks_total", "forward", "refused"] == 1
        assert found["darknight_worker_tasks_total", "grad_weight", "refused"] == 1
        assert found["darknight_worker_tasks_total", "done", "grad_input"] == 0
        assert found["darknight_worker_task_seconds_count",] == 1
        assert found["darknight_worker_received_bytes_total",] == 4 * (7 * 5 + 3 * 5 + 3 * 6 + 3 * 7)
        assert found["darknight_worker_sent_bytes_total",] == 4 * 3 * 7
        assert found["darknight_worker_sessions",] == 1
        assert 4 * (7 * 5 + 3 * 5) <= found["darknight_worker_held_bytes",] < 1 << 16
        assert found["darknight_worker_memory_limit_bytes",] == 256 << 20
        assert "secret" not in text
        assert enclave.fingerprint[7:] not in text
        assert get(address, "/healthz") == (200, "serving\n")
        assert get(address, "/other")[0] == 404


def test_a_worker_that_does_not_serve_says_so():
    with running(new_enclave(), metrics=("127.0.0.1", 0)) as worker:
        worker.station._healthy = False  # as `stop` does before it waits for tasks
        assert get(worker.station.metrics_address, "/healthz") == (503, "stopping\n")
