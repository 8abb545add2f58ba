"""darknight worker: the same as `python -m darknight.worker`, which is the program itself and explains its flags."""

from __future__ import annotations

import os
from dataclasses import fields

import typer

from darknight.cli.settings_file import Kind
from darknight.worker.options import Options
from darknight.worker.program import main

WORKER_OPTIONS = {
    option.name.replace("_", "-"): Kind.TEXTS if option.name == "allow_enclave" else Kind.VALUE
    for option in fields(Options)
    if option.name != "hostile"  # only as a flag
}


def worker(context: typer.Context) -> None:
    """Run a worker: an untrusted program that multiplies masked shares with public weights."""
    for name, value in (context.default_map or {}).items():  # of darknight.toml: for variables that are not set
        text = os.pathsep.join(value) if isinstance(value, list) else str(value)
        os.environ.setdefault(f"DARKNIGHT_WORKER_{name.upper()}", text)
    raise typer.Exit(main(context.args))
