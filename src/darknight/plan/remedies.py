"""What would make an impossible request possible: changes that were tried, and are enough."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from darknight.errors import PlanError, SchemeError
from darknight.plan.choice import candidates, choose
from darknight.plan.layers import Network
from darknight.plan.leakage import most_noise, nats_of, nats_per_sending, rounded_up
from darknight.plan.request import Request

_MOST_COLLUDERS = 8  # that advice goes up to
_MOST_TRIES = 4  # of one kind of change, each a search of its own
_ROOM = (1.0, 1.01, 1.05, 1.2)  # for the noise, which is rounded too


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change, in words, and the request with it."""

    words: str
    request: Request


def impossible(request: Request, network: Network, refusals: Sequence[SchemeError]) -> PlanError:
    """The error for a request that nothing meets: why, and what would help."""
    reachable = _least_leakage(request, network)
    found = _enough(request, network, reachable)
    if not found and request.arithmetic != "field":  # two obstacles: the noise, and something else
        in_field = _enough(replace(request, arithmetic="field"), network, None)
        found = [replace(each, words=f"arithmetic=field and {each.words}") for each in in_field]
    offers = "; or with ".join(remedy.words for remedy in found)
    offer = f"It is possible with {offers}." if found else "Lower colluders and spares, and use the field."
    return PlanError(f"{_reason(request, refusals, reachable)} {offer}", remedies=tuple(found))


def _reason(request: Request, refusals: Sequence[SchemeError], reachable: float | None) -> str:
    usable, least, workers = request.usable_workers, request.least_workers, len(request.operators)
    if usable < least:
        hands = f", of which {usable} can be used, at most {request.colluders} of one operator" * (usable < workers)
        return (
            f"{_count(workers, 'worker')}{hands}; {'training' if request.training else 'inference'} with "
            f"colluders={request.colluders} and spares={request.least_spares} needs {least} or more."
        )
    if reachable is not None:
        return (
            f"a leakage target of {request.leakage_target:g} nats; with the most noise that float64 carries, an "
            f"example leaks up to {reachable:.3g}."
        )
    return str(refusals[0])


def _enough(request: Request, network: Network, reachable: float | None) -> list[Remedy]:
    """Of every kind of change the smallest that is enough by itself, if there is one."""
    kinds = [
        _more_workers(request),
        _more_operators(request),
        _fewer_colluders(request),
        _more_colluders(request),
        _fewer_spares(request),
        _more_spares(request),
        _field(request),
    ]
    if reachable is not None:
        kinds += [_larger_target(request, reachable), _fewer_epochs(request, reachable)]
    found = (_first(changes, network) for changes in kinds)
    return [remedy for remedy in found if remedy is not None]


def _first(changes: Iterator[Remedy], network: Network) -> Remedy | None:
    tries = 0
    for remedy in changes:
        if remedy.request.usable_workers >= remedy.request.least_workers:  # else there is nothing to try
            if choose(remedy.request, network, most=1).safe:
                return remedy
            tries += 1
            if tries == _MOST_TRIES:
                break
    return None


# --- changes, the smallest first ------------------------------------------------------------------------------------
def _more_workers(request: Request) -> Iterator[Remedy]:
    missing = max(1, request.least_workers - request.usable_workers)
    for count in range(missing, missing + _MOST_TRIES):
        hands = "an operator of its own" if count == 1 else "operators of their own"
        others = tuple(f"another {len(request.operators) + place}" for place in range(count))
        yield Remedy(
            words=f"{_count(count, 'more worker')} of {hands}",
            request=replace(request, operators=(*request.operators, *others)),
        )


def _more_operators(request: Request) -> Iterator[Remedy]:
    """The same number of workers in more hands."""
    workers = len(request.operators)
    for count in range(len(set(request.operators)) + 1, workers + 1):
        hands = tuple(f"operator {place % count}" for place in range(workers))
        yield Remedy(
            words=f"the same {workers} workers spread over {count} operators",
            request=replace(request, operators=hands),
        )


def _fewer_colluders(request: Request) -> Iterator[Remedy]:
    for count in range(request.colluders - 1, 0, -1):
        yield Remedy(words=f"colluders={count}", request=replace(request, colluders=count))


def _more_colluders(request: Request) -> Iterator[Remedy]:
    """Where operators have several workers, more of them can be used."""
    for count in range(request.colluders + 1, _MOST_COLLUDERS + 1):
        yield Remedy(words=f"colluders={count}", request=replace(request, colluders=count))


def _fewer_spares(request: Request) -> Iterator[Remedy]:
    for count in range(request.least_spares - 1, request.needed_spares - 1, -1):
        yield Remedy(words=f"spares={count}", request=replace(request, spares=count))


def _more_spares(request: Request) -> Iterator[Remedy]:
    """Where parity needs them."""
    if request.least_spares < request.needed_spares:
        count = request.needed_spares
        yield Remedy(words=f"spares={count}", request=replace(request, spares=count))


def _field(request: Request) -> Iterator[Remedy]:
    if request.arithmetic != "field":
        yield Remedy(words="arithmetic=field", request=replace(request, arithmetic="field"))


def _larger_target(request: Request, reachable: float) -> Iterator[Remedy]:
    for room in _ROOM:
        target = rounded_up(room * reachable, digits=3)
        yield Remedy(words=f"a leakage target of {target:g}", request=replace(request, leakage_target=target))


def _fewer_epochs(request: Request, reachable: float) -> Iterator[Remedy]:
    for room in _ROOM:
        epochs = int((request.leakage_target or 0.0) / (room * reachable / request.epochs))
        if 1 <= epochs < request.epochs:
            yield Remedy(words=f"epochs={epochs}", request=replace(request, epochs=epochs))


def _least_leakage(request: Request, network: Network) -> float | None:
    """Of one example over the run, with the most noise that any scheme takes; None if the target is no obstacle."""
    target = request.leakage_target
    if request.arithmetic == "field" or target is None:
        return None
    found = [
        request.epochs * nats_per_sending(network.under(candidate.sharing), nats_of(candidate.code(), noise))
        for candidate in candidates(replace(request, arithmetic="real", spares=request.least_spares))
        if (noise := most_noise(candidate)) is not None
    ]
    least = min(found, default=0.0)
    return least if least > target else None


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s'[: number != 1]}"
