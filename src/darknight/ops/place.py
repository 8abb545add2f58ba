"""Where a product is computed: by workers on masked shares, or in the enclave, because that costs the enclave less.

Keeping a layer is never against privacy: nobody sees anything of it. It is computed in float32 then, and not in the
scheme's arithmetic, so the choice decides results in their last digits. Therefore it is by structure unless somebody
asks for more, which is the same on every machine and in every run; and a choice by measured costs is remembered with
the state of the runtime (docs/adr/0018).

STRUCTURE   depthwise convolutions stay, all others are sent
COST        each goes where it costs the enclave less, for batches of a known shape at known rates
WORKERS     all are sent
"""

from __future__ import annotations

from collections.abc import Iterable

from darknight.errors import UsageError
from darknight.ops.cost import Form, Rates, Sharing, alone_seconds, sent_seconds
from darknight.ops.op import BilinearOp, Shape

STRUCTURE, COST, WORKERS = "structure", "cost", "workers"
PLACES = (STRUCTURE, COST, WORKERS)

DEPTHWISE = "depthwise: cheaper to compute than to mask and check"


def check_place(place: str) -> None:
    if place not in PLACES:
        raise UsageError(f"place {place!r}; use one of {', '.join(PLACES)}.")


def stays_by_structure(op: BilinearOp, w_shape: Shape) -> str:
    """Why a product stays in the enclave whatever its batch is; empty if it is sent.

    A depthwise convolution has one input channel in each group: a few multiplications for every number, and a check
    that folds every group apart.

    >>> from darknight.ops import Conv
    >>> stays_by_structure(Conv.make((3, 3), groups=6), (6, 1, 3, 3))
    'depthwise: cheaper to compute than to mask and check'
    >>> stays_by_structure(Conv.make((3, 3), groups=3), (6, 2, 3, 3))
    ''
    """
    depthwise = op.groups > 1 and op.channels(w_shape)[1] == op.groups
    return DEPTHWISE if depthwise else ""


def stays_by_cost(calls: Iterable[Form], sharing: Sharing, rates: Rates) -> str:
    """Why a product that is called like this in a step stays in the enclave; empty if sending it costs less."""
    calls = tuple(calls)
    alone = sum(alone_seconds(form, rates, training=sharing.training) for form in calls)
    sent = sum(sent_seconds(form, sharing, rates) for form in calls)
    if not calls or alone > sent:
        return ""
    return f"cheaper to compute ({_words(alone)} a step) than to mask and check ({_words(sent)})"


def _words(seconds: float) -> str:
    """Two digits: more would only say how noisy a measurement is."""
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"
