"""What is told: the paths of the JSON, those of the history, and that they are the same."""

import json
from dataclasses import replace

import pytest

from darknight.bench import (
    SCHEMES,
    Bandwidth,
    Ceiling,
    Contest,
    Cost,
    Memory,
    Passes,
    Peak,
    Results,
    Rivals,
    machine,
    program,
)

FIELD = Ceiling(
    model="mobilenet-v2",
    batch=2,
    size=32,
    training=True,
    times=5,
    plain=6.0,
    layout="channels_last",
    enclave=2.0,
    wall=9.0,
    processors=12.0,
    masked=("features.0.0",),
    expected=1.75,
    phases={"encode": 1.5, "check": 0.5},
    layers={"features.0.0": {"encode": 1.5, "check": 0.5}},
)
INFERENCE = replace(FIELD, model="mobilenet-v1", training=False, scheme=SCHEMES["field"].for_inference())
PAPER = replace(FIELD, scheme=SCHEMES["paper"], wall=3.0)
NOTHING = Results(machine=machine(), program=program(), overheads={})


def contest(name, ours, theirs):
    costs = [Cost(seconds=seconds, processor_seconds=seconds) for seconds in (1.0, ours, theirs)]
    return Contest(network="", rival_name=name, plain=costs[0], ours=costs[1], rival=costs[2], absent=None)


EVERYTHING = replace(
    NOTHING,
    ceilings=[FIELD, replace(FIELD, links="sealed", enclave=3.0), INFERENCE],
    overheads={"field": [FIELD], "paper": [PAPER]},
    passes=Passes(nbytes=1, times=5, encode_over_copy=2.0, decode_over_copy=3.0, noise_over_encode=0.1),
    bandwidth=Bandwidth(copy=2e9, in_place=3e9, read=4e9, seal=1e9),
    memory=[
        Memory(
            model="mobilenet-v2",
            batch=2,
            size=32,
            plain=Peak(before=1, peak=3, shared=0),
            protected=Peak(before=1, peak=4, shared=1),
        )
    ],
    rivals=Rivals(
        batch=3,
        times=1,
        threads=1,
        training={"average": contest("crypten", 2.0, 100.0)},
        inference=contest("tenseal", 1.0, 9.0),
    ),
)


def test_ratios_are_nested_objects_with_torchvisions_names():
    found = json.loads(json.dumps(EVERYTHING.words(), allow_nan=False))
    assert found["ceiling"] == {
        "shm": {"train": {"mobilenet_v2": 3.0}, "infer": {"mobilenet_v1": 3.0}},
        "sealed": {"train": {"mobilenet_v2": 2.0}},
    }
    assert found["overhead"] == {"field": {"mobilenet_v2": 9.0}, "paper": {"mobilenet_v2": 3.0}}
    assert found["rival"] == {"crypten": 50.0, "tenseal": 9.0, "absent": None}
    assert found["kernels"] == {"encode_over_copy": 2.0, "decode_over_copy": 3.0}
    assert found["memory"] == {"mobilenet_v2": 1.5}


def test_ratios_come_with_what_they_are_made_of():
    found = EVERYTHING.words()
    parts = found["breakdown"]["sealed"]["train"]["mobilenet_v2"]
    assert parts["enclave"]["layers"] == {"features.0.0": {"encode": 1.5, "check": 0.5}}
    assert parts["processors_over_plain"] == 12.0
    assert parts["masked_layers_seconds"] == {"measured": 2.0, "expected_by_rates": 1.75}
    limits = found["roofline"]["shm"]["train"]["mobilenet_v2"]
    assert limits["measured_over_least"] == limits["measured_seconds"] / limits["least_seconds"]
    assert limits["phases"]["encode"]["measured_seconds"] == 1.5
    assert limits["phases"]["encode"]["written_bytes"] > 0
    over = {scheme: parts["mobilenet_v2"]["times_p_over_k"] for scheme, parts in found["details"]["overhead"].items()}
    assert over == {"field": pytest.approx(9.0 * 4 / 6), "paper": pytest.approx(3.0 * 2 / 4)}


def test_what_was_not_measured_is_null_or_empty_and_says_why():
    found = NOTHING.words()
    assert (found["ceiling"], found["overhead"], found["memory"]) == ({}, {}, {})
    assert found["kernels"] == {"encode_over_copy": None, "decode_over_copy": None}
    assert (found["rival"]["crypten"], found["rival"]["tenseal"]) == (None, None)
    assert "--rivals" in found["rival"]["absent"]
    assert NOTHING.ratios() == ({}, {})


def test_an_absent_rival_is_null_with_its_reason():
    without = replace(contest("crypten", 2.0, 1.0), rival=None, absent="no such package")
    found = replace(EVERYTHING, rivals=replace(EVERYTHING.rivals, training={"average": without}))
    assert found.words()["rival"] == {"crypten": None, "tenseal": 9.0, "absent": "no such package"}
    assert "rival.crypten" not in found.ratios()[0]


def test_paths_of_the_history_lead_to_the_same_ratios_in_the_json():
    ratios, conditions = EVERYTHING.ratios()
    words = EVERYTHING.words()
    assert len(ratios) == 3 + 2 + 1 + 2 + 2
    assert ratios.keys() == conditions.keys()
    for path, value in ratios.items():
        found = words
        for name in path.split("."):
            found = found[name]
        assert found == value
    assert conditions["ceiling.shm.infer.mobilenet_v1"] == conditions["memory.mobilenet_v2"] == "batch 2, 32x32"
