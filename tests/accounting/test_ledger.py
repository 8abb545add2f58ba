"""The ledger adds up, says so in words, and refuses what it does not know."""

import json

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
from darknight.types import Pass

LIE = Blamed(
    layer="fc", call=7, kind=Pass.GRAD_WEIGHT, check="freivalds", worker="w3", seat=2, finding="a wrong answer"
)


def ledger():
    found = Ledger(exact=False, not_covered=["gradients in the clear"])
    for event in (
        Masked(layer="a", what="input", examples=8, features=10, nats=1e-3),
        Masked(layer="b", what="gradient", examples=8, features=5, nats=1e-2),
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
    assert summary["leakage"]["nats_per_example"] == pytest.approx(2 * (10 * 1e-3 + 5 * 1e-2))
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
    assert Ledger(exact=True, not_covered=[]).leakage_in_words.startswith("0 nats")


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
