"""Logs: one line for each event, whatever is in it, and never a tensor."""

import json
import logging

import pytest
import torch

from darknight.worker.logs import set_up_logs


@pytest.fixture
def logger():
    """DarKnight's logger as it was before, afterwards."""
    found = logging.getLogger("darknight")
    before = found.handlers, found.propagate, found.level
    yield found
    found.handlers, found.propagate = before[:2]
    found.setLevel(before[2])


def test_text(logger, capsys):
    set_up_logs("info", "text")
    logger.info("session opened", extra={"fields": {"peer": "SHA256:ab", "seconds": 1.5, "reason": "two words"}})
    logger.debug("not shown")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.endswith('Z info session opened peer=SHA256:ab seconds=1.5 reason="two words"\n')


def test_json(logger, capsys):
    set_up_logs("debug", "json")
    logger.warning("refused", extra={"fields": {"reason": "a\nb", "count": 2, "all": True}})
    found = json.loads(capsys.readouterr().err)
    assert found.pop("time").endswith("Z")
    assert found == {"level": "warning", "event": "refused", "reason": "a\nb", "count": 2, "all": True}


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_enclave_cannot_write_lines_of_its_own(logger, capsys, form):
    set_up_logs("info", form)
    logger.info("refused", extra={"fields": {"layer": 'x\n2026 info started "', "empty": ""}})
    logger.info("a\nb", extra={"fields": {"long": "y" * 10_000}})
    lines = capsys.readouterr().err
    assert lines.count("\n") == 2
    assert len(lines) < 2000


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_tensor_does_not_get_into_a_line(logger, capsys, form):
    set_up_logs("info", form)
    logger.info("oops", extra={"fields": {"share": torch.full((2,), 123456789)}})
    assert "123456789" not in capsys.readouterr().err


def test_an_error_is_one_line_without_a_traceback(logger, capsys):
    set_up_logs("info", "text")
    try:
        raise ValueError("of two\nlines")
    except ValueError:
        logger.exception("failed")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert 'error="ValueError: of two\\nlines"' in line
