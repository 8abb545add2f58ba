"""darknight audit: the flags, and what is shown at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from json import dumps
from pathlib import Path
from typing import Annotated

from rich.console import Console

from darknight.audit import Attack, Audit, Scene, run_audit, verdict
from darknight.audit.attacks import ATTACKS
from darknight.cli.audit_table import audit_table
from darknight.cli.files import OutputFolder
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import Display, display_on
from darknight.data import DATASETS, Dataset, read_dataset
from darknight.errors import DarKnightError, UsageError
from darknight.report.audit_page import audit_page

_ATTACKS, _OUTPUT = "Attacks", "Output"
_SOURCES = ", ".join(f"{name}:{form.argument}" if form.argument else name for name, form in DATASETS.items())
_KEYS = ", ".join(attack.key for attack in ATTACKS)


def audit(
    quick: Annotated[bool, option(_ATTACKS, "Fewer images and epochs: a minute, not several.", "--quick")] = False,
    data: Annotated[str, option(_ATTACKS, f"A path, or one of {_SOURCES}.")] = "digits",
    image_size: Annotated[
        int | None, option(_ATTACKS, "To which pictures in folders are scaled.  [default: 224]")
    ] = None,
    attack: Annotated[
        list[str] | None, option(_ATTACKS, f"Only this one; may be repeated. One of {_KEYS}.  [default: all]")
    ] = None,
    seed: Annotated[int, option(_ATTACKS, "Of images, weights and attacks; not of masks.")] = 0,
    output: Annotated[Path, option(_OUTPUT, "Folder for audit.html and audit.json.")] = Path("darknight-audit"),
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Attack what workers see in a real training, and show what comes of it.

    Models are trained on worker processes of this machine that record everything they receive. Attacks on the default
    scheme must fail, and each runs against a deliberately broken scheme too, where it must succeed. The page,
    audit.html, has the numbers with their intervals, pictures, and what to do; it needs no network.

    Example, the short version, for a reviewer:

        darknight audit --quick --output review && xdg-open review/audit.html

    On your own images, two attacks alone:

        darknight audit --data pictures --image-size 32 \\
          --attack one-share --attack averaging

    Images of more than 32 pixels a side are scaled down for the attacks.

    Exit codes: 0 everything is as it must be, 1 an attack succeeded that must fail, or a control failed, or another
    DarKnight error, 2 bad usage, 130 interrupted.
    """
    chosen = choose(attack or [], ATTACKS)
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level):
        if seed < 0:
            raise UsageError(f"--seed {seed}; needs a whole number, 0 or more.")
        examples = read_dataset(data, seed=seed, image_size=image_size)
        folder = OutputFolder(output)
        with display_on(console) as display:
            done = perform(examples, chosen, quick=quick, seed=seed, display=display)
    files = write(done, folder)
    if json:
        print(files["json"].read_text(encoding="utf-8"), end="")
    else:
        Console(highlight=False, emoji=False).print(audit_table(done, files))
    refuse_surprises(done)


def choose(keys: Sequence[str], attacks: Sequence[Attack]) -> list[Attack]:
    """The attacks of these names, in the order of the suite; all of them if none is named."""
    unknown = sorted(set(keys) - {attack.key for attack in attacks})
    if unknown:
        known = ", ".join(attack.key for attack in attacks)
        raise UsageError(f"unknown attack {', '.join(unknown)}; use one of {known}.")
    return [attack for attack in attacks if not keys or attack.key in keys]


def perform(data: Dataset, attacks: Sequence[Attack], *, quick: bool, seed: int, display: Display) -> Audit:
    """Run the attacks and show how far they are."""
    with ExitStack() as stack:
        done = stack.enter_context(display.count("attacks", len(attacks)))
        stage = stack.enter_context(ExitStack())
        running: list[Attack] = []

        def tell(text: str) -> None:
            stage.close()
            stage.enter_context(display.stage(f"{running[-1].key}: {text}" if running else text))

        def started(attack: Attack) -> None:
            done(len(running[-1:]))
            running.append(attack)
            tell(attack.title.lower())

        found = run_audit(Scene(data, quick=quick, seed=seed, tell=tell), attacks, started=started)
        done(len(running[-1:]))
        return found


def write(audit: Audit, folder: OutputFolder) -> dict[str, Path]:
    """The page, and the same as JSON."""
    page = folder.write("audit.html", audit_page(audit, on=date.today()).encode())
    summary = {**audit.summary(), "files": {"page": str(page), "summary": str(folder.path / "audit.json")}}
    return {"page": page, "json": folder.write("audit.json", f"{dumps(summary, indent=2)}\n".encode())}


def refuse_surprises(audit: Audit) -> None:
    """Raises if an attack that must fail did not, or a control did not succeed; the message names them."""
    if audit.passed:
        return
    named = "; ".join(f"{attack.key}, {finding.target}: {verdict(finding)}" for attack, finding in audit.surprises)
    raise DarKnightError(f"the audit did not pass. {named}. The page says what to do.")
