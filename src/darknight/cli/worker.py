"""darknight worker: the same as `python -m darknight.worker`, which is the program itself and explains its flags."""

from __future__ import annotations

import typer

from darknight.worker.program import main

# Everything after the command belongs to the worker's own reader of flags, its --help included.
WORKER_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def worker(context: typer.Context) -> None:
    """Run a worker: an untrusted program that multiplies masked shares with public weights."""
    raise typer.Exit(main(context.args))
