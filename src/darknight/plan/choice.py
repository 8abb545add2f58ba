"""Which scheme to take: all that the fleet has workers for, the cheapest first, and the first of them that is safe.

The objective is money if there are prices, else wall time; between equals, fewer workers. Schemes are constructed in
that order: one that is unsafe or cannot be done raises SchemeError and is passed over. Spares are those asked for, or
as many as pay: they save second rounds where answers are missing (plan.misses), cost shares, and make nothing possible.
Workers that are left stand by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from darknight.coding import Scheme
from darknight.errors import SchemeError
from darknight.plan.candidate import Candidate
from darknight.plan.costs import Seconds, money, run_seconds
from darknight.plan.layers import Network
from darknight.plan.leakage import least_noise
from darknight.plan.request import Request

_MOST_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A candidate with its scheme, and what the run takes of time and, if there are prices, money."""

    candidate: Candidate
    scheme: Scheme
    seconds: Seconds
    money: float | None


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Safe ones, the best first and only some of the others; why better ones were refused; how many there were."""

    safe: tuple[Choice, ...]
    refusals: tuple[SchemeError, ...]
    considered: int


def choose(request: Request, network: Network, most: int = _MOST_SHOWN) -> Choices:
    """Up to `most` safe choices; none if nothing meets the request."""
    ordered = sorted(_priced(request, network), key=lambda entry: entry[0])
    safe: list[Choice] = []
    refusals: list[SchemeError] = []
    impossible: dict[tuple[int, bool], int] = {}  # by inputs and arithmetic, the fewest spares that were refused
    for _, candidate, seconds, cost in ordered:
        if len(safe) == most:
            break
        kind = (candidate.inputs, candidate.exact)
        if candidate.spares >= impossible.get(kind, candidate.spares + 1):
            continue
        try:
            scheme = _scheme(candidate, request, network)
        except SchemeError as error:
            refusals.append(error)
            impossible[kind] = candidate.spares
        else:
            safe.append(Choice(candidate=candidate, scheme=scheme, seconds=seconds, money=cost))
    return Choices(safe=tuple(safe), refusals=tuple(refusals), considered=len(ordered))


def candidates(request: Request) -> Iterator[Candidate]:
    """All that the fleet has workers for. The field leaks nothing: it is taken where no target asks to compare."""
    compared = (True, False) if request.leakage_target else (True,)
    arithmetics = {"field": (True,), "real": (False,), "auto": compared}[request.arithmetic]
    most = min(
        request.batch_size,
        request.max_inputs or request.batch_size,
        request.usable_workers - request.least_workers + 1,
    )
    for exact, inputs, spares in product(arithmetics, range(1, most + 1), request.spares_to_compare):
        candidate = Candidate(
            inputs=inputs,
            colluders=request.colluders,
            spares=spares,
            exact=exact,
            training=request.training,
            integrity=request.integrity,
        )
        if candidate.workers <= request.usable_workers:
            yield candidate


Priced = tuple[tuple[float, int, bool], Candidate, Seconds, float | None]


def _priced(request: Request, network: Network) -> Iterator[Priced]:
    """Candidates with their place in the order."""
    for candidate in candidates(request):
        seconds = run_seconds(network.under(candidate.sharing), candidate, request)
        cost = None if request.prices is None else money(seconds, candidate.workers, request.prices)
        objective = seconds.total if cost is None else cost
        yield (objective, candidate.workers, not candidate.exact), candidate, seconds, cost


def _scheme(candidate: Candidate, request: Request, network: Network) -> Scheme:
    if candidate.exact:
        return candidate.scheme()
    if not request.leakage_target:
        raise SchemeError("noise of any size leaks something, and the leakage target is 0 nats.")
    placed = network.under(candidate.sharing)
    return candidate.scheme(least_noise(placed, candidate, request.epochs, request.leakage_target))
