"""darknight bench: the flags, and the order in which things are measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from darknight.bench import (
    LEAST_TIMES,
    LINKS,
    SCHEMES,
    Ceiling,
    Change,
    Results,
    append,
    changes,
    machine,
    measure_bandwidth,
    measure_ceiling,
    measure_memory,
    measure_passes,
    measure_rivals,
    new_line,
    program,
)
from darknight.cli.bench_tables import tables
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import Display, display_on
from darknight.cli.scheme_options import PLACE_HELP
from darknight.errors import UsageError
from darknight.models import canonical
from darknight.ops.place import STRUCTURE, check_place

_WORK, _OUTPUT = "What is measured", "Output"
_BATCHES = {"vgg16": 8, "resnet152": 8}  # others: 16
_MODELS = {"train": ("vgg16", "resnet152", "mobilenet-v2"), "infer": ("vgg16", "mobilenet-v1")}
_WHAT = ("ceiling", "overhead", "kernels", "memory", "rivals")
_SIZE, _PASS_BYTES = 224, 64 << 20
_QUICK_MODEL, _QUICK_SIZE, _QUICK_BATCH, _QUICK_BYTES, _QUICK_RIVAL_BATCH = "resnet-small", 32, 4, 4 << 20, 8
_RIVAL_BATCH = 64


def bench(
    model: Annotated[
        list[str] | None,
        option(_WORK, "Of `darknight models`; may be repeated.  [default: those of the paper]"),
    ] = None,
    passes: Annotated[str, option(_WORK, "train, infer, or both.", "--pass")] = "both",
    links: Annotated[str, option(_WORK, "Of ceilings: shm (shared memory), sealed (encrypted), or both.")] = "both",
    what: Annotated[
        list[str] | None,
        option(_WORK, f"One of {', '.join(_WHAT)}; may be repeated.  [default: all; rivals if --rivals is given]"),
    ] = None,
    batch: Annotated[
        int | None, option(_WORK, "Examples in a step.  [default: 8 for vgg16 and resnet152, else 16]")
    ] = None,
    size: Annotated[int | None, option(_WORK, "Pixels a side.  [default: 224]")] = None,
    place: Annotated[str, option(_WORK, PLACE_HELP)] = STRUCTURE,
    times: Annotated[int, option(_WORK, "Rounds; the best counts. Fewer than 5 say little.")] = LEAST_TIMES,
    rivals: Annotated[
        Path | None, option(_WORK, "Python of an environment that has CrypTen and TenSEAL, to measure them too.")
    ] = None,
    quick: Annotated[
        bool, option(_WORK, "A small network at 32x32, batch 4: to see that it works, in a minute.", "--quick")
    ] = False,
    layers: Annotated[bool, option(_OUTPUT, "Show the time of every layer too.", "--layers")] = False,
    history: Annotated[
        Path | None,
        option(_OUTPUT, "Append the ratios to this file, and show them beside earlier ones of this machine."),
    ] = None,
    fail_on_regression: Annotated[
        bool,
        option(
            _OUTPUT,
            "With --history: exit with 1 if a ratio is more than 10 % worse than the last.",
            "--fail-on-regression",
        ),
    ] = False,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the tables.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Measure how much faster private training could be than training in the enclave alone.

    The ceiling is what the plain step takes of one processor, over what the enclave takes of it in the protected step:
    no number of workers can give more. Workers of this machine take part, and their time does not count. K=4, M=1,
    gradients masked, Freivalds on every pass. Beside it: what memory allows (roofline), the time that passes with all
    workers on this machine (overhead), encode and decode over a copy (kernels), peak memory over the plain step's.
    Only ratios of one run mean anything, on a machine that does little else. Everything takes hours; choose a part.

    Examples, in a minute each:

        darknight bench --quick

        darknight bench --model resnet18 --pass train --what ceiling --size 64 --history bench.jsonl

    Exit codes: 0 done, also if something became slower; 1 a DarKnight error, or with --fail-on-regression something
    became slower; 2 bad usage; 130 interrupted.
    """
    check_place(place)
    if fail_on_regression and history is None:
        raise UsageError(
            "--fail-on-regression without --history; there is nothing to compare with. Add --history FILE."
        )
    wanted = set(_chosen("--what", what, _WHAT) if what else _WHAT[:-1])
    wanted |= {"rivals"} if rivals is not None else set()
    plan = _Plan(
        kinds=tuple(_MODELS) if passes == "both" else _chosen("--pass", [passes], (*_MODELS, "both")),
        links=tuple(LINKS) if links == "both" else _chosen("--links", [links], (*LINKS, "both")),
        models=tuple(canonical(name) for name in model or ([_QUICK_MODEL] if quick else [])),
        batch=_QUICK_BATCH if quick and batch is None else batch,
        size=size if size is not None else _QUICK_SIZE if quick else _SIZE,
        times=times,
        place=place,
        quick=quick,
    )
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level), display_on(console) as display:
        found = plan.measure(wanted, rivals, display)
    compared = None if history is None else _kept(found, history)
    if json:
        words = found.words()
        if compared is not None:
            words["history"] = {each.path: _words(each) for each in compared}
        print(dumps(words, indent=2, allow_nan=False))
    else:
        out = Console(highlight=False, emoji=False)
        for table in tables(found, compared, layers=layers):
            out.print(table)
    if fail_on_regression and any(each.regressed for each in compared or ()):
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """models: none for those of the paper. batch: None for each model's own."""

    kinds: tuple[str, ...]
    links: tuple[str, ...]
    models: tuple[str, ...]
    batch: int | None
    size: int
    times: int
    place: str
    quick: bool

    def measure(self, wanted: set[str], rivals: Path | None, display: Display) -> Results:
        ceilings: list[Ceiling] = []
        overheads: dict[str, list[Ceiling]] = {}
        if "ceiling" in wanted:
            ceilings = [
                self._step(display, kind, name, links, "field")
                for kind in self.kinds
                for name in self._models(kind)
                for links in self.links
            ]
        if "overhead" in wanted and "train" in self.kinds:
            known = {each.model: each for each in ceilings if each.training and each.links == "shm"}
            for scheme in SCHEMES:
                overheads[scheme] = [
                    known[name]
                    if scheme == "field" and name in known
                    else self._step(display, "train", name, "shm", scheme)
                    for name in self._models("train")
                ]
        memory = []
        if "memory" in wanted and "train" in self.kinds:
            for name in self._models("train"):
                with display.stage(f"memory of {name}"):
                    memory.append(measure_memory(name, batch=self._batch(name), size=self.size))
        passes = bandwidth = contests = None
        if "kernels" in wanted:
            with display.stage("encode and decode"):
                passes = measure_passes(_QUICK_BYTES if self.quick else _PASS_BYTES, times=self.times)
        if ceilings:
            with display.stage("speed of memory"):
                bandwidth = measure_bandwidth(times=self.times)
        if "rivals" in wanted:
            with display.stage("rivals"):
                contests = measure_rivals(
                    rivals, batch=_QUICK_RIVAL_BATCH if self.quick else _RIVAL_BATCH, times=self.times
                )
        return Results(
            machine=machine(),
            program=program(),
            ceilings=ceilings,
            overheads=overheads,
            passes=passes,
            bandwidth=bandwidth,
            memory=memory,
            rivals=contests,
        )

    def _models(self, kind: str) -> tuple[str, ...]:
        return self.models or _MODELS[kind]

    def _batch(self, name: str) -> int:
        return _BATCHES.get(name, 16) if self.batch is None else self.batch

    def _step(self, display: Display, kind: str, name: str, links: str, scheme: str) -> Ceiling:
        with display.stage(f"{kind} {name}, {links}, {scheme}"):
            return measure_ceiling(
                name,
                batch=self._batch(name),
                size=self.size,
                training=kind == "train",
                times=self.times,
                scheme=SCHEMES[scheme],
                links=links,
                place=self.place,
            )


def _chosen(flag: str, given: Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(given)
    for name in names:
        if name not in known:
            raise UsageError(f"{flag} {name}; needs {', '.join(known[:-1])} or {known[-1]}.")
    return names


def _kept(found: Results, path: Path) -> list[Change]:
    """Appends to the history; the ratios beside those of earlier runs."""
    ratios, conditions = found.ratios()
    line = new_line(ratios, conditions, machine=found.machine, program=found.program)
    return changes(line, append(path, line))


def _words(change: Change) -> dict[str, float | bool | None]:
    return {"now": change.now, "last": change.last, "best": change.best, "regressed": change.regressed}
