"""Branches of a stream: keys that may be given away, each of which opens its own branch."""

import pytest
import torch

from darknight.errors import RandomnessError
from darknight.randomness import Branch, Stream, uniform_below
from randomness.streams import generator

WORDS = 64


def blocks(stream: Stream) -> set[bytes]:
    """The keystream, in the cipher's blocks."""
    content = stream.words(WORDS, torch.int64).numpy().tobytes()
    return {content[begin : begin + 16] for begin in range(0, len(content), 16)}


def test_the_keys_are_the_next_bytes_of_the_stream():
    owner = generator("branches")
    stream = owner.fresh()
    first, second = stream.branches(2)
    (third,) = stream.branches(1)
    content = owner.replay(stream.number).words(12, torch.int64).numpy().tobytes()
    assert (first.key, second.key, third.key) == (content[:32], content[32:64], content[64:])


def test_a_branch_is_the_keystream_of_its_key_from_the_start():
    (branch,) = generator("branches").fresh().branches(1)
    again = Branch(branch.key)
    assert torch.equal(branch.words(9, torch.int32), again.words(9, torch.int32))
    assert torch.equal(Stream(again.key, 0).words(9, torch.int32), Branch(again.key).words(9, torch.int32))


def test_a_replayed_stream_has_the_same_branches():
    owner = generator("branches")
    stream = owner.fresh()
    rows = [uniform_below(branch, (3, 5), 97) for branch in stream.branches(3)]
    again = [uniform_below(branch, (3, 5), 97) for branch in owner.replay(stream.number).branches(3)]
    assert torch.equal(torch.stack(rows), torch.stack(again))


def test_no_block_of_keystream_comes_twice_and_no_key_is_in_one():
    owner = generator("branches/apart")
    streams = [owner.fresh() for _ in range(4)]
    branches = [branch for stream in streams for branch in stream.branches(3)]
    keys = {branch.key for branch in branches}
    assert len(keys) == len(branches)
    seen = [*map(blocks, branches), *(blocks(owner.replay(stream.number)) for stream in streams)]
    rest = [blocks(owner.fresh()) for _ in range(3)]  # what checks are weighed with
    everything = [*seen, *rest]
    assert sum(map(len, everything)) == len(set().union(*everything)) == len(everything) * WORDS // 2
    halves = {key[begin : begin + 16] for key in keys for begin in (0, 16)}
    assert not halves & set().union(*map(blocks, map(Branch, keys)))


def test_a_branch_is_secret_and_stays_in_its_process(monkeypatch):
    (branch,) = generator("branches").fresh().branches(1)
    assert branch.key.hex() not in repr(branch)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(RandomnessError, match="forked"):
        branch.words(1, torch.int32)
