"""The ledger adds up, says so in words, and refuses what it does not know."""

import json
import math

import pytest

from darknight.accounting import (
    Blamed,
    BoundRaised,
    DoneInEnclave,
    Failed,
    Ledger,
    Masked,
    Missed,
    Overflow,
    Reseated,
    Resent,
    SentClear,
    Spent,
    Traffic,
    Unchecked,
    Unexplained,
    Verified,
)
from darknight.coding import Scheme
from darknight.types import Pass

SCHEME = Scheme(inputs=4, colluders=1)
LIE = Blamed(
    layer="fc", call=7, kind=Pass.GRAD_WEIGHT, check="freivalds", worker="w3", seat=2, finding="a wrong answer"
)


def ledger():
    found = Ledger(exact=False, not_covered=["gradients in the clear"], seats=SCHEME.seats)
    for event in (
        Masked(
            layer="a",
            what="input",
            examples=8,
            groups=2,
            features=10,
            nats=1e-3,
            by_coalition={(0,): 1e-4, (4,): 1e-3},
            paper=3e-3,
        ),
        Masked(layer="b", what="gradient", examples=8, groups=2, features=5, nats=1e-2),
        SentClear(layer="a", examples=8),
        Verified(layer="a", kind=Pass.FORWARD, check="parity"),
        Unchecked(layer="a", kind=Pass.GRAD_WEIGHT),
        Failed(layer="a", kind=Pass.FORWARD, check="parity"),
        LIE,
        Unexplained(layer="a", call=8, kind=Pass.FORWARD, check="freivalds"),
        Overflow(layer="a", kind=Pass.FORWARD),
        BoundRaised(layer="a", what="input", bound=2.0),
        Traffic(sent=100, received=50),
        Spent(total=3.0, waiting=1.0, workers=4.0),
        Missed(layer="a", worker="w1", reason="worker 1 (w1) failed: it did not answer in time."),
        Reseated(seat=1, worker="w4", reason=""),
        Resent(layer="a", seat=1, worker="w4"),
        DoneInEnclave(layer="a", kind=Pass.GRAD_WEIGHT, seat=1),
    ):
        found.record(event)
        found.record(event)
    return found


def test_the_summary_adds_up_and_is_plain_json():
    summary = ledger().summary()
    assert json.loads(json.dumps(summary)) == summary
    leakage = summary["leakage"]
    nats = 2 * (10 * 1e-3 + 5 * 1e-2)
    assert leakage["nats_per_example"] == pytest.approx(nats)
    assert leakage["bits_per_example"] == pytest.approx(nats / math.log(2))
    assert leakage["nats_in_all"] == pytest.approx(2 * nats)  # two virtual batches
    assert leakage["nats_per_scalar"] == 1e-2
    assert leakage["maskings"] == 4
    assert leakage["paper"] == {"theorem": 1, "nats_per_example": pytest.approx(2 * 10 * 3e-3)}
    assert leakage["worst_seats"] == {"seats": [4], "names": ["carrier of s"], "nats_per_example": pytest.approx(0.02)}
    assert [(row["layer"], row["what"], row["maskings"]) for row in leakage["layers"]] == [
        ("a", "input", 2),
        ("b", "gradient", 2),
        ("a", "gradient", 0),
    ]
    assert leakage["layers"][2]["batches_in_the_clear"] == 2
    assert summary["integrity"] == {
        "passed": {"forward": 2, "grad_input": 0, "grad_weight": 0},
        "unchecked": {"forward": 0, "grad_input": 0, "grad_weight": 2},
        "failed": 2,
        "blamed": [{**vars(LIE), "kind": "grad_weight"}] * 2,
        "unexplained": 2,
        "overflows": 2,
    }
    assert summary["traffic"] == {"sent_bytes": 200, "received_bytes": 100}
    assert summary["time"] == {"masking_seconds": 4.0, "waiting_seconds": 2.0, "worker_seconds": 8.0}


def test_it_names_liars_with_the_evidence():
    words = str(ledger())
    assert "w3 is out: a wrong answer (layer fc, call 7, grad_weight; found by freivalds)" in words
    assert "2 of the failed checks could be put down to nobody" in words


