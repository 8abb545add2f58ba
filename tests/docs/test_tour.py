"""make tour: from sealed data to a model that predicts, with an enclave that is killed half way."""

import csv
import subprocess
import sys
import time

import pytest

from boundaries.house import ROOT


@pytest.mark.full
def test_the_tour_ends_with_a_model_that_predicts(tmp_path, figure):
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "tour.py"), str(tmp_path / "tour")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = time.monotonic() - begin
    figure("make tour", f"{seconds:.0f} s")
    for words in ("kill -9", "it goes on after step", "the job is finished", "SIMULATED"):
        assert words in done.stdout + done.stderr
    with (tmp_path / "tour" / "digits.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1797
    assert sum(row["label"] == row["class_1"] for row in rows) > 0.9 * len(rows)
