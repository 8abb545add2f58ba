"""Small scenes and findings for tests of the audit."""

import torch

from darknight.audit import Attack, Finding, Must, Scene
from darknight.data import read_dataset


def digits_scene(**settings) -> Scene:
    return Scene(read_dataset("digits", seed=0), **{"quick": True, **settings})


def finding(**changes) -> Finding:
    """A finding of an attack that failed, as it must."""
    plain = {
        "target": "the default scheme",
        "must": Must.FAIL,
        "control": False,
        "measure": "correlation",
        "value": 0.01,
        "low": -0.02,
        "high": 0.04,
        "guessing": 0.0,
        "threshold": 0.2,
        "words": "Nothing was found.",
    }
    return Finding(**{**plain, **changes})


def broken(**changes) -> Finding:
    """A finding of a control that succeeded, as it must."""
    plain = {"target": "control: no noise", "must": Must.SUCCEED, "control": True, "value": 0.9, "low": 0.8, "high": 1}
    return finding(**{**plain, **changes})


def attack(*findings, key="probe") -> Attack:
    return Attack(
        key=key,
        title=f"The {key}",
        question="Can it be seen?",
        how="It looks. Then it counts.",
        what_to_do="Nothing.",
        run=lambda scene: findings,
    )


def smooth_images(count, *shape, seed=0):
    """Images in which neighbouring pixels are alike, as in photographs."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, shape[0], 3, 4, generator=generator)
    return torch.nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear")
