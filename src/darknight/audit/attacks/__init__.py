"""The attacks, one module each, in the order in which the page shows them. Every module exports its ATTACK."""

from __future__ import annotations

from darknight.audit.attack import Attack

ATTACKS: tuple[Attack, ...] = ()