def test_it_says_who_failed_and_who_stood_in():
    found = ledger()
    assert found.summary()["faults"] == {
        "answers_missed": {"w1": 2},
        "latest_reasons": {"w1": "worker 1 (w1) failed: it did not answer in time."},
        "seats_changed": 2,
        "shares_resent": 2,
        "done_in_enclave": {"forward": 0, "grad_input": 0, "grad_weight": 2},
    }
    assert "2 answers missed, 2 shares sent again, 2 parts done in the enclave" in str(found)
    assert "worker 1 (w1) failed: it did not answer in time." in str(found)


def test_it_says_the_bound_in_several_ways_and_the_papers_beside_it():
    words = str(ledger())
    assert "at most 0.12 nats (0.173 bits) to any M workers about an example that was in every batch" in words
    assert "of one number in one masking at most 0.01 nats" in words
    assert "about all examples together at most 0.24 nats" in words
    assert "Theorem 1, which takes inputs for independent, would say 0.06 nats; we say 0.12" in words
    assert "most to carrier of s: at most 0.02 nats" in words


def test_more_colluders_have_the_other_theorem():
    found = Ledger(exact=False, not_covered=[], colluders=2)
    found.record(
        Masked(layer="a", what="input", examples=4, groups=2, features=1, nats=1e-3, by_coalition={(0, 3): 1e-3})
    )
    assert found.summary()["leakage"]["paper"]["theorem"] == 2
    assert "Theorem 2, whose condition is too weak" in str(found)
    assert "most to seat 0, seat 3" in str(found)


@pytest.mark.parametrize("exact", [True, False])
def test_it_says_what_is_left_of_the_budget(exact):
    found = Ledger(exact=exact, not_covered=[], budget=0.5)
    found.record(Masked(layer="a", what="input", examples=4, groups=2, features=5, nats=0.0 if exact else 0.01))
    left = 0.5 if exact else 0.45
    assert found.summary()["leakage"]["budget"] == {"nats": 0.5, "left": pytest.approx(left)}
    assert f"{0 if exact else 10} % of the budget of 0.5 nats used" in str(found)
    assert ledger().summary()["leakage"]["budget"] is None


@pytest.mark.parametrize("exact", [True, False])
def test_one_operator_with_everything_is_the_headline(exact):
    found = Ledger(exact=exact, not_covered=[], one_operator=True)
    assert found.leakage_in_words.startswith("EVERYTHING IS VISIBLE: insecure_one_operator=True")
    assert found.leakage_in_words in str(found)


def test_it_says_what_is_not_covered():
    found = ledger()
    assert found.not_covered[0] == "gradients in the clear"
    for line in found.not_covered:
        assert line in str(found)
        assert line in found.summary()["not_covered"]


def test_in_the_field_shares_leak_nothing():
    found = Ledger(exact=True, not_covered=[])
    found.record(Masked(layer="a", what="input", examples=8, groups=2, features=10, nats=0.0))
    assert found.leakage_in_words.startswith("0 nats")
    assert found.leakage_details == ()
    assert found.summary()["leakage"]["paper"] is None
    for visible in ("shapes", "number and timing of calls", "retries after overflow", "aggregate gradient"):
        assert visible in " ".join(found.not_covered)


@pytest.mark.parametrize("exact", [True, False])
def test_gradients_in_the_clear_are_in_the_headline(exact):
    found = Ledger(exact=exact, not_covered=[])
    found.record(SentClear(layer="a", examples=8))
    assert "1 batches of gradients in the clear, without any bound" in found.leakage_in_words
    assert found.leakage_in_words in str(found)
    assert found.summary()["leakage"]["batches_in_the_clear"] == 1


def test_without_workers_there_is_nothing_to_cover():
    found = Ledger(exact=True, not_covered=["gradients in the clear"], sends=False)
    assert "nothing was sent" in str(found)
    assert not found.not_covered


def test_an_unknown_event_is_refused():
    with pytest.raises(TypeError, match="does not know"):
        ledger().record("an event")
