"""The measure of the enclave: what it adds up, what it leaves out, and that it can tell a slow enclave."""

import time

import pytest
import torch

from darknight.bench import ceiling
from darknight.bench.ceiling import measure_ceiling
from darknight.coding import Scheme
from darknight.errors import UsageError
from darknight.runtime import masked_field
from darknight.runtime.phases import Phases, measured, phase
from darknight.runtime.threads import one_thread

SMALL = {"batch": 3, "size": 16, "times": 1, "scheme": Scheme(inputs=3, colluders=1)}


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture(scope="module", autouse=True)
def memory_as_it_was():
    """Other tests of this process look at how much memory it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling, "keep_memory", lambda: True)
        yield


@pytest.fixture(scope="module")
def found(memory_as_it_was):
    return measure_ceiling("resnet-small", **SMALL)


def test_phases_add_up_to_the_enclaves_seconds(found):
    assert sum(found.phases.values()) == pytest.approx(found.enclave, rel=0.1)
    assert {"encode", "decode", "check", "send", "receive", "weights", "optimizer"} <= found.phases.keys()
    assert found.ratio == found.plain / found.enclave > 0
    assert found.layout in ("channels_first", "channels_last")


def test_every_protected_layer_has_its_phases(found):
    assert "fc" in found.layers
    assert all({"encode", "decode", "check"} <= spent.keys() for spent in found.layers.values())


def test_what_the_rates_expect_of_masked_layers_is_there_beside_it(found):
    assert found.expected > 0
    spent = sum(sum(layer.values()) for layer in found.layers.values())
    assert spent < found.masked_seconds < found.enclave


def test_a_slower_enclave_lowers_the_ceiling_and_shows_where(found, monkeypatch):
    encode = masked_field.MaskedField._shares

    def slow(self, *arguments, **options):
        with phase("encode"):
            burn(0.02)
        return encode(self, *arguments, **options)

    monkeypatch.setattr(masked_field.MaskedField, "_shares", slow)
    slower = measure_ceiling("resnet-small", **SMALL)
    calls = 2 * len(found.layers)
    assert slower.enclave > 0.02 * calls
    assert slower.phases["encode"] > 0.02 * calls
    assert next(iter(slower.phases)) == "encode"


def test_inference_needs_no_optimizer_and_fewer_workers():
    found = measure_ceiling("small-cnn", training=False, **SMALL)
    assert not found.training
    assert "optimizer" not in found.phases
    assert {"encode", "decode", "check"} <= found.phases.keys()


def test_threads_are_as_they_were_afterwards(found):
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"size": 0}, {"times": 0}])
def test_nothing_cannot_be_measured(wrong):
    with pytest.raises(UsageError, match="at least 1"):
        measure_ceiling("small-cnn", **{**SMALL, **wrong})


# --- phases -----------------------------------------------------------------------------------------------------------
def test_what_is_inside_counts_there_and_not_outside():
    with measured() as phases:
        with phase("outer", "a"):
            burn(0.02)
            with phase("inner"):
                burn(0.03)
            with phase("inner", "b"):
                burn(0.04)
        burn(0.01)
    least = {("a", "outer"): 0.02, ("a", "inner"): 0.03, ("b", "inner"): 0.04, ("", ""): 0.01}
    assert phases.seconds.keys() == least.keys()
    for place, seconds in least.items():
        assert seconds <= phases.seconds[place] < seconds + 0.01


def test_a_phase_that_raises_ends():
    with measured() as phases:
        with pytest.raises(ZeroDivisionError), phase("failing", "a"):
            raise ZeroDivisionError
        assert phases.switch("a", "b") == ("", "")


def test_nothing_is_measured_while_nobody_asks(monkeypatch):
    monkeypatch.setattr(Phases, "switch", lambda *_: pytest.fail("a phase was measured"))
    with phase("encode", "a"):
        pass
