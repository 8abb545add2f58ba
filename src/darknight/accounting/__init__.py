"""What leaks, in nats (the paper's theorems as written, and the bounds that hold), and the ledger of what happened."""

from darknight.accounting.events import (
    Blamed,
    BoundRaised,
    DoneInEnclave,
    Event,
    Failed,
    Masked,
    Missed,
    Overflow,
    Reseated,
    Resent,
    SentClear,
    Spent,
    Traffic,
    Unchecked,
    Unexplained,
    Verified,
)
from darknight.accounting.leakage import Dependence, coalition_bound, gaussian_information, worst_coalition
from darknight.accounting.ledger import ONE_OPERATOR, Ledger
from darknight.accounting.theorems import entropy, lemma_1, lemma_2, theorem_1, theorem_2

__all__ = [
    "ONE_OPERATOR",
    "Blamed",
    "BoundRaised",
    "Dependence",
    "DoneInEnclave",
    "Event",
    "Failed",
    "Ledger",
    "Masked",
    "Missed",
    "Overflow",
    "Reseated",
    "Resent",
    "SentClear",
    "Spent",
    "Traffic",
    "Unchecked",
    "Unexplained",
    "Verified",
    "coalition_bound",
    "entropy",
    "gaussian_information",
    "lemma_1",
    "lemma_2",
    "theorem_1",
    "theorem_2",
    "worst_coalition",
]
