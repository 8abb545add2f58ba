"""What leaks, in nats, and the ledger of what happened.

theorems       the paper's lemmas and theorems as written
leakage        the bounds that hold, for one masking
events         what happens in a layer call
accountant     bounds added up, by layer and by coalition
budget         what is refused before it is sent
ledger         everything that happened, in numbers and in words
"""

from darknight.accounting.accountant import Account, Accountant
from darknight.accounting.budget import Budget, check_budget
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
from darknight.accounting.leakage import (
    Dependence,
    coalition_bound,
    coalition_bounds,
    gaussian_information,
    in_bits,
    worst_coalition,
)
from darknight.accounting.ledger import ONE_OPERATOR, Ledger
from darknight.accounting.theorems import entropy, lemma_1, lemma_2, papers_bound, theorem_1, theorem_2

__all__ = [
    "ONE_OPERATOR",
    "Account",
    "Accountant",
    "Blamed",
    "BoundRaised",
    "Budget",
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
    "check_budget",
    "coalition_bound",
    "coalition_bounds",
    "entropy",
    "gaussian_information",
    "in_bits",
    "lemma_1",
    "lemma_2",
    "papers_bound",
    "theorem_1",
    "theorem_2",
    "worst_coalition",
]
