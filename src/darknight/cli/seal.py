"""darknight seal: the flags, and what is shown at the end."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import display_on
from darknight.client.seal import Destination, key_beside, open_with, seal_dataset, verify_sealed
from darknight.data import DATASETS, Dataset, Unlabelled, read_either
from darknight.errors import UsageError
from darknight.trust.sealing import RECORDS, Manifest
from darknight.worker.budget import size_in_words

_INPUT, _SEALED, _OUTPUT = "Input", "Sealed set", "Output"
_SOURCES = ", ".join(f"{name}:{form.argument}" if form.argument else name for name, form in DATASETS.items())


def seal(
    data: Annotated[
        str, typer.Argument(help=f"A path, or one of {_SOURCES}. With --verify: the sealed folder.", show_default=False)
    ],
    test_share: Annotated[
        float | None, option(_INPUT, "Set apart for testing, if the data has no test part.  [default: 0.2]")
    ] = None,
    image_size: Annotated[
        int | None, option(_INPUT, "To which pictures in folders are scaled.  [default: 224]")
    ] = None,
    seed: Annotated[int | None, option(_INPUT, "Of the split for testing; not of keys.  [default: 0]")] = None,
    out: Annotated[Path | None, option(_SEALED, "Folder for the sealed set, which must not be there yet.")] = None,
    key: Annotated[
        Path | None, option(_SEALED, "Key file, outside of that folder.  [default: beside it, ending in .key]")
    ] = None,
    verify: Annotated[bool, option(_SEALED, "Open every record of a sealed set instead.", "--verify")] = False,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Encrypt data for an enclave, so that whoever stores it learns its size and nothing else.

    The folder may be given to anybody. The key file stays with you: an enclave gets the key when it has proven what it
    is. Whoever has both has the data; without the key file nobody can ever open the folder. Training on the sealed set
    gives the same bits as on the files themselves. Data without labels (an npz without y, pictures in one folder) are
    for predictions.

    Example:

        darknight seal pictures --out sealed

        darknight seal sealed --verify --key sealed.key

    Exit codes: 0 done, 1 a DarKnight error (with --verify: the set is not as it was sealed), 2 bad usage,
    130 interrupted.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level):
        try:
            if verify:
                given = {"--out": out, "--test-share": test_share, "--image-size": image_size, "--seed": seed}
                summary = _verified(console, Path(data), key, given)
            else:
                settings = {"seed": seed or 0, "test_share": test_share, "image_size": image_size}
                summary = _sealed(console, data, _destination(out, key), settings)
        except KeyboardInterrupt as stop:
            print(
                f"darknight: interrupted; {'nothing was found yet' if verify else 'nothing was kept'}.", file=sys.stderr
            )
            raise typer.Exit(130) from stop
    if json:
        print(dumps(summary, indent=2))
    else:
        Console(highlight=False, emoji=False).print(_table(summary))


def _destination(out: Path | None, key: Path | None) -> Destination:
    if out is None:
        raise UsageError("where to? Say --out FOLDER; or --verify, to look at a sealed set.")
    return Destination(folder=out, key=key or key_beside(out))


def _sealed(console: Console, source: str, to: Destination, settings: dict[str, Any]) -> dict[str, Any]:
    if not 0 <= settings["seed"] < 1 << 63:
        raise UsageError(f"seed {settings['seed']}; needs a whole number of at least 0.")
    with display_on(console) as display:
        with display.stage("reading the data"):
            data = read_either(source, **settings)
        with display.count("sealing", len(data)) as more:
            manifest = seal_dataset(data, to, progress=more)
    return _summary(to.folder, to.key, manifest, data, verified=False)


def _verified(console: Console, folder: Path, key: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    if others := [name for name, value in given.items() if value is not None]:
        raise UsageError(f"--verify changes nothing; drop {', '.join(others)}.")
    key = key or key_beside(folder)
    records = open_with(folder, key)
    with display_on(console) as display, display.count("opening", len(records)) as more:
        data = verify_sealed(records, progress=more)
    return _summary(folder, key, records.manifest, data, verified=True)


def _summary(
    folder: Path, key: Path, manifest: Manifest, data: Dataset | Unlabelled, *, verified: bool
) -> dict[str, Any]:
    """Ready for JSON. `seen` is what everybody can see; the rest is behind the key."""
    return {
        "folder": str(folder),
        "key": str(key),
        "verified": verified,
        "seen": {
            "manifest": manifest.digest.hex(),
            "records": manifest.count,
            "record_bytes": manifest.record_bytes,
            "head_bytes": manifest.head_bytes,
            "bytes": (folder / RECORDS).stat().st_size + manifest.head_bytes + len(manifest.to_bytes()),
        },
        "data": {
            "name": data.name,
            "shape": list(data.shape),
            "classes": data.classes,
            "train_examples": 0 if data.train is None else len(data.train),
            "test_examples": len(data.test),
            "labelled": data.labelled,
        },
    }


def _table(summary: dict[str, Any]) -> RenderableType:
    seen, data = summary["seen"], summary["data"]
    what = "sealed, and every record opens" if summary["verified"] else "sealed"
    table = Table(
        box=box.ROUNDED,
        show_header=False,
        width=80,
        title=f"{escape(data['name'])}: {what}",
        title_style="bold",
        padding=(0, 1),
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    shape = "x".join(map(str, data["shape"])) + (" numbers" if len(data["shape"]) == 1 else "")
    train, test = data["train_examples"], data["test_examples"]
    if data["labelled"] == train + test:
        table.add_row("examples", f"{train:,} for training, {test:,} for testing")
        table.add_row("each", f"{shape}, one of {data['classes']:,} classes", end_section=True)
    else:
        labels = f"{data['labelled']:,} of them with labels" if data["labelled"] else "without labels"
        table.add_row("examples", f"{train + test:,}, {labels}: for predictions alone")
        table.add_row("each", shape, end_section=True)
    table.add_row("folder", escape(f"{summary['folder']}, {size_in_words(seen['bytes'])}"))
    table.add_row(
        "shows", f"{seen['records']:,} records of {seen['record_bytes']:,} bytes, a head of {seen['head_bytes']:,}"
    )
    table.add_row("manifest", seen["manifest"], end_section=True)
    table.add_row("key", escape(summary["key"]))
    if summary["verified"]:
        return table
    return Group(
        table,
        Text("The folder may be given to anybody. Keep the key file, and to yourself: whoever"),
        Text("has both has the data, and without the key nobody can open the folder."),
    )
