"""What `mkdocs build` does besides: pages that live elsewhere, pages that list themselves, and links between them.

README, SECURITY, CHANGELOG, CONTRIBUTING and the notebook are read where they are, so there is no second copy that
could differ; what the command can do is asked of the command.
Links are written for whoever reads the files in the repository; here they are led to the page of the same file, under
its title where the words are the file's name, and those to files that are no page become their name.
"""

import ast
import os
import re
from pathlib import Path
from typing import Any

from command_page import command_sections
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_page import notebook_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {
    "README.md": "in-one-page.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
NOTEBOOK, NOTEBOOK_PAGE = "examples/notebook.ipynb", "notebook.md"
PAGE_OF = {**ELSEWHERE, NOTEBOOK: NOTEBOOK_PAGE}
OPTIONAL = {"results.md": "Results"}  # in the navigation if the file is there, behind Performance
EXAMPLE, ROOMS, COMMANDS = "<!-- the example of README.md -->", "<!-- the rooms -->", "<!-- the commands -->"
_FENCE = re.compile(r"(^```.*?^```$)", flags=re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation, with the decisions in their order and the pages that may be there."""
    nav: list[Any] = []
    for entry in config.nav or []:
        nav.append(entry)
        if "Performance" in entry:
            nav += [{title: name} for name, title in OPTIONAL.items() if (DOCS / name).exists()]
    for entry in nav:
        for part in entry.get("Project", []):
            if part.get("Decisions") == "adr":
                part["Decisions"] = ["adr/README.md", *sorted(f"adr/{path.name}" for path in DOCS.glob("adr/0*.md"))]
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, place in ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    text, pictures = notebook_page(ROOT / NOTEBOOK, NOTEBOOK_PAGE)
    files.append(File.generated(config, NOTEBOOK_PAGE, content=text))
    for name, picture in pictures.items():
        files.append(File.generated(config, name, content=picture))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    home = {place: name for name, place in PAGE_OF.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    for mark, made in ((EXAMPLE, _example), (ROOMS, _rooms), (COMMANDS, command_sections)):
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    pieces = _FENCE.split(markdown)
    return "".join(piece if piece.startswith("```") else _led(piece, home, page.file.src_uri) for piece in pieces)


def _led(text: str, home: str, page: str) -> str:
    """`text` with links that lead to pages of the site. home: where it is in the repository."""

    def lead(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        place = os.path.normpath(Path(home).parent / target)
        if place in PAGE_OF:
            wanted = PAGE_OF[place]
        elif place.startswith("docs/"):
            wanted = place.removeprefix("docs/")
        else:
            return f"`{place}`" if words in (place, Path(place).name) else f"{words} (`{place}`)"
        if words in (place, Path(place).name) and place.endswith(".md"):
            words = (ROOT / place).read_text().partition("\n")[0].removeprefix("# ")
        return f"[{words}]({os.path.relpath(wanted, Path(page).parent)}{anchor or ''})"

    return _LINK.sub(lead, text)


def _example() -> str:
    """README's, which a test runs."""
    (example,) = re.findall(r"^```python\n.*?^```$", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    return str(example)


def _rooms() -> str:
    """Every module by its room, with the first sentence of its docstring."""
    parts = []
    for room in sorted(path.parent for path in (ROOT / "src" / "darknight").glob("*/__init__.py")):
        lines = [f"## {room.name}", "", _first(room / "__init__.py"), "", "| module | what is in it |", "|---|---|"]
        for path in sorted(room.rglob("*.py")):
            if path.name not in ("__init__.py", "__main__.py"):
                name = ".".join(path.relative_to(room).with_suffix("").parts)
                lines.append(f"| `{name}` | {_first(path)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _first(path: Path) -> str:
    """The first paragraph of a module's docstring, for a cell of a table."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    words = " ".join(text.split("\n\n")[0].split()).rstrip(":")
    return words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
