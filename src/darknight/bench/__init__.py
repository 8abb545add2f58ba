"""Measurements, over the least that is possible: the enclave, the wire, and other ways of computing on hidden data.

Behind `darknight bench`, `darknight fleet bench` and the scripts in benchmarks/.

ceiling, steps, links       the enclave against the plain step; passes: encode and decode against a copy
roofline, bandwidth         what the machine's memory allows; peak: how much of it a step takes
rival and its parts         against CrypTen and TenSEAL
results, history, machine   what is told, and kept
"""

from darknight.bench.bandwidth import Bandwidth, measure_bandwidth
from darknight.bench.ceiling import LEAST_TIMES, SCHEMES, Ceiling, measure_ceiling
from darknight.bench.echo import Echo, Trip
from darknight.bench.history import Change, Line, append, changes, new_line
from darknight.bench.links import LINKS
from darknight.bench.machine import machine, program
from darknight.bench.passes import Passes, measure_passes
from darknight.bench.peak import Memory, Peak, measure_memory
from darknight.bench.results import Results, key
from darknight.bench.rival import Contest, Cost, Rivals, measure_rivals
from darknight.bench.roofline import Roofline, roofline_of
from darknight.bench.transports import Transports, measure_transports

__all__ = [
    "LEAST_TIMES",
    "LINKS",
    "SCHEMES",
    "Bandwidth",
    "Ceiling",
    "Change",
    "Contest",
    "Cost",
    "Echo",
    "Line",
    "Memory",
    "Passes",
    "Peak",
    "Results",
    "Rivals",
    "Roofline",
    "Transports",
    "Trip",
    "append",
    "changes",
    "key",
    "machine",
    "measure_bandwidth",
    "measure_ceiling",
    "measure_memory",
    "measure_passes",
    "measure_rivals",
    "measure_transports",
    "new_line",
    "program",
    "roofline_of",
]
