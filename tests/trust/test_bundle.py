"""Named pieces as one, and back; the size of the whole says little about the sizes of the pieces."""

from pathlib import Path

import pytest

from darknight.errors import DataError
from darknight.trust.bundle import packed, unpacked


@pytest.mark.parametrize("files", [{}, {"a": b""}, {"a": b"x" * 20_000, "b": b"\0\0"}, {"größe": bytes(1 << 14)}])
def test_pieces_come_back_as_they_were(files):
    assert unpacked(packed(files), Path("here")) == files


def test_lengths_of_the_pieces_do_not_show_in_the_length_of_the_whole():
    assert {len(packed({"summary": b"1" * length})) for length in range(1, 400, 7)} == {1 << 14}


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"", lambda data: b"\xff" * 20]
)
def test_another_form_is_refused(change):
    with pytest.raises(DataError, match="another version"):
        unpacked(change(packed({"a": b"abc"})), Path("here"))
