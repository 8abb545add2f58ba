"""Numbers in the table are for people."""

import pytest

from darknight.cli.training_table import _bytes


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (5e18, "5000000.0 TB")],
)
def test_bytes(count, words):
    assert _bytes(count) == words
