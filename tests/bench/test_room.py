"""A measurement that cannot fit is refused before it begins."""

import pytest

from darknight.bench import SCHEMES, measure_ceiling, room
from darknight.bench.room import least_bytes
from darknight.errors import UsageError
from darknight.memory import free_bytes

GIBIBYTE = 1 << 30


def least(model="resnet-small", batch=3, size=16, training=True, links="shm"):
    scheme = SCHEMES["field"] if training else SCHEMES["field"].for_inference()
    return least_bytes(model, batch, size, training, scheme, links)


def test_more_work_needs_more():
    assert least() < least(batch=6) < least(batch=6, size=24)
    assert least(training=False) < least()
    assert least() < least(links="sealed")  # weights for each worker


def test_a_scheme_with_fewer_workers_needs_less():
    assert least_bytes("vgg-small", 4, 32, True, SCHEMES["paper"], "shm") < least("vgg-small", 4, 32)


def test_it_is_of_the_right_size():
    """VGG16: 138 million parameters, weight, gradient and momentum of two models, and what six workers answer."""
    assert 5 * GIBIBYTE < least("vgg16", 8, 64) < 12 * GIBIBYTE


def test_what_cannot_fit_is_refused(monkeypatch):
    assert free_bytes() > 1 << 20
    monkeypatch.setattr(room, "free_bytes", lambda: 1 << 20)
    with pytest.raises(UsageError, match=r"resnet-small, batch 3 at 16x16, with 6 workers .* are free\. Use a smaller"):
        measure_ceiling("resnet-small", batch=3, size=16, times=1)
