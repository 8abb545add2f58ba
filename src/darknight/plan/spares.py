"""How many spares the choice has, and why, in words."""

from __future__ import annotations

from dataclasses import dataclass, replace

from darknight.plan.choice import Choice, choose
from darknight.plan.layers import Network
from darknight.plan.request import Request


@dataclass(frozen=True, kw_only=True)
class Spares:
    """count: of the scheme. others: the best that one fewer, or one more, could do; nothing if there is no choice."""

    count: int
    reason: str
    others: tuple[Choice, ...] = ()


def explained(request: Request, network: Network, best: Choice) -> Spares:
    count = best.candidate.spares
    others = () if request.spares is not None else tuple(_others(request, network, count))
    return Spares(count=count, reason=_reason(request, count, others), others=others)


def _others(request: Request, network: Network, count: int) -> list[Choice]:
    numbers = [number for number in (count - 1, count + 1) if number in request.spares_to_compare]
    found = [choose(replace(request, spares=number), network, most=1).safe for number in numbers]
    return [safe[0] for safe in found if safe]


def _reason(request: Request, count: int, others: tuple[Choice, ...]) -> str:
    if request.spares is not None:
        return "as asked for"
    if request.parity:
        needed = "parity compares redundant answers, and has none without it" if count else "parity needs none"
        return f"{needed}; it wants every answer, so more would save nothing"
    if not request.unreliable:
        return "no answer is expected to be missing"
    if request.usable_workers == request.least_workers:
        return f"no worker is left: a single input needs all {request.usable_workers} that can be used"
    if not count and not others:
        return "no scheme with one is safe"
    missing = f"with {request.unreliable:g} of all answers missing"
    if count:
        return f"{missing}, the second rounds that they save cost more than they do"
    return f"{missing}, one would cost more than the second rounds that it saves"
