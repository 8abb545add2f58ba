"""darknight report: figures and one page from the files of experiments."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from darknight.cli.files import OutputFolder
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import display_on
from darknight.report.experiment_file import Experiment
from darknight.report.results_folder import COMMANDS, figures_of, read_results
from darknight.report.results_page import results_page

_OUTPUT = "Output"
_MOST_NAMED = 3


def report(
    results: Annotated[Path, typer.Argument(help="Folder with the JSON files of experiments.", show_default=False)],
    output: Annotated[Path, option(_OUTPUT, "Folder for results.html and the figures.")] = Path("darknight-report"),
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Draw what experiments measured, beside what the paper claims.

    Reads every JSON file of the folder, draws every figure (PNG) and writes one page, results.html, which needs no
    network and no other file. What is quoted from the paper is marked so. Nothing is measured here: the scripts in
    experiments/ do that, and what is missing is named with its command. A file that is damaged or is no experiment is
    refused, and then nothing is written.

    Example:

        python experiments/scaling.py --out results/scaling.json --quick

        darknight report results --output page && xdg-open page/results.html

    Exit codes: 0 done, also if experiments are missing; 1 a file that cannot be read, or another DarKnight error;
    2 bad usage; 130 interrupted.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level):
        experiments = read_results(results)
        folder = OutputFolder(output)
        with display_on(console) as display, display.stage("drawing"):
            figures = figures_of(experiments)
            page = results_page(experiments, figures)
            files = [
                folder.write(f"{drawn.name}.png", drawn.png) for drawings in figures.values() for drawn in drawings
            ]
            files.insert(0, folder.write("results.html", page.encode()))
    if json:
        print(dumps(_summary(experiments, files), indent=2))
    else:
        Console(highlight=False, emoji=False).print(_table(experiments, files))


def _summary(experiments: Mapping[str, Experiment], files: list[Path]) -> dict[str, Any]:
    return {
        "experiments": {
            name: {"complete": len(experiment.cells), "missing": list(experiment.missing)}
            for name, experiment in experiments.items()
        },
        "missing": [name for name in COMMANDS if name not in experiments],
        "files": [str(path) for path in files],
    }


def _table(experiments: Mapping[str, Experiment], files: list[Path]) -> Table:
    table = Table(
        box=box.ROUNDED,
        title="results",
        title_style="bold",
        caption="\n".join(escape(str(f)) for f in files),
        caption_justify="left",
    )
    table.add_column("experiment", no_wrap=True)
    table.add_column("cells", no_wrap=True)
    table.add_column("what is missing, and how to measure it")
    for name, command in COMMANDS.items():
        experiment = experiments.get(name)
        if experiment is None:
            table.add_row(name, "-", f"all of it: {escape(command)}")
        else:
            count = f"{len(experiment.cells)} of {len(experiment.planned)}"
            table.add_row(name, count, escape(_some(experiment.missing)))
    return table


def _some(names: tuple[str, ...]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
