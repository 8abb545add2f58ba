"""Pages and pictures for people."""

from darknight.report.shares_picture import shares_picture

__all__ = ["shares_picture"]
