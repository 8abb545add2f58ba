"""Peak memory in a process of its own: what counts, and that more memory shows."""

import pytest

from darknight.bench import Memory, Peak, measure_memory
from darknight.errors import DarKnightError

MEBIBYTE = 1 << 20


def test_only_what_came_with_the_model_counts():
    plain = Peak(before=300, peak=500, shared=0)
    found = Memory(model="a", batch=1, size=1, plain=plain, protected=Peak(before=300, peak=600, shared=50))
    assert found.ratio == 1.5
    assert found.whole == 1.2
    assert found.own == 1.25
    assert found.words()["protected"] == {"before": 300, "peak": 600, "shared": 50}


@pytest.mark.full
def test_more_examples_take_more_and_only_the_enclave_shares():
    few, many = (measure_memory("small-cnn", batch=batch, size=48) for batch in (3, 96))
    assert few.plain.shared == 0 < few.protected.shared
    assert many.plain.growth > few.plain.growth + 10 * MEBIBYTE
    assert many.protected.growth > many.plain.growth + 10 * MEBIBYTE
    assert many.protected.before == pytest.approx(many.plain.before, rel=0.1)


def test_a_step_that_fails_says_so():
    with pytest.raises(DarKnightError, match=r"plain step of small-cnn ended with 1; it said: .*4x4 or more"):
        measure_memory("small-cnn", batch=2, size=2)
