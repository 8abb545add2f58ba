"""The site: built with warnings as errors, read without a network, every link leads somewhere, pictures have words."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import yaml

from boundaries.house import ROOT
from darknight.cli.app import COMMANDS, whole_command
from darknight.worker.options import Options

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PICTURES = sorted(DOCS.glob("pictures/*.svg"))
_SOURCES = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
_SVG = "{http://www.w3.org/2000/svg}"


class Looked(HTMLParser):
    """What one page links to, loads, names, and shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.wordless: list[str] = []
        self._figure: list[str] = []
        self._captioned = self._within = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = {name: value or "" for name, value in attributes}
        self.names |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in _SOURCES and found.get("rel") not in ("canonical", "next", "prev") and _SOURCES[tag] in found:
            self.loads.append(found[_SOURCES[tag]])
        if tag == "figure":
            self._within, self._captioned, self._figure = True, False, []
        if tag == "figcaption":
            self._captioned = True
        if tag == "img":
            self._figure.append(found["src"])
            if not self._within or not found.get("alt"):
                self.wordless.append(found["src"])

    def handle_endtag(self, tag):
        if tag == "figure":
            self.wordless += [] if self._captioned else self._figure
            self._within = False


def build(folder: Path, *, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # of the theme's maker, about another program
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Looked]:
    folder = tmp_path_factory.mktemp("site").resolve()
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return {path: Looked(path.read_text()) for path in sorted(folder.rglob("*.html"))}


def test_every_page_is_there(site):
    names = {path.name for path in site}
    assert {"index.html", "security.html", "changelog.html", "contributing.html", "in-one-page.html"} <= names
    assert len(names) > len(PAGES)


def test_every_link_of_the_site_leads_to_a_page_and_a_place_in_it(site):
    lost = []
    for path, page in site.items():
        if path.name == "404.html":  # its links are for a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target not in site or (parts.fragment and unquote(parts.fragment) not in site[target].names):
                lost.append(f"{path.name}: {link}")
    assert not lost, "\n".join(lost)


def test_words_of_a_link_to_a_page_are_no_name_of_a_file(site):
    files = [f"{path.name}: {name}" for path in site for name in re.findall(r">([\w/.-]+\.md)</a>", path.read_text())]
    assert files == []
    assert any(">Audit it yourself</a>" in path.read_text() for path in site if path.name == "security.html")


def test_nothing_is_loaded_from_elsewhere(site):
    for path, page in site.items():
        assert page.loads
        assert not [load for load in page.loads if urlsplit(load).scheme or load.startswith("//")], path.name
    root = min(site, key=lambda path: len(path.parts)).parent
    styles = "".join(path.read_text() for path in root.rglob("*.css"))
    assert not re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", styles)


def test_every_picture_of_the_site_has_words_and_a_caption(site):
    assert sum(load.endswith(".svg") for page in site.values() for load in page.loads) >= len(PICTURES)
    assert not [page.wordless for page in site.values() if page.wordless]


def test_the_reference_has_what_the_docstrings_say(site):
    text = {path.name: path.read_text() for path in site}
    assert "private examples mixed in one virtual batch" in text["scheme.html"]
    assert "darknight.errors.IntegrityError" in text["errors.html"]
    for name in ("local_fleet", "connect", "protect_", "unprotect_", "Runtime", "Ledger"):
        assert any(re.search(rf'id="darknight\.[\w.]+\.{name}"', page) for page in text.values()), name


def options_by_command() -> dict[str, list[str]]:
    """Every option by the command that reads it. The worker's own reader makes a record of them."""
    found = {"worker": [f"--{field.name.replace('_', '-')}" for field in fields(Options)]}
    for name, command in whole_command().commands.items():
        for inner, each in getattr(command, "commands", {"": command}).items():
            options = [option for option in each.params if option.param_type_name == "option"]
            names = [name for option in options for name in (*option.opts, *option.secondary_opts)]
            found.setdefault(f"{name} {inner}".strip(), names)
    return found


