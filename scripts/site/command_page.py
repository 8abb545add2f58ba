"""Every command with its text and its options, read from the parsers that read the command line itself."""

import argparse
import re
from pathlib import Path
from typing import Any

import typer

from darknight.cli.app import whole_command
from darknight.worker.options import PROGRAM, options_parser

_GENERAL = "Options"


def command_sections() -> str:
    """A section for each command, in the order of `darknight --help`; a group has one for each of its commands."""
    sections: list[str] = []
    for name, command in whole_command().commands.items():
        title = f"darknight {name}"
        if title == PROGRAM:
            sections.append(_worker_section())
            continue
        for inner, each in getattr(command, "commands", {"": command}).items():
            sections.append(_section(f"{title} {inner}".strip(), each))
    return "\n\n".join(sections)


def _section(title: str, command: Any) -> str:
    context = typer.Context(command, info_name=title)
    usage = [piece for parameter in command.params for piece in parameter.get_usage_pieces(context)]
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            panels.setdefault(parameter.rich_help_panel or _GENERAL, []).append(_row(*record))
    tables = [_table(panel, rows) for panel, rows in panels.items()]
    line = [f"    {title} [OPTIONS] {' '.join(usage)}"] if usage else []
    return "\n\n".join([f"## {title}", *line, command.help.strip(), *tables])


def _worker_section() -> str:
    """The worker has a reader of its own, because it is installed without the rest."""
    parser = options_parser({})
    form = argparse.HelpFormatter(PROGRAM)
    rows = []
    for action in parser._actions:  # argparse has no other list of them
        names = " ".join([", ".join(action.option_strings), action.metavar or ""]).strip()
        rows.append(_row(str(names), form._expand_help(action)))
    about, example = (str(text).replace(str(Path.home()), "~") for text in (parser.description, parser.epilog))
    blocks = re.sub(r"^  (?=\S)(.*)$", r"\n    \1\n", example, flags=re.MULTILINE)
    table = _table(_GENERAL, [row.replace(str(Path.home()), "~") for row in rows])
    return "\n\n".join([f"## {PROGRAM}", about, blocks, table])


def _table(title: str, rows: list[str]) -> str:
    table = "\n".join([f"| {title} | |", "|---|---|", *rows])
    return f'<div class="options" markdown>\n\n{table}\n\n</div>'


def _row(names: str, text: str) -> str:
    cell = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")
    return f"| `{names}` | {cell} |"  # a bar in code is no border
