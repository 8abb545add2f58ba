"""Our docstrings as Markdown: prose with a few habits, which become lists, headings and code.

seed: of the rounding of gradients.     a line that begins with a name of the signature: an item of a list
Guarantees: ... Assumes: ... Leaks: ... a paragraph of its own, with the word in bold
>>> dk.Scheme(...)                      a block of code, up to the next empty line
"""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"(Guarantees|Assumes|Leaks|Contract tests): ?")
_NAME = re.compile(r"((?:`?[a-z_][a-z_0-9]*`?)(?: \([A-Z]\))?(?:(?:,| and) `?[a-z_][a-z_0-9]*`?)*): ")


class Prose(griffe.Extension):
    """Rewrites every docstring that has one."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        names = {name for name, member in cls.members.items() if member.is_attribute}
        start = cls.members.get("__init__")
        if isinstance(start, griffe.Function):
            names |= {parameter.name for parameter in start.parameters}
        _rewrite(cls, names)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        _rewrite(func, {parameter.name for parameter in func.parameters})

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        _rewrite(attr, set())


def _rewrite(thing: griffe.Object, names: set[str]) -> None:
    if thing.docstring is not None:
        thing.docstring.value = as_markdown(thing.docstring.value, names)


def as_markdown(text: str, names: set[str]) -> str:
    """`text` in Markdown. names: what a list may be of."""
    lines: list[str] = []
    item = code = False
    for line in _apart(text, names).splitlines():
        if line.startswith(">>>") and not code:
            lines += ["", "```pycon"]
            code = True
        if code:
            code = bool(line.strip())
            lines += [line] if code else ["```", ""]
        elif match := _SECTION.match(line):
            lines += ["", f"**{match[1]}.** {line[match.end() :]}"]
            item = False
        elif (match := _NAME.match(line)) and _named(match[1]) <= names:
            lines += [] if item else [""]
            lines.append(f"- `{match[1].replace('`', '')}`: {line[match.end() :]}")
            item = True
        elif line.strip() and line[0] != " ":
            lines.append(f"    {line}" if item else line)
        else:
            item = item and bool(line.strip())
            # The rest of a section is indented; as Markdown it goes on without.
            lines.append(line.strip() if lines and lines[-1].startswith("**") else line)
    return "\n".join([*lines, *(["```"] if code else [])])


def _apart(text: str, names: set[str]) -> str:
    """Every name that begins a sentence begins a line: paragraphs are filled, and items follow one another in them."""
    for name in names:
        text = re.sub(rf"(?<=[.;]) +(?=`?{name}`?(?: \([A-Z]\))?(?:, \w+| and \w+)*: )", "\n", text)
    return text


def _named(text: str) -> set[str]:
    return set(re.findall(r"[a-z_][a-z_0-9]*", re.sub(r"\([A-Z]\)| and ", " ", text)))
