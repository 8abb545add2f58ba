"""darknight bench: the flags, and what is shown at the end."""

from __future__ import annotations

from json import dumps
from typing import Annotated, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from darknight.bench import LEAST_TIMES, Ceiling, Passes, measure_ceiling, measure_passes
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import display_on
from darknight.cli.scheme_options import PLACE_HELP
from darknight.errors import UsageError
from darknight.models import canonical
from darknight.ops.place import STRUCTURE, check_place

_WORK, _OUTPUT = "What is measured", "Output"
_BATCHES = {"vgg16": 8, "resnet152": 8}  # others: 16
_MODELS = {"train": ("vgg16", "resnet152", "mobilenet-v2"), "infer": ("vgg16", "mobilenet-v1")}


def bench(
    model: Annotated[
        list[str] | None,
        option(_WORK, "Of `darknight models`; may be repeated.  [default: those of the paper]"),
    ] = None,
    what: Annotated[str, option(_WORK, "train, infer, or both.", "--pass")] = "both",
    batch: Annotated[
        int | None, option(_WORK, "Examples in a step.  [default: 8 for vgg16 and resnet152, else 16]")
    ] = None,
    size: Annotated[int, option(_WORK, "Pixels a side.")] = 224,
    place: Annotated[str, option(_WORK, PLACE_HELP)] = STRUCTURE,
    times: Annotated[int, option(_WORK, "Rounds; the best counts. Fewer than 5 say little.")] = LEAST_TIMES,
    layers: Annotated[bool, option(_OUTPUT, "Show the time of every layer too.", "--layers")] = False,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the tables.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Measure how much faster private training could be than training in the enclave alone.

    The ceiling is what the plain step takes of one processor, over what the enclave takes of it in the protected step:
    no number of workers can give more. Workers of this machine take part, and their time does not count. K=4, M=1,
    gradients masked, Freivalds on every pass. Only ratios of one run mean anything, on a machine that does little else.

    Example, in half a minute:

        darknight bench --model resnet18 --pass train --size 64 --times 5

    Exit codes: 0 done, 1 a DarKnight error, 2 bad usage, 130 interrupted.
    """
    check_place(place)
    kinds = _kinds(what)
    wanted = [(kind, canonical(name)) for kind in kinds for name in (model or _MODELS[kind])]
    found: list[Ceiling] = []
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level), display_on(console) as display:
        for kind, name in wanted:
            with display.stage(f"{kind} {name}"):
                found.append(
                    measure_ceiling(
                        name,
                        batch=_BATCHES.get(name, 16) if batch is None else batch,
                        size=size,
                        training=kind == "train",
                        times=times,
                        place=place,
                    )
                )
        with display.stage("encode and decode"):
            passes = measure_passes(times=times)
    if json:
        print(dumps(summary(found, passes), indent=2))
    else:
        out = Console(highlight=False, emoji=False)
        for each in found:
            out.print(_table(each, layers))
        out.print(
            f"encode {passes.encode_over_copy:.2f}, decode {passes.decode_over_copy:.2f} of a copy of the same bytes; "
            f"noise {passes.noise_over_encode:.2f} of the encode"
        )


def summary(found: list[Ceiling], passes: Passes) -> dict[str, Any]:
    """ceiling.shm.PASS.MODEL is the ratio; breakdown.shm.PASS.MODEL says what it is made of, in seconds.

    kernels: of a copy of the same bytes.
    """
    ceilings: dict[str, dict[str, float]] = {}
    details: dict[str, dict[str, Any]] = {}
    for each in found:
        kind, name = "train" if each.training else "infer", each.model.replace("-", "_")
        ceilings.setdefault(kind, {})[name] = each.ratio
        details.setdefault(kind, {})[name] = {
            "batch": each.batch,
            "size": each.size,
            "times": each.times,
            "place": each.place,
            "masked_layers": each.masked,
            "plain": {"seconds": each.plain, "layout": each.layout},
            "enclave": {"seconds": each.enclave, "phases": dict(each.phases), "layers": dict(each.layers)},
            "wall_over_plain": each.wall,
        }
    kernels = {"encode_over_copy": passes.encode_over_copy, "decode_over_copy": passes.decode_over_copy}
    return {"ceiling": {"shm": ceilings}, "kernels": kernels, "breakdown": {"shm": details}}


def _kinds(what: str) -> tuple[str, ...]:
    if what not in (*_MODELS, "both"):
        raise UsageError(f"--pass {what}; needs train, infer or both.")
    return tuple(_MODELS) if what == "both" else (what,)


def _table(found: Ceiling, layers: bool) -> RenderableType:
    """Where the enclave's time goes, in parts of its step and of the plain one."""
    kind = "training" if found.training else "inference"
    title = f"{found.model}, {kind}, batch {found.batch} at {found.size}x{found.size}: ceiling {found.ratio:.2f}x"
    parts = _new_table(title)
    for name, seconds in found.phases.items():
        parts.add_row(name, f"{seconds / found.enclave:.1%}", f"{seconds / found.plain:.3f}")
    where = f"{found.masked} layers masked (by {found.place})"
    note = (
        f"{where}; plain: {found.layout}; best of {found.times}; wall time with local workers {found.wall:.1f}x plain"
    )
    by_layer = _new_table("by layer, without what stays")
    for layer, spent in found.layers.items():
        total = sum(spent.values())
        by_layer.add_row(layer, f"{total / found.enclave:.1%}", f"{total / found.plain:.3f}")
    return Group(parts, Text(note), *([by_layer] if layers else []))


def _new_table(title: str) -> Table:
    table = Table(box=box.ROUNDED, title=title, title_style="bold", title_justify="left", padding=(0, 1))
    table.add_column("enclave", overflow="fold")
    table.add_column("of its step", justify="right", no_wrap=True)
    table.add_column("of the plain step", justify="right", no_wrap=True)
    return table
