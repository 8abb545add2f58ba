"""The page needs nothing but itself, shows everything, and takes no text for markup."""

import re
import struct
import zlib
from base64 import b64decode
from datetime import date
from html.parser import HTMLParser

import pytest

from audit.scenes import attack, broken, digits_scene, finding
from darknight.audit import Must, Picture, run_audit
from darknight.report.audit_page import audit_page
from darknight.report.gauge import gauge, number

VOID = {"meta", "img", "br", "line", "rect", "circle"}
NASTY = """<script>alert("x")</script> & 'quoted' "so" """


def png(colour=0):
    """The smallest picture."""

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes([0, colour]))) + chunk(b"IEND", b"")


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that what opens closes."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *each) for each in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def scene():
    return digits_scene()


def page_of(scene, *attacks):
    return audit_page(run_audit(scene, attacks), on=date(2026, 3, 9))


@pytest.fixture(scope="module")
def page(scene):
    shown = finding(
        target="weights", must=Must.SHOW, pictures=(Picture(title="Seen", caption="All of it.", png=png()),)
    )
    return page_of(scene, attack(finding(details={"images": 1234}), broken(), key="first"), attack(shown, key="second"))


def test_it_loads_nothing_and_runs_nothing(page):
    reader = read(page)
    assert not {"script", "link", "iframe", "object", "embed", "form"} & set(reader.tags)
    assert not re.findall(r"url\(|@import|https?:|//", re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page))
    for tag, name, value in reader.attributes:
        assert not name.startswith("on"), (tag, name)
        if name == "src":
            assert value.startswith("data:image/png;base64,")
        if name == "href":
            assert value.startswith("#")
    assert "default-src 'none'" in page


def test_links_lead_somewhere(page):
    reader = read(page)
    ids = {value for _, name, value in reader.attributes if name == "id"}
    assert {value[1:] for _, name, value in reader.attributes if name == "href"} == {"first", "second"} <= ids


def test_everything_is_on_it(page):
    text = " ".join("".join(read(page).text).split())
    for words in (
        *("All 3 findings are as they must be", "480 examples of digits (1x8x8)", "2026-03-09", "Quick version"),
        *("1. The first", "2. The second", "Can it be seen?", "It looks. Then it counts.", "What to do. Nothing."),
        *("failed, as it must", "succeeded, as it must", "shown", "must fail", "must succeed", "images: 1,234"),
        *(
            "0.010 [−0.020, 0.040]",
            "0.900 [0.800, 1.000]",
            "guessing 0.000 is inside",
            "Nothing was found.",
            "All of it.",
        ),
    ):
        assert words in text, words
    (picture,) = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", page)
    assert b64decode(picture) == png()


def test_a_failed_audit_says_so_first_and_where(scene):
    page = page_of(scene, attack(finding(low=0.5, value=0.6, high=0.7), broken(value=0.1, low=0.0, high=0.15)))
    reader = read(page)
    text = "".join(reader.text)
    assert "2 of 2 findings are not as they must be" in text
    assert "succeeded, and must fail" in text
    assert "failed, and must succeed" in text
    assert sum(name == "class" and "bad" in value.split() for _, name, value in reader.attributes) >= 4
    assert "✗" in text


def test_one_surprise_is_singular(scene):
    page = page_of(scene, attack(finding(high=0.5), broken()))
    assert "1 of 2 findings is not as it must be" in page
    assert "undecided, and must fail" in page


def test_no_text_is_taken_for_markup(scene):
    nasty = finding(
        target=NASTY,
        measure=NASTY,
        words=NASTY,
        details={NASTY: NASTY},
        pictures=(Picture(title=NASTY, caption=NASTY, png=png()),),
    )
    reader = read(page_of(scene, attack(nasty, key="x<y")))
    assert "script" not in reader.tags
    assert "".join(reader.text).count("alert(") >= 6
    assert ("img", "alt", NASTY) in reader.attributes


def test_the_look_is_for_light_and_dark_and_narrow(page):
    assert "prefers-color-scheme: dark" in page
    assert "max-width: 720px" in page
    assert 'name="viewport"' in page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.30659, "0.307"),
        (-0.0421, "−0.042"),
        (-0.0001, "0.000"),
        (0.0, "0.000"),
        (35.81, "35.8"),
        (12345.6, "12,346"),
        (3.7e-9, "3.7e-09"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


def test_the_gauge_has_its_marks_in_order():
    found = finding(low=0.1, value=0.2, high=0.4, guessing=0.05, threshold=0.8)
    drawn = gauge(found)
    bar, dot, guess, threshold = (
        float(re.search(pattern, drawn)[1])
        for pattern in (
            r'"bar" x="([\d.]+)"',
            r'"dot" cx="([\d.]+)"',
            r'"guess" x1="([\d.]+)"',
            r'"threshold" x1="([\d.]+)"',
        )
    )
    assert 0 < guess < bar < dot < threshold < 320
    outside = gauge(finding(low=40, value=60, high=80, guessing=10, threshold=30))  # decibels, say
    assert max(float(place) for place in re.findall(r'x\d?="([\d.]+)"', outside)) <= 320
