"""The measure of encode and decode: over a copy of the same bytes, and that it can tell a slow one."""

import time

from darknight.bench import measure_passes, passes


def test_they_are_compared_with_a_copy():
    found = measure_passes(1 << 20, times=2)
    assert (found.nbytes, found.times) == (1 << 20, 2)
    assert 0 < found.encode_over_copy < 1000
    assert 0 < found.decode_over_copy < 1000
    assert 0 < found.noise_over_encode < 1000


def test_a_slower_encode_shows(monkeypatch):
    encode = passes.encode

    def slow(*arguments, **options):
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return encode(*arguments, **options)

    before = measure_passes(1 << 20, times=2)
    monkeypatch.setattr(passes, "encode", slow)
    after = measure_passes(1 << 20, times=2)
    assert after.encode_over_copy > 5 * before.encode_over_copy
    assert after.noise_over_encode < before.noise_over_encode
