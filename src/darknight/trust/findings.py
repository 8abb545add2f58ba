"""What a judgement consists of: one finding for each check, and notes on what was not checked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check: its name in one word, whether it holds, and why in plain words."""

    check: str
    holds: bool
    words: str


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the verifier of one vendor found out.

    status: the TCB status by Intel's collateral; AMD publishes none. tcb: the security versions, in words. chip: what
    identifies the machine. notes: what is accepted, or was not looked at, and should be known.
    """

    findings: tuple[Finding, ...]
    status: str | None = None
    advisories: tuple[str, ...] = ()
    tcb: str | None = None
    chip: bytes | None = None
    notes: tuple[str, ...] = ()


def holds(check: str, words: str) -> Finding:
    return Finding(check=check, holds=True, words=words)


def fails(check: str, words: str) -> Finding:
    return Finding(check=check, holds=False, words=words)
