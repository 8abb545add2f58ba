"""The speed of memory: what is counted, and that all three are measured."""

from dataclasses import replace

import pytest

from darknight.bench import Bandwidth, bandwidth, measure_bandwidth
from darknight.errors import UsageError

SLOW = Bandwidth(copy=10.0, in_place=8.0, read=20.0, seal=5.0)


@pytest.mark.parametrize(
    ("read", "written", "seconds"),
    [
        (100, 100, 20.0),  # a copy of 100 bytes moves 200
        (100, 0, 5.0),
        (300, 100, 20.0 + 10.0),
        (100, 300, 20.0 + 20.0),  # a write costs what it costs in a copy
        (0, 0, 0.0),
    ],
)
def test_what_is_written_is_copied_and_the_rest_is_read(read, written, seconds):
    assert SLOW.seconds(read, written) == pytest.approx(seconds)


def test_the_faster_way_of_writing_is_the_limit():
    faster = replace(SLOW, in_place=40.0)
    assert faster.seconds(100, 100) == pytest.approx(5.0)
    assert faster.seconds(300, 100) == pytest.approx(5.0 + 10.0)


def test_all_are_measured():
    found = measure_bandwidth(1 << 20, times=2)
    for speed in (found.copy, found.in_place, found.read, found.seal):
        assert 1e7 < speed < 1e13


def test_the_seal_encrypts_every_byte(monkeypatch):
    encrypted = []
    cipher = bandwidth.Cipher

    class Counting:
        def __init__(self, *given):
            self._encryptor = cipher(*given).encryptor()

        def encryptor(self):
            return self

        def update_into(self, data, out):
            encrypted.append(len(data))
            return self._encryptor.update_into(data, out)

        def finalize(self):
            return self._encryptor.finalize()

    monkeypatch.setattr(bandwidth, "Cipher", Counting)
    bandwidth._sealing(3 << 20)()
    assert sum(encrypted) == 3 << 20


@pytest.mark.parametrize(("nbytes", "times"), [(100, 5), (2 << 20, 0)])
def test_too_little_to_measure(nbytes, times):
    with pytest.raises(UsageError, match="needs at least"):
        measure_bandwidth(nbytes, times=times)