def options_not_on(page: str) -> list[str]:
    """Options that are not in the section of their command."""
    sections = {unescape(re.sub(r"<[^>]+>", "", part.split("</h2>")[0])): part for part in page.split("<h2")[1:]}
    by_title = {re.sub(r"^.*>|¶$", "", title): unescape(text) for title, text in sections.items()}
    return [
        f"{command} {option}"
        for command, options in options_by_command().items()
        for option in options
        if not re.search(rf"<code>[^<]*{option}\b(?!-)", by_title.get(f"darknight {command}", ""))
    ]


def test_the_page_about_the_command_has_every_option_of_every_command(site):
    (path,) = [path for path in site if path.name == "command.html"]
    page = path.read_text()
    assert options_not_on(page) == []
    assert options_not_on(page.replace("--early-stop", "--something")) == ["train --early-stop"]
    assert "\\|" not in page


def test_the_notebook_is_a_page_with_what_it_printed_and_drew(site):
    (path,) = [path for path in site if path.name == "notebook.html"]
    text = unescape(re.sub(r"<[^>]+>", "", path.read_text()))
    cells = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
    printed = [line.strip() for cell in cells for out in cell.get("outputs", ()) for line in out.get("text", ())]
    written = [line.strip() for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    assert printed
    assert [line for line in [*printed, *written] if line not in text] == []
    drawn = sum("image/png" in out.get("data", {}) for cell in cells for out in cell.get("outputs", ()))
    assert drawn == len([load for load in site[path].loads if (path.parent / load).is_file() and "notebook-" in load])


def test_a_link_that_leads_nowhere_would_stop_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("# A page\n\n[nowhere](nowhere.md)\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text("site_name: x\nvalidation: {links: {not_found: warn}}\n")
    done = build(tmp_path / "site", config=config)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr


# --- without building it ---------------------------------------------------------------------------------------------
def navigation(part=None):
    """Every page that mkdocs.yml names."""
    if part is None:
        part = yaml.safe_load(re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text()))["nav"]
    for entry in part:
        for inside in entry.values():
            yield from navigation(inside) if isinstance(inside, list) else [inside]


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page():
    """Those of other folders and the decisions come from scripts/site/hooks.py."""
    elsewhere = {"security.md", "changelog.md", "contributing.md", "in-one-page.md", "notebook.md", "adr"}
    named = list(navigation())
    assert len(named) == len(set(named))
    here = {path.relative_to(DOCS).as_posix() for path in PAGES if path.parent.name != "adr"} - {"results.md"}
    assert set(named) - elsewhere == here
    assert elsewhere <= set(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_link_of_a_page_leads_to_a_file(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [link for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_every_picture_of_a_page_has_words_and_a_caption_that_says_what_to_see(page):
    text = page.read_text()
    figures = re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL)
    assert text.count("![") == sum(figure.count("![") for figure in figures)
    for figure in figures:
        assert re.search(r"!\[[^\]]{30,}\]", figure)
        assert "<figcaption>What to see: " in figure


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_a_picture_describes_itself_and_loads_nothing(picture):
    tree = ElementTree.parse(picture).getroot()
    assert len(tree.findtext(f"{_SVG}title")) > 20
    assert len(tree.findtext(f"{_SVG}desc")) > 100
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)|<image|<script|@import", picture.read_text())


def test_a_picture_without_words_would_be_noticed():
    assert Looked('<figure><img src="a" alt="words"></figure>').wordless == ["a"]
    assert Looked('<img src="a" alt="words">').wordless == ["a"]
    assert Looked('<figure><img src="a" alt=""><figcaption>x</figcaption></figure>').wordless == ["a"]
    assert not Looked('<figure><img src="a" alt="words"><figcaption>x</figcaption></figure>').wordless


@pytest.mark.parametrize("name", ["concepts/masking.md", "reference/index.md"])
def test_the_code_of_a_page_runs_as_written(name):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
    assert blocks
    namespace = {"__name__": name}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)


def test_code_is_only_on_pages_whose_code_runs():
    run = {DOCS / "concepts/masking.md", DOCS / "reference/index.md", *DOCS.glob("howto/*.md")}
    assert {page for page in PAGES if "```python" in page.read_text()} <= run


def test_the_page_about_the_command_has_every_command():
    rows = re.findall(r"^\| `darknight (\w+)` \|", (DOCS / "reference" / "command.md").read_text(), flags=re.MULTILINE)
    assert rows == list(COMMANDS)
