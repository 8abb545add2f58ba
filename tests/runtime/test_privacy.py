"""What a worker of a real training run received says nothing about the data; and would, if the masking were broken."""

from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import darknight as dk
from darknight.coding import field
from darknight.runtime import crew
from darknight.types import Forget
from fleet.threads import thread_fleet
from fleet.workers import eventually

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEME = dk.Scheme(inputs=4, colluders=1)


def transcripts(scheme, data, steps=3):
    """Everything that each worker received while a small network trained on `data`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4 * 36, 3))
    with thread_fleet(scheme, record=True) as fleet, dk.Runtime(scheme, fleet) as runtime:
        dk.protect_(model, runtime)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data), torch.arange(len(data)) % 3).backward()
            optimizer.step()
        return [fleet.transcript(j) for j in range(scheme.workers)]


def shares(records, kind, layer="0"):
    return [record.tensor for record in records if record.kind == kind and record.layer == layer]


def uniformity(tensors, prime) -> float:
    """The p-value of a chi-square test over 64 equal ranges of the field."""
    values = torch.cat([tensor.flatten() for tensor in tensors]).double().div(prime).mul(64).long()
    return float(stats.chisquare(np.bincount(values.numpy(), minlength=64)).pvalue)


@pytest.mark.parametrize("kind", ["forward.share", "backward.share"])
def test_every_workers_shares_are_uniform_whatever_the_data(kind):
    for data in (torch.zeros(24, 1, 8, 8), torch.full((24, 1, 8, 8), 7.5)):
        for records in transcripts(SCHEME, data):
            assert uniformity(shares(records, kind), SCHEME.arithmetic.prime) > 1e-6


def test_shares_without_noise_would_be_noticed(monkeypatch):
    monkeypatch.setattr(
        field,
        "_noise",
        lambda mixing, shape, prime, stream: (torch.zeros(mixing.colluders, *shape, dtype=torch.int32), {}),
    )
    records = transcripts(SCHEME, torch.full((24, 1, 8, 8), 7.5))[0]
    assert uniformity(shares(records, "forward.share"), SCHEME.arithmetic.prime) < 1e-12
    assert uniformity(shares(records, "backward.share"), SCHEME.arithmetic.prime) < 1e-12


def test_no_noise_is_used_twice():
    """The same batch, sent three times: every sending looks different, in every worker and both ways."""
    for records in transcripts(SCHEME, torch.ones(8, 1, 8, 8)):
        for kind in ("forward.share", "backward.share"):
            sent = shares(records, kind)
            assert len(sent) == 3
            assert all(not torch.equal(a, b) for i, a in enumerate(sent) for b in sent[i + 1 :])
            differences = [(a.long() - b.long()).remainder(SCHEME.arithmetic.prime) for a, b in pairwise(sent)]
            assert uniformity(differences, SCHEME.arithmetic.prime) > 1e-6


def test_reused_noise_would_be_noticed(monkeypatch):
    fixed = {}

    def once(mixing, shape, prime, stream):
        drawn = torch.randint(0, prime, (mixing.colluders, *shape), dtype=torch.int32)
        return fixed.setdefault((mixing.colluders, shape, prime), drawn), {}

    monkeypatch.setattr(field, "_noise", once)
    sent = shares(transcripts(SCHEME, torch.ones(8, 1, 8, 8))[0], "forward.share")
    assert torch.equal(sent[0], sent[1])


def test_a_transcript_is_complete():
    """Each message that carries a tensor is there once, in order, with what the worker answered."""
    records = transcripts(SCHEME, torch.randn(8, 1, 8, 8), steps=2)
    for number, transcript in enumerate(records):
        kinds = [record.kind for record in transcript if record.layer == "0"]
        computes = number != 4  # the carrier of s keeps its share for the weight gradient, and computes no forward
        forward = ["forward.share", "forward.reply"] if computes else ["forward.share"]
        assert kinds == ["weights", *forward, "backward.share", "grad_weight.reply"] * 2
        last = [record.kind for record in transcript if record.layer == "3"]
        assert last.count("grad_input.reply") == (0 if number == 5 else 2)  # the carrier of r is not needed there
        assert all(isinstance(record.tensor, torch.Tensor) for record in transcript)
        by_call = {record.call for record in transcript if record.kind == "forward.share"}
        assert {record.call for record in transcript if record.kind == "backward.share"} == by_call


def test_all_transcripts_together_hold_the_data():
    """They are what was really sent: with all shares in one hand the masking comes off."""
    data = torch.randn(4, 1, 8, 8)
    records = transcripts(SCHEME, data, steps=1)
    prime = SCHEME.arithmetic.prime
    carried = [shares(transcript, "forward.share")[0].long() for transcript in records]
    opened = (carried[1] - carried[5] + prime // 2).remainder(prime) - prime // 2  # x_1 + r, and r
    correlation = np.corrcoef(opened[0].flatten(), data[1].flatten())[0, 1]
    assert correlation > 0.999


def test_sizes_and_order_of_messages_do_not_depend_on_the_data():
    def outline(data):
        return [
            [(r.layer, r.kind, r.call, tuple(r.tensor.shape), r.tensor.dtype) for r in transcript]
            for transcript in transcripts(SCHEME, data)
        ]

    # Weights are sent when they changed, so both runs must change them: that much is public.
    assert outline(torch.randn(10, 1, 8, 8)) == outline(torch.ones(10, 1, 8, 8).cumsum(0))


def test_gradients_in_the_clear_are_what_they_say():
    scheme = dk.Scheme(inputs=4, colluders=1, mask_gradients=False)
    record = next(r for r in transcripts(scheme, torch.randn(8, 1, 8, 8), 1)[0] if r.kind == "backward.share")
    assert record.tensor.shape[:2] == (2, 4)  # (group, input, ...): the labels can be read off
    assert record.detail["row"] is not None
    signs = torch.where(record.tensor > scheme.arithmetic.prime // 2, -1, record.tensor.sign())
    labels = (torch.arange(8) % 3).view(2, 4)
    assert torch.equal(signs.argmin(-1), labels)


@contextmanager
def told_to_forget(model):
    """A protected model, its runtime, and what worker 0 is told to forget: calls and weights, a pair each time."""
    with thread_fleet(SCHEME) as fleet, dk.Runtime(SCHEME, fleet) as runtime:
        dk.protect_(model, runtime)
        told, post = [], fleet.post

        def watched(worker, message):
            if worker == 0 and isinstance(message, Forget):
                told.append((message.calls, message.weights))
            post(worker, message)

        fleet.post = watched
        yield runtime, told


def test_workers_forget_a_call_when_its_graph_is_gone(monkeypatch):
    monkeypatch.setattr(crew, "WORTH", 0)
    model = nn.Linear(5, 3)
    with told_to_forget(model) as (_, told):
        for _ in range(4):
            model(torch.randn(8, 5)).sum().backward()
        with torch.no_grad():
            model(torch.randn(8, 5))
    # The numbers between are of gradients; the last call was never kept.
    assert [call for calls, _ in told for call in calls] == [1, 3, 5, 7]


@pytest.mark.parametrize("limit", ["WORTH", "MANY"])
def test_workers_are_told_together_what_to_forget(limit, monkeypatch):
    """In each step a call is over, with shares of 40 bytes, and by the next forward pass weights of 60."""
    monkeypatch.setattr(crew, limit, {"WORTH": 200, "MANY": 4}[limit])
    model = nn.Linear(5, 3)
    with told_to_forget(model) as (runtime, told):
        monkeypatch.setattr(runtime, "tidy", lambda: None)  # the fleet asks for it four times a second
        for step in range(6):
            model(torch.randn(8, 5)).sum().backward()
            model.weight.data.sub_(0.1)
            assert len(told) == (step >= 2) + (step >= 4)
        assert told == [((1, 3), (("", 1), ("", 2))), ((5, 7), (("", 3), ("", 4)))]


def test_between_two_steps_workers_are_told_all_that_is_over():
    model = nn.Linear(5, 3)
    with told_to_forget(model) as (_, told):
        model(torch.randn(8, 5)).sum().backward()
        assert eventually(lambda: told, 60)
    assert told == [((1,), ())]
