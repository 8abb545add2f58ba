"""Protecting a model in place: the same modules, parameters and hooks; their products go through a runtime."""

from darknight.nn.protect import protect_, protect_at, unprotect_
from darknight.nn.report import Report, Row
from darknight.ops.place import STRUCTURE

__all__ = ["STRUCTURE", "Report", "Row", "protect_", "protect_at", "unprotect_"]
