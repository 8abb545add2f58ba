"""Numbers in the table are for people."""

import io

import pytest
from rich.console import Console

from darknight.accounting import DoneInEnclave, Ledger, Missed
from darknight.cli.training_table import size_words, training_table
from darknight.types import Pass


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5e18, "5000.0 PB")],
)
def test_bytes(count, words):
    assert size_words(count) == words


def shown(*events):
    """The table of a training in which this happened, in one line."""
    ledger = Ledger(exact=True, not_covered=())
    for event in events:
        ledger.record(event)
    time = {"total_seconds": 1.0, "enclave_seconds": 1.0, **ledger.summary()["time"]}
    summary = {
        "settings": {
            "model": "mlp",
            "data": "digits",
            "scheme": {"inputs": 1, "colluders": 1, "workers": 3, "arithmetic": {"name": "field"}},
        },
        "fleet": {"file": None, "workers": [{}] * 3, "insecure_one_operator": False},
        "examples": {"test": 10},
        "clear": None,
        "private": {"accuracy": 0.5, **ledger.summary(), "time": time, "layers": []},
        "view": {"correlation": 0.0},
        "files": {},
    }
    page = io.StringIO()
    Console(file=page, width=80).print(training_table(summary))
    assert max(map(len, page.getvalue().splitlines())) <= 80
    return " ".join(page.getvalue().replace("│", " ").split())


def test_workers_that_failed_are_named_with_the_reason():
    lost = [
        Missed(layer="a", worker=f"local {worker}", reason=f"worker {worker} (local {worker}) failed: {why}.")
        for worker, why in [(0, "it was slow"), (0, "it [bold]ended"), (2, "it ended too")]
    ]
    words = shown(*lost, DoneInEnclave(layer="a", seat=0, kind=Pass.FORWARD))
    assert "faults worker 0 (local 0) failed: it [bold]ended (2 answers missed)" in words
    assert "worker 2 (local 2) failed: it ended too (1 answer missed)" in words
    assert "1 part done in the enclave instead" in words
    assert "slow" not in words


def test_a_training_without_faults_does_not_speak_of_them():
    assert "faults" not in shown()
