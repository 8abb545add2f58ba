"""The whole audit: every attack on one scene, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from darknight import __version__
from darknight.audit.attack import Attack
from darknight.audit.finding import Finding, Must, Outcome
from darknight.audit.scene import Scene


@dataclass(frozen=True, kw_only=True)
class Attacked:
    """One attack, what it found, and how long it took."""

    attack: Attack
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def as_it_must(self) -> bool:
        return all(finding.as_it_must for finding in self.findings)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The outcome of all attacks. data: the name of the examples, of which `examples` were used, of `shape`."""

    data: str
    examples: int
    shape: tuple[int, ...]
    model: str
    quick: bool
    seed: int
    attacks: tuple[Attacked, ...]
    seconds: float

    @property
    def surprises(self) -> tuple[tuple[Attack, Finding], ...]:
        """Everything that did not end as it must."""
        return tuple(
            (each.attack, finding) for each in self.attacks for finding in each.findings if not finding.as_it_must
        )

    @property
    def passed(self) -> bool:
        return not self.surprises

    def summary(self) -> dict[str, Any]:
        """Everything but the pictures, as plain values for a JSON object."""
        return {
            "version": __version__,
            "passed": self.passed,
            "settings": {
                "data": self.data,
                "examples": self.examples,
                "shape": list(self.shape),
                "model": self.model,
                "quick": self.quick,
                "seed": self.seed,
            },
            "seconds": self.seconds,
            "attacks": [
                {
                    "key": each.attack.key,
                    "title": each.attack.title,
                    "question": each.attack.question,
                    "how": each.attack.how,
                    "what_to_do": each.attack.what_to_do,
                    "as_it_must": each.as_it_must,
                    "seconds": each.seconds,
                    "findings": [_words(finding) for finding in each.findings],
                }
                for each in self.attacks
            ],
        }


def run_audit(
    scene: Scene, attacks: Sequence[Attack], *, started: Callable[[Attack], None] = lambda attack: None
) -> Audit:
    """Run the attacks one after another. They share the recorded trainings of the scene."""
    begin = time.perf_counter()
    done = []
    for attack in attacks:
        started(attack)
        since = time.perf_counter()
        findings = tuple(attack.run(scene))
        if not findings:
            raise ValueError(f"the attack {attack.key} found nothing, not even that it fails.")
        done.append(Attacked(attack=attack, findings=findings, seconds=time.perf_counter() - since))
    return Audit(
        data=scene.data.name,
        examples=len(scene.images),
        shape=scene.shape,
        model=scene.model_name,
        quick=scene.quick,
        seed=scene.seed,
        attacks=tuple(done),
        seconds=time.perf_counter() - begin,
    )


def verdict(finding: Finding) -> str:
    """In words, for tables.

    >>> verdict_of(Must.FAIL, Outcome.FAILED), verdict_of(Must.FAIL, Outcome.SUCCEEDED)
    ('failed, as it must', 'succeeded, and must fail')
    """
    return verdict_of(finding.must, finding.outcome)


def verdict_of(must: Must, outcome: Outcome) -> str:
    if must is Must.SHOW:
        return "shown"
    expected = Outcome.FAILED if must is Must.FAIL else Outcome.SUCCEEDED
    return f"{outcome}, as it must" if outcome is expected else f"{outcome}, and {must}"


def _words(finding: Finding) -> dict[str, Any]:
    return {
        "target": finding.target,
        "must": finding.must.value,
        "control": finding.control,
        "measure": finding.measure,
        "value": finding.value,
        "low": finding.low,
        "high": finding.high,
        "guessing": finding.guessing,
        "guessing_inside": finding.guessing_inside,
        "threshold": finding.threshold,
        "outcome": finding.outcome.value,
        "as_it_must": finding.as_it_must,
        "words": finding.words,
        "details": dict(finding.details),
    }
