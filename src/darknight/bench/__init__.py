"""Measurements, over the least that is possible: the enclave, the wire, and other ways of computing on hidden data.

Behind `darknight bench`, `darknight fleet bench` and the scripts in benchmarks/.
"""

from darknight.bench.ceiling import LEAST_TIMES, Ceiling, measure_ceiling
from darknight.bench.echo import Echo, Trip
from darknight.bench.passes import Passes, measure_passes
from darknight.bench.rival import Contest, Cost, Rivals, measure_rivals
from darknight.bench.transports import Transports, measure_transports

__all__ = [
    "LEAST_TIMES",
    "Ceiling",
    "Contest",
    "Cost",
    "Echo",
    "Passes",
    "Rivals",
    "Transports",
    "Trip",
    "measure_ceiling",
    "measure_passes",
    "measure_rivals",
    "measure_transports",
]
