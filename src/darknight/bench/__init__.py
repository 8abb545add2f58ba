"""Measurements: what the enclave costs (`darknight bench`) and the wire (`darknight fleet bench`), over the least."""

from darknight.bench.ceiling import LEAST_TIMES, Ceiling, measure_ceiling
from darknight.bench.echo import Echo, Trip
from darknight.bench.passes import Passes, measure_passes
from darknight.bench.transports import Transports, measure_transports

__all__ = [
    "LEAST_TIMES",
    "Ceiling",
    "Echo",
    "Passes",
    "Transports",
    "Trip",
    "measure_ceiling",
    "measure_passes",
    "measure_transports",
]
