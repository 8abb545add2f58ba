"""Protecting a model in place: the same modules, parameters and hooks; their products go through a runtime."""

from darknight.nn.protect import protect_, unprotect_
from darknight.nn.report import Report, Row

__all__ = ["Report", "Row", "protect_", "unprotect_"]
