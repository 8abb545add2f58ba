"""A carrier's seed opens its own noise row and no other; a derivation that is broken on purpose is found to open more.

The attacker has one seed, all of the code, and every row to compare with. It tries what mistakes in deriving keys make
possible: other places of the keystream, other stream numbers, keys that lead to each other by counting or hashing.
"""

import hashlib
from collections.abc import Iterator

import pytest
import torch

from darknight.coding import PRIME_25, PRIME_28, Scheme, draw_code, field
from darknight.randomness import Branch, Randomness, Stream, uniform_below
from darknight.types import Seed
from randomness.streams import generator

SCHEMES = {
    "one colluder": Scheme(inputs=3, colluders=1, spares=1),
    "two colluders": Scheme(inputs=3, colluders=2),
    "three colluders and a spare": Scheme(inputs=2, colluders=3, spares=1),
    "inference": Scheme(inputs=3, colluders=2).for_inference(),
    "gradients in the clear": Scheme(inputs=3, colluders=1, mask_gradients=False),
}
MASKINGS = 3
SHAPE = (2, 5)  # group, feature
STEPS = 40  # how far the attacker counts or hashes


def maskings(scheme: Scheme, owner: Randomness) -> tuple[list[torch.Tensor], list[tuple[int, Seed]]]:
    """All noise rows, and each seed that goes out with the number of the row that it is for."""
    rows, seeds = [], []
    for _ in range(MASKINGS):
        code = draw_code(scheme, owner.fresh())
        for mixing in code.masking:
            groups = torch.ones(SHAPE[0], mixing.inputs, *SHAPE[1:], dtype=torch.int32)
            shares = field.encode_shares(mixing, groups, code.prime, owner.fresh())
            noise, _ = field._noise(mixing, SHAPE, code.prime, owner.replay(owner._next - 1))
            assert shares.seeds.keys() == mixing.carriers.keys()
            for worker, seed in shares.seeds.items():
                assert torch.equal(shares[worker], noise[mixing.carriers[worker]])
                seeds.append((len(rows) + mixing.carriers[worker], seed))
            rows += noise
    return rows, seeds


def neighbours(key: bytes) -> Iterator[bytes]:
    """Keys that lead to each other in derivations that are none."""
    hashed, number = key, int.from_bytes(key, "big")
    for step in range(STEPS):
        yield hashed
        hashed = hashlib.sha256(hashed).digest()
        for other in (number + step, number - step, number ^ step):
            yield (other % (1 << 256)).to_bytes(32, "big")


def opened(seed: Seed, rows: list[torch.Tensor]) -> set[int]:
    """The rows that somebody with the seed can make."""
    found, size = set(), rows[0].numel()
    known = {tuple(row.flatten().tolist()): number for number, row in enumerate(rows)}
    for key in set(neighbours(seed.key)):
        for number in range(4 * MASKINGS):
            drawn = uniform_below(Stream(key, number), (4, size), seed.prime).tolist()
            found |= {known[tuple(row)] for row in drawn if tuple(row) in known}
    return found


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_seed_opens_its_own_row_of_its_own_masking_and_no_other(scheme):
    rows, seeds = maskings(scheme, generator("seeds"))
    assert len(seeds) == MASKINGS * scheme.colluders * (2 if scheme.sends_masked_gradients else 1)
    for number, seed in seeds:
        assert opened(seed, rows) == {number}


# --- broken on purpose ------------------------------------------------------------------------------------------------
class Broken(Branch):
    """A row whose key is not its own."""

    def __init__(self, key: bytes, source: Stream) -> None:
        super().__init__(key)
        self._source = source

    def words(self, count, dtype, out=None):
        return self._source.words(count, dtype, out)


FAMILY = bytes(range(32))


def a_place_in_the_enclaves_stream(stream: Stream, count: int) -> list[Branch]:
    """The rows of a masking one after another, and the key of everything as the seed."""
    return [Broken(FAMILY, stream) for _ in range(count)]


def one_key_for_a_masking(stream: Stream, count: int) -> list[Branch]:
    key = stream.words(4, torch.int64).numpy().tobytes()
    source = Stream(key, 0)
    return [Broken(key, source) for _ in range(count)]


def counted_keys(stream: Stream, count: int) -> list[Branch]:
    base = int.from_bytes(FAMILY, "big") + 4 * stream.number
    return [Branch((base + row).to_bytes(32, "big")) for row in range(count)]


def hashed_keys(stream: Stream, count: int) -> list[Branch]:
    """Each key is the hash of the one before: who has one has all that come later."""
    key = FAMILY
    for _ in range(4 * stream.number):
        key = hashlib.sha256(key).digest()
    keys = []
    for _ in range(count):
        key = hashlib.sha256(key).digest()
        keys.append(Branch(key))
    return keys


@pytest.mark.parametrize(
    "derivation", [a_place_in_the_enclaves_stream, one_key_for_a_masking, counted_keys, hashed_keys]
)
def test_a_broken_derivation_opens_more(derivation, monkeypatch):
    monkeypatch.setattr(Stream, "branches", derivation)
    rows, seeds = maskings(Scheme(inputs=3, colluders=2), Randomness(FAMILY))
    assert any(opened(seed, rows) - {number} for number, seed in seeds)


# --- which shares they stand for --------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_carriers_are_the_rows_of_one_noise_and_nothing_else(scheme):
    code, (K, M) = draw_code(scheme, generator("carriers").fresh()), (scheme.inputs, scheme.colluders)
    if code.masks_gradients:
        assert code.A.carriers == {K + M + m: m for m in range(M)}
        assert code.B.carriers == {K + m: m for m in range(M)}
    else:
        assert code.A.carriers == {K + m: m for m in range(M)}
        assert code.B.carriers == {}


@pytest.mark.parametrize("prime", [PRIME_25, PRIME_28])
def test_a_dense_code_has_no_carriers_and_gives_no_seeds(prime):
    owner = generator("dense seeds")
    for inputs in range(1, 6):
        scheme = Scheme(inputs=inputs, colluders=1, mixing="dense")
        mixing = draw_code(scheme, owner.fresh()).A
        shares = field.encode_shares(mixing, torch.ones(2, inputs, 3, dtype=torch.int32), prime, owner.fresh())
        assert (mixing.carriers, shares.seeds) == ({}, {})


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_shares_are_those_of_encode_however_they_are_made(scheme):
    owner = generator("seeded shares")
    for mixing in draw_code(scheme, owner.fresh()).masking:
        values = torch.randint(-50, 50, (2 * scheme.inputs - 1, 7)).float()
        stream = owner.fresh()
        number, prime = stream.number, scheme.arithmetic.prime
        shares, _ = field.encode_values(mixing, values, 0, None, largest=50, prime=prime, stream=stream)
        padded = torch.cat([values, torch.zeros(1, 7)]).to(torch.int32).view(2, scheme.inputs, 7)
        wanted = field.encode(mixing, padded, prime, owner.replay(number))
        assert torch.equal(torch.stack(list(shares)), wanted)
        assert torch.equal(torch.stack(list(field.encode_shares(mixing, padded, prime, owner.replay(number)))), wanted)
        for worker in range(mixing.workers):
            again = field.encode(mixing, padded, prime, owner.replay(number), rows=[worker])[0]
            assert torch.equal(again, shares[worker])
