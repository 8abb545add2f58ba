"""Figures have axes, units and captions; the page needs nothing else, and says of every number whose it is."""

import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from darknight.errors import DataError
from darknight.report.experiment_file import experiment_from
from darknight.report.paper_quotes import FEATURES, FIGURE_2_PRINTED, TABLE_1, TABLE_2
from darknight.report.results_folder import figures_of
from darknight.report.results_page import results_page
from report.measurements import changed, everything, leaves

VOID = {"meta", "img", "br"}
MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def figures():
    return figures_of(everything())


@pytest.fixture(scope="module")
def page(figures):
    return results_page(everything(), figures)


class Reader(HTMLParser):
    """Cells of tables with their classes, links, sources and text; checks that what opens closes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells, self.references, self.ids, self.text = [], [], [], set(), []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.references += [given[name] for name in ("href", "src", "action", "data", "srcset") if name in given]
        self.ids.add(given.get("id"))
        if tag in ("td", "blockquote"):
            self.cells.append((given.get("class") or "", tag, []))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)
        if self.cells and self.cells[-1][1] in self.open:
            self.cells[-1][2].append(data)


def labelled(axes):
    """Axes that share a row or column may leave the label to one of them."""
    rows, columns = axes.get_shared_y_axes().get_siblings(axes), axes.get_shared_x_axes().get_siblings(axes)
    return [each.get_ylabel() for each in rows], [each.get_xlabel() for each in columns]


def complaints(drawn):
    """What a figure lacks."""
    found = [f"{drawn.name}: no {what}" for what in ("title", "caption") if not getattr(drawn, what).strip()]
    if "what to see" not in drawn.caption.lower():
        found.append(f"{drawn.name}: the caption does not say what to see")
    if "measured" not in (drawn.title + drawn.caption).lower() and "quoted" not in drawn.title.lower():
        found.append(f"{drawn.name}: neither measured nor quoted")
    for axes in drawn.figure.axes:
        for labels in labelled(axes):
            if not any(re.search(r"\(.+\)", label) for label in labels):
                found.append(f"{drawn.name}: an axis without a label or a unit")
    return found


def test_every_figure_has_axes_units_a_caption_and_a_small_file(figures):
    drawings = [drawn for found in figures.values() for drawn in found]
    assert {drawn.name for drawn in drawings} == {
        "accuracy", "inference", "leakage", "time-split", "speed-up", "scaling",
    }  # fmt: skip
    for drawn in drawings:
        assert not complaints(drawn)
        assert drawn.figure.axes
        assert len(drawn.png) < MOST_BYTES
        assert drawn.png.startswith(b"\x89PNG\r\n\x1a\n")


def test_a_figure_without_a_unit_or_a_caption_would_be_noticed():
    (drawn,) = figures_of({"scaling": everything()["scaling"]})["scaling"]
    assert complaints(replace(drawn, caption="Lines."))
    axes = drawn.figure.axes[0]
    for each in axes.get_shared_y_axes().get_siblings(axes):
        each.set_ylabel("time")
    assert complaints(drawn)


def test_the_page_refers_to_nothing_outside_and_to_nothing_that_is_not_there(page, figures):
    read = Reader(page)
    pictures = [each for each in read.references if each.startswith("data:image/png;base64,")]
    anchors = [each for each in read.references if each.startswith("#")]
    assert len(pictures) + len(anchors) == len(read.references)
    assert {each[1:] for each in anchors} <= read.ids
    drawings = [drawn for found in figures.values() for drawn in found]
    assert [b64decode(each.partition(",")[2]) for each in pictures] == [drawn.png for drawn in drawings]
    assert not re.search(r"https?://|@import|url\(|<script", page)
    assert "default-src 'none'" in page
    for mode in ("prefers-color-scheme: dark", "@media print", "max-width: 720px"):
        assert mode in page


def quoted_numbers():
    rows = [value for printed in TABLE_2.values() for value in (printed.vgg16, printed.resnet152, printed.mobilenet_v1)]
    bounds = [f"{printed.leakage:.3g}" for name, printed in TABLE_2.items() if name in ("N(4e3, 1.6e7)", "N(0, 4e8)")]
    return [*(f"{one:.2f} / {five:.2f}" for one, five in rows), *bounds, *FIGURE_2_PRINTED.values()]


def not_marked(page):
    """Numbers of the paper that stand in a cell which does not say that it is quoted."""
    cells = [("".join(text).strip(), kind) for kind, tag, text in Reader(page).cells if tag == "td"]
    found = []
    for number in quoted_numbers():
        kinds = [kind for text, kind in cells if text == number]
        found += [number] if not kinds or any("quoted" not in kind.split() for kind in kinds) else []
    return found


def test_every_number_of_the_paper_is_marked_as_quoted(page):
    assert not not_marked(page)
    assert len(not_marked(page.replace('class="number quoted"', 'class="number"'))) == len(quoted_numbers())


def test_every_table_says_whether_it_is_measured_or_quoted(page):
    assert page.count('<p class="caption">') == page.count('<div class="wide">') == 7
    for caption in re.findall('<p class="caption">(.*?)</p>', page):
        assert "measured" in caption or "quoted" in caption or "Bounds of leakage" in caption
    marks = re.findall(r'<blockquote><span class="mark (\w+)"', page)
    assert marks == ["quoted"] * page.count("<blockquote>")


def test_every_section_states_its_scale_and_command(page):
    for name, made in everything().items():
        section = page[page.index(f'<section id="{name}"') :].partition("</section>")[0]
        assert made.command in section
        assert "Scale: " in section
        assert "a processor, 2 cores" in section
    assert "mobilenet-small/N(0, 4e8)" in page  # a cell that is missing
    assert "stopped in epoch 2" in page


def test_what_is_missing_is_named_with_its_command(figures):
    some = {"features": everything()["features"]}
    page = results_page(some, {})
    Reader(page)
    for script in ("accuracy", "inference", "time_split", "scaling"):
        assert f"python experiments/{script}.py --out" in page
    assert "64.26 / 85.01" in page  # what the paper says is there in any case
    assert page.count("not measured</span>") >= 4


def test_an_experiment_without_a_complete_cell_draws_nothing():
    empty = {name: replace(made, cells={}) for name, made in everything().items()}
    figures = figures_of(empty)
    assert not any(figures.values())
    Reader(results_page(empty, figures))


@pytest.mark.parametrize("name", list(everything()))
def test_half_an_experiment_can_be_drawn(name):
    """Whatever cells are there: the first, the last."""
    made = everything()[name]
    for cell in (next(iter(made.cells)), list(made.cells)[-1]):
        part = {name: replace(made, cells={cell: made.cells[cell]})}
        Reader(results_page(part, figures_of(part)))


def test_text_is_never_markup():
    nasty = """<script>alert("x")</script> & 'so'"""
    made = everything()["scaling"]
    page = results_page({"scaling": replace(made, command=nasty, machine={**made.machine, "processor": nasty})}, {})
    assert "<script" not in page
    Reader(page)


def test_our_row_leads_from_every_cell_to_its_tests(page):
    ours = page[page.index("DarKnight, this system") :].partition("</tr>")[0]
    assert len(re.findall(r'<a href="#feature-[a-z-]+"', ours, re.IGNORECASE)) == len(FEATURES)
    assert all(name in page for name in TABLE_1)


@pytest.mark.full
@pytest.mark.parametrize("name", list(everything()))
def test_whatever_passes_the_reader_can_be_drawn(name):
    """Numbers at the edge of what is allowed, empty lists, no leakage: a page, and never a traceback."""
    words = everything()[name].words()
    drawn = 0
    for path in [path for path in leaves(words["cells"]) if len(path) > 1][::31]:
        for edge in (0, 1, 10**7, 0.0, 1.0, 1e9, -1e9, None, [], "a", "N(0, 4e8)", "clear"):
            try:
                made = experiment_from(changed(words, ("cells", *path), edge), Path("a.json"))
            except DataError:
                continue
            assert results_page({name: made}, figures_of({name: made}))
            drawn += 1
    assert drawn


def test_a_training_without_an_epoch_and_noise_without_a_bound():
    words = everything()["accuracy"].words()
    bare = experiment_from(changed(words, ("cells", "vgg-small/clear", "epochs"), []), Path("a.json"))
    leaks = everything()["inference"].words()
    for cell in leaks["cells"].values():
        cell["leakage"] = None
    found = {"accuracy": bare, "inference": experiment_from(leaks, Path("b.json"))}
    Reader(results_page(found, figures_of(found)))
