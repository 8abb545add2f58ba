"""darknight models: the networks that can be trained by name, and what each costs."""

from __future__ import annotations

import re
from dataclasses import asdict
from json import dumps
from typing import Annotated, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from darknight.cli.messages import option
from darknight.cli.progress import display_on
from darknight.errors import UsageError
from darknight.models import MODELS, Description, check_sizes, describe

_INPUT, _OUTPUT = "Input", "Output"


def models(
    shape: Annotated[str, option(_INPUT, "Of an image: channels x height x width.")] = "3x224x224",
    classes: Annotated[int, option(_INPUT, "What the model tells apart.")] = 1000,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
) -> None:
    """List the models that can be trained by name, with what each costs for images of one shape.

    MACs are multiplications with a weight in the forward pass of one image. Bilinear layers are convolutions and linear
    layers: what workers compute on masked shares. Networks with two forms are built as for ImageNet if both sides of
    an image have 64 pixels or more, and as for CIFAR below.

    Example, for CIFAR-10:

        darknight models --shape 3x32x32 --classes 10

    Exit codes: 0 done, 2 bad usage, 130 interrupted.
    """
    wanted = shape_in(shape)
    check_sizes(wanted, classes)
    with display_on(Console(stderr=True, highlight=False, emoji=False)) as display, display.stage("counting"):
        found = {
            name: describe(name, wanted, classes) if entry.form_for(wanted) else None for name, entry in MODELS.items()
        }
    if json:
        rows = [_words(name, description) for name, description in found.items()]
        print(dumps({"shape": list(wanted), "classes": classes, "models": rows}, indent=2))
    else:
        Console(highlight=False, emoji=False).print(_table(found, shape.lower(), classes))


def shape_in(text: str) -> tuple[int, int, int]:
    """What --shape says."""
    sizes = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text.lower())
    if sizes is None:
        raise UsageError(f"--shape {text}; needs channels x height x width, such as 3x224x224.")
    channels, height, width = map(int, sizes.groups())
    return channels, height, width


def _words(name: str, found: Description | None) -> dict[str, Any]:
    """The same keys for a model that does not take such images, with null for what cannot be said."""
    if found is None:
        entry = MODELS[name]
        counted = dict.fromkeys(("form", "parameters", "macs", "bilinear_layers"))
        return {"name": name, **counted, "smallest": entry.smallest, "note": entry.note}
    return {key: value for key, value in asdict(found).items() if key not in ("shape", "classes")}


def _table(found: dict[str, Description | None], shape: str, classes: int) -> RenderableType:
    title = f"{len(found)} models, images of {shape}, {classes:,} class{'es'[: 2 * (classes != 1)]}"
    table = Table(box=box.ROUNDED, title=title, title_style="bold", title_justify="left", padding=(0, 1))
    table.add_column("model", no_wrap=True)
    table.add_column("form", no_wrap=True)
    for heading in ("parameters", "MACs", "bilinear"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for name, model in found.items():
        if model is None:
            smallest = MODELS[name].smallest
            table.add_row(name, "-", "-", "-", "-", f"needs {smallest}x{smallest}")
        else:
            numbers = (_short(model.parameters), _short(model.macs), str(model.bilinear_layers))
            table.add_row(name, model.form, *numbers, model.note)
    return Group(
        table,
        Text("MACs: products of one forward pass. bilinear: layers that workers compute."),
        Text("Form: ImageNet from 64x64 pixels on, CIFAR below; any: there is only one."),
    )


def _short(number: int) -> str:
    """15470264320 -> 15.47 G."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return str(number)
