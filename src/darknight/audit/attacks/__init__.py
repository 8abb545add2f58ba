"""The attacks, one module each, in the order in which the page shows them. Every module exports its ATTACK."""

from __future__ import annotations

from darknight.audit.attack import Attack
from darknight.audit.attacks import (
    averaging,
    coalitions,
    gradient_inversion,
    gradients_in_the_clear,
    holes,
    one_hand,
    one_share,
    predicted_masks,
)

ATTACKS: tuple[Attack, ...] = (
    one_share.ATTACK,
    averaging.ATTACK,
    coalitions.ATTACK,
    gradients_in_the_clear.ATTACK,
    gradient_inversion.ATTACK,
    one_hand.ATTACK,
    predicted_masks.ATTACK,
    holes.ATTACK,
)
