"""Batches that go in chunks although they are small."""

from __future__ import annotations

import pytest

from darknight.runtime import chunks, masked_field, masked_real

EXAMPLES = 13  # with two inputs to a share: seven groups, the last one padded, in three chunks


@pytest.fixture
def cut(monkeypatch) -> list[int]:
    """Every batch of four groups or more goes in chunks. Notes of how many each pass was."""
    monkeypatch.setattr(chunks, "LEAST", 1)
    monkeypatch.setattr(chunks, "WEIGHT", 0)
    counts: list[int] = []

    def noting(calls):
        results = chunks.overlapped(calls)
        counts.append(len(results))
        return results

    for module in (masked_field, masked_real):
        monkeypatch.setattr(module, "overlapped", noting)
    return counts
