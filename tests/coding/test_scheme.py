"""Every combination that is sound constructs; every other raises SchemeError naming the remedy."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

import darknight as dk
from darknight.coding import PRIME_25, PRIME_28
from darknight.errors import DarKnightError, SchemeError

ARITHMETICS = {
    "field25": dk.Field(prime=PRIME_25),
    "field28": dk.Field(prime=PRIME_28),
    "real64": dk.Real(2e4),
    "real64 small": dk.Real(1e2),
    "real32": dk.Real(2e4, dtype=torch.float32),
    "real32 small": dk.Real(1e3, dtype=torch.float32),
}


def test_the_table_of_all_combinations():
    table = json.loads((Path(__file__).parent / "scheme_table.json").read_text())
    for row in table["rows"]:
        settings = dict(zip(table["columns"], row, strict=True))
        expected = settings.pop("expected")
        settings["arithmetic"] = ARITHMETICS[settings["arithmetic"]]
        if isinstance(expected, int):
            assert dk.Scheme(**settings).workers == expected, settings
        else:
            with pytest.raises(SchemeError) as refusal:
                dk.Scheme(**settings)
            assert expected in str(refusal.value), settings


def test_the_defaults_are_the_safe_ones():
    scheme = dk.Scheme(inputs=4, colluders=1)
    assert scheme == dk.Scheme(
        inputs=4,
        colluders=1,
        spares=0,
        arithmetic=dk.Field(prime=PRIME_28, bits=10),
        mask_gradients=True,
        mixing="systematic",
        integrity="freivalds",
    )
    assert scheme.workers == 6
    assert scheme.for_inference().workers == 5
    assert scheme.caveats == ()


def test_the_papers_setting_is_spelled_out_and_says_what_it_leaks():
    paper = dk.Scheme.paper()
    assert paper == dk.Scheme(
        inputs=2,
        colluders=1,
        spares=1,
        arithmetic=dk.Real(noise_std=2e4, dtype=torch.float32),
        mask_gradients=False,
        mixing="dense",
        integrity="parity",
    )
    assert paper.workers == 4
    told = " ".join(paper.caveats)
    assert "a single wrong element may be larger" in told
    for word in ("labels", "ReLU mask", "bounded amount", "blind", "faults, not attackers"):
        assert word in told
    assert "labels" not in " ".join(paper.for_inference().caveats)


@pytest.mark.parametrize("integrity", ["parity", "both", "off"])
def test_a_weaker_check_says_so(integrity):
    assert dk.Scheme(inputs=2, colluders=1, integrity=integrity).caveats


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"inputs": 0}, "inputs=0; needs a whole number of at least 1"),
        ({"inputs": True}, "whole number"),
        ({"inputs": 2.0}, "whole number"),
        ({"colluders": 0}, "colluders=0; needs a whole number of at least 1"),
        ({"spares": -1}, "at least 0"),
        ({"arithmetic": "field"}, "dk.Field()"),
        ({"mixing": "random"}, "systematic, dense"),
        ({"integrity": "none"}, "freivalds, parity, both, off"),
        ({"mask_gradients": 1}, "True or False"),
        ({"inputs": 60, "colluders": 3, "spares": 3}, "Lower inputs, colluders or spares"),
        ({"inputs": 60, "spares": 6}, "Lower inputs, colluders or spares"),
        ({"arithmetic": dk.Real(1e6)}, "Lower the noise"),
        ({"inputs": 60, "colluders": 8, "mixing": "dense"}, "Lower inputs, colluders or spares"),
        (
            {"inputs": 20, "spares": 8, "arithmetic": dk.Real(1e2), "mixing": "dense"},
            "Lower inputs, colluders or spares",
        ),
        ({"arithmetic": dk.Real(1.0, 1e5, torch.float32), "mask_gradients": False}, "float64"),
        (
            {"inputs": 8, "spares": 3, "arithmetic": dk.Real(1.9e3, dtype=torch.float32), "mask_gradients": False},
            "fewer spares",
        ),
        ({"arithmetic": dk.Real(4e6), "mixing": "dense"}, "Lower the noise"),
    ],
)
def test_bad_settings_are_refused_with_a_remedy(settings, remedy):
    with pytest.raises(SchemeError) as refusal:
        dk.Scheme(**{"inputs": 4, "colluders": 1, **settings})
    assert remedy in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: dk.Field(prime=2**31 - 1), "2^28 - 57"),
        (lambda: dk.Field(bits=3), "4 to 12"),
        (lambda: dk.Field(bits=13), "4 to 12"),
        (lambda: dk.Field(prime=PRIME_25, bits=12), "4 to 11"),
        (lambda: dk.Field(bits=10.0), "bits"),
        (lambda: dk.Real(0.5), "at least 1"),
        (lambda: dk.Real(-1), "at least 1"),
        (lambda: dk.Real(float("nan")), "finite"),
        (lambda: dk.Real(1e3, float("inf")), "finite"),
        (lambda: dk.Real("2e4"), "finite number"),
        (lambda: dk.Real(1e3, dtype=torch.float16), "float64 or torch.float32"),
        (lambda: dk.Real(1e6, dtype=torch.float32), "dtype=torch.float64"),
        (lambda: dk.Real(1e3, 1e7, dtype=torch.float32), "dtype=torch.float64"),
        (lambda: dk.Real(5e6), "Lower the noise"),
        (lambda: dk.Real(1e3, 1e15), "Lower the noise"),
    ],
)
def test_bad_arithmetics_are_refused_with_a_remedy(make, remedy):
    with pytest.raises(SchemeError) as refusal:
        make()
    assert remedy in str(refusal.value)
    assert isinstance(refusal.value, (DarKnightError, ValueError))


@pytest.mark.parametrize(("mean", "variance"), [(0, 4e8), (1e4, 1e8), (1e4, 2.5e7), (4e3, 1.6e7), (5e4, 1e7)])
def test_the_noises_that_the_paper_names_construct(mean, variance):
    noise = dk.Real(variance**0.5, mean, torch.float32)
    assert replace(dk.Scheme.paper(), arithmetic=noise).workers == 4


@pytest.mark.parametrize("inputs", [1, 2, 16, 64, 1000])
@pytest.mark.parametrize("spares", range(4))
def test_one_colluder_in_the_field_takes_any_number_of_inputs(inputs, spares):
    assert dk.Scheme(inputs=inputs, colluders=1, spares=spares).workers == inputs + 2 + spares


def test_schemes_are_frozen_and_keyword_only():
    scheme = dk.Scheme(inputs=2, colluders=1)
    with pytest.raises(FrozenInstanceError):
        scheme.inputs = 3
    with pytest.raises(TypeError):
        dk.Scheme(2, 1)
    assert len({scheme, dk.Scheme(inputs=2, colluders=1)}) == 1


def test_every_worker_of_a_scheme_has_a_seat_with_a_name():
    assert dk.Scheme(inputs=2, colluders=1, spares=1).seats == (
        "data 0",
        "data 1",
        "carrier of s",
        "carrier of r",
        "spare 0",
    )
    assert dk.Scheme(inputs=1, colluders=2).for_inference().seats == ("data 0", "carrier of r 0", "carrier of r 1")
    for scheme in (dk.Scheme.paper(), dk.Scheme(inputs=3, colluders=2, spares=1), dk.Scheme(inputs=3, colluders=1)):
        assert len(set(scheme.seats)) == scheme.workers
