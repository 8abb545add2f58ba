"""Torch's generator is predicted from what was seen of it; ours is not."""

import numpy as np
import pytest
import torch

from darknight.audit.attacks.predicted_masks import predicted
from darknight.audit.twister import NEEDED, Twister, recovered, tempered, untempered
from darknight.coding import PRIME_25, PRIME_28
from darknight.errors import DataError
from darknight.randomness import Randomness, uniform_below


def drawn(prime, count, seed, skipped=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(prime, (skipped + count,), generator=generator)[skipped:].numpy()


def test_tempering_is_undone():
    words = np.random.default_rng(0).integers(0, 1 << 32, 10_000, dtype=np.uint32)
    assert np.array_equal(untempered(tempered(words)), words)
    assert not np.array_equal(tempered(words), words)


@pytest.mark.parametrize(("prime", "seed", "skipped"), [(PRIME_28, 7, 0), (PRIME_28, 8, 1001), (PRIME_25, 9, 623)])
def test_the_state_follows_from_what_was_seen(prime, seed, skipped):
    seen = drawn(prime, NEEDED + 3000, seed, skipped)
    twister, relations = recovered(seen[:NEEDED], prime)
    assert twister is not None
    assert relations == NEEDED // 2
    assert np.array_equal(twister.below(prime, 3000), seen[NEEDED:])


def test_one_wrong_output_fits_no_state():
    seen = drawn(PRIME_28, NEEDED, 3)
    seen[700] = (seen[700] + 1) % PRIME_28
    twister, relations = recovered(seen, PRIME_28)
    assert twister is None
    assert relations < NEEDED // 2


def test_our_masks_fit_no_state_and_are_not_predicted():
    masks = uniform_below(Randomness.from_operating_system().fresh(), (NEEDED + 5000,), PRIME_28)
    guessed, relations = predicted(masks[:NEEDED], PRIME_28, 5000)
    assert relations == 0
    assert int((guessed == masks[NEEDED:]).sum()) == 0
    control = torch.from_numpy(drawn(PRIME_28, NEEDED + 5000, 4))
    guessed, _ = predicted(control[:NEEDED], PRIME_28, 5000)
    assert torch.equal(guessed, control[NEEDED:])


def test_too_few_outputs_are_refused():
    with pytest.raises(DataError, match="1247 outputs"):
        recovered(drawn(PRIME_28, NEEDED - 1, 0), PRIME_28)


def test_a_twister_goes_on_however_it_is_asked():
    state = np.random.default_rng(1).integers(0, 1 << 32, NEEDED // 2, dtype=np.uint32)
    together = Twister(state).below(PRIME_28, 908)
    assert len(together) == 908
    assert np.array_equal(Twister(state).below(PRIME_28, 300), together[:300])
