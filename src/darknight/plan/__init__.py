"""Choosing a scheme for a model, a fleet and a target, and saying what it takes: bytes, flops, memory, time, money.

request      what is asked for: work, fleet, target, prices, speeds
layers       what the network does in a step, counted on the meta device
candidate    one scheme that might do
traffic, flops, memory   what it takes, counted as the runtime and the workers do it
misses       what answers that go missing cost, and so what a spare is worth
costs        seconds and money: estimates
leakage      nats, and the least noise for a target
choice       the cheapest candidate that is safe
spares       why it has so many of them
remedies     if there is none: what would make it possible
plan         the result
"""

from darknight.plan.candidate import Candidate
from darknight.plan.choice import Choice
from darknight.plan.layers import ENCLAVE, MASKED, Operation
from darknight.plan.memory import Memory
from darknight.plan.plan import LayerPlan, Plan, Totals, make_plan
from darknight.plan.remedies import Remedy
from darknight.plan.request import ARITHMETICS, INTEGRITIES, Prices, Request, Speeds
from darknight.plan.spares import Spares
from darknight.plan.traffic import Traffic

__all__ = [
    "ARITHMETICS",
    "ENCLAVE",
    "INTEGRITIES",
    "MASKED",
    "Candidate",
    "Choice",
    "LayerPlan",
    "Memory",
    "Operation",
    "Plan",
    "Prices",
    "Remedy",
    "Request",
    "Spares",
    "Speeds",
    "Totals",
    "Traffic",
    "make_plan",
]
