"""The learning rate of every step. It depends on the number of the step alone, so a resumed training needs no state.

Cosine: Loshchilov and Hutter (2017), without restarts. One-cycle: Smith and Topin (2018), both halves cosines.
"""

from __future__ import annotations

import math

from darknight.errors import UsageError
from darknight.train.recipe import Recipe

_RISE = 0.3  # of one cycle
_START, _END = 25.0, 2.5e5  # the peak is so many times the first and the last rate


def learning_rate_at(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The rate of the step number `step`, counted from 0.

    >>> recipe = Recipe(epochs=2, batch_size=1, learning_rate=1.0, schedule="cosine")
    >>> [round(learning_rate_at(recipe, step, 2), 3) for step in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    if step < 0 or steps_per_epoch < 1:
        raise UsageError(f"step {step} of {steps_per_epoch} an epoch; needs at least 0, and at least 1 an epoch.")
    warmup, total = recipe.warmup_epochs * steps_per_epoch, recipe.epochs * steps_per_epoch
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    match recipe.schedule:
        case "cosine":
            factor = _fall(1.0, 0.0, (step - warmup) / (total - warmup))
        case "step":
            factor = recipe.step_factor ** (step // steps_per_epoch // recipe.step_epochs)
        case "one-cycle":
            factor = _one_cycle(step / max(1, total - 1))
        case _:
            factor = 1.0
    return recipe.learning_rate * factor


def _one_cycle(share: float) -> float:
    """share: of the whole training, from 0 to 1."""
    if share < _RISE:
        return _fall(1 / _START, 1.0, share / _RISE)
    return _fall(1.0, 1 / _END, (share - _RISE) / (1 - _RISE))


def _fall(begin: float, end: float, share: float) -> float:
    """From `begin` to `end` along half a wave of a cosine."""
    return end + (begin - end) * (1 + math.cos(math.pi * min(share, 1.0))) / 2
