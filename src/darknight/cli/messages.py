"""What every command has in common: how its options are declared, and where its messages go."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TextIO

import typer
from rich.console import Console
from rich.logging import RichHandler

from darknight.errors import PrivacyWarning


class LogLevel(StrEnum):
    """What --log-level accepts."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def option(panel: str, text: str, *names: str) -> Any:
    """An option with its help, in a panel of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_envvar=False)


@contextmanager
def messages_on(console: Console, level: LogLevel) -> Iterator[None]:
    """Log lines and privacy warnings for people, on stderr and above the bars."""
    logger = logging.getLogger("darknight")
    handler = RichHandler(console=console, show_time=False, show_path=False)
    level_before, show_before = logger.level, warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, PrivacyWarning):
            logger.warning("%s", message)
        else:
            show_before(message, category, filename, lineno, file, line)

    logger.addHandler(handler)
    logger.setLevel(level.value.upper())
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = show_before
        logger.setLevel(level_before)
        logger.removeHandler(handler)
