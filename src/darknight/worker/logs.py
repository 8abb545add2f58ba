"""Structured logs on stderr: an event in words, and its fields as key=value or as a line of JSON.

A log call names the event and gives its fields: ``_log.info("session opened", extra={"fields": {"peer": ...}})``.

Guarantees: one event is one line, whatever an enclave put into a name: strings with anything but plain printable
characters are quoted and escaped. Fields are words and numbers; a tensor is refused, so that none gets in by mistake.
Contract tests: tests/worker/test_logs.py.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
_LONGEST = 500


def set_up_logs(level: str, form: str) -> None:
    """Sends what DarKnight logs to stderr, at `level` and above, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger = logging.getLogger("darknight")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname.lower(), _plain(record.getMessage(), spaces=True)]
        parts += [f"{key}={_plain(value)}" for key, value in _fields(record).items()]
        return " ".join(parts)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()[:_LONGEST]}
        return json.dumps({**head, **_fields(record)})


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, str | int | float | bool | None]:
    found = dict(getattr(record, "fields", {}))
    if record.exc_info and record.exc_info[0] is not None:
        found["error"] = f"{record.exc_info[0].__name__}: {record.exc_info[1]}"
    return {key: _field(value) for key, value in found.items()}


def _field(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_LONGEST]
    return f"<{type(value).__name__}>"


def _plain(value: object, *, spaces: bool = False) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    simple = value.isascii() and value.isprintable() and '"' not in value and (spaces or " " not in value)
    return value[:_LONGEST] if simple and value else json.dumps(value[:_LONGEST])
