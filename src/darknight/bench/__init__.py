"""Measurements, behind `darknight fleet bench`: what the wire costs, against the least that it could cost."""

from darknight.bench.echo import Echo, Trip
from darknight.bench.transports import Transports, measure_transports

__all__ = ["Echo", "Transports", "Trip", "measure_transports"]
