"""darknight plan: the flags, and what is shown."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

from rich.console import Console

from darknight.cli.messages import option
from darknight.cli.models import shape_in
from darknight.cli.plan_summary import plan_summary
from darknight.cli.plan_table import plan_tables
from darknight.cli.progress import display_on
from darknight.cli.scheme_options import PLACE_HELP
from darknight.errors import UsageError
from darknight.fleet.file import read_fleet_file
from darknight.models import MODELS
from darknight.ops.place import COST, STRUCTURE
from darknight.plan import INTEGRITIES, Prices, Request, Speeds, make_plan
from darknight.runtime import measured_rates

_WORK, _FLEET, _TARGET = "Work", "Fleet", "Target"
_PRICES, _SPEEDS, _OUTPUT = "Prices", "Speeds (say yours; see darknight fleet bench)", "Output"
_WORKERS, _EPOCHS = 6, 8
_MOST_WORKERS = 10_000
_SPEED = Speeds()


def plan(
    model: Annotated[str, option(_WORK, f"One of {', '.join(sorted(MODELS))}.")] = "small-cnn",
    shape: Annotated[str, option(_WORK, "Of an example: channels x height x width.")] = "1x8x8",
    classes: Annotated[int, option(_WORK, "What the model tells apart.")] = 10,
    batch_size: Annotated[int, option(_WORK, "Examples in one step.")] = 64,
    examples: Annotated[int, option(_WORK, "In the training data, or to run through the model.")] = 1437,
    epochs: Annotated[int | None, option(_WORK, f"Passes over the examples.  [default: {_EPOCHS}]")] = None,
    inference: Annotated[bool, option(_WORK, "No training: every example once.", "--inference")] = False,
    fleet: Annotated[Path | None, option(_FLEET, "Fleet file with the workers and their operators.")] = None,
    workers: Annotated[
        int | None, option(_FLEET, f"How many, each of an operator of its own.  [default: {_WORKERS}]")
    ] = None,
    operators: Annotated[
        str | None, option(_FLEET, "Who runs them, such as north,south:2 for one and two workers.")
    ] = None,
    local: Annotated[bool, option(_FLEET, "They are on the enclave's machine; for --place cost.", "--local")] = False,
    unreliable: Annotated[
        float, option(_FLEET, "How many of all answers go missing, of 1: what spares are for.")
    ] = Request.unreliable,
    colluders: Annotated[int, option(_TARGET, "M, workers that may pool what they see.")] = 1,
    leakage_target: Annotated[
        float | None, option(_TARGET, "Nats about one example in all, at most.  [default: none, by the field]")
    ] = None,
    arithmetic: Annotated[str, option(_TARGET, "field, real, or auto: what is cheaper within the target.")] = "auto",
    integrity: Annotated[str, option(_TARGET, f"How answers are checked: {', '.join(INTEGRITIES)}.")] = "freivalds",
    spares: Annotated[int | None, option(_TARGET, "E, redundant workers.  [default: as many as pay]")] = None,
    max_inputs: Annotated[int | None, option(_TARGET, "K, examples masked together, at most.")] = None,
    place: Annotated[str, option(_TARGET, PLACE_HELP)] = STRUCTURE,
    enclave_price: Annotated[float | None, option(_PRICES, "Of the enclave, for an hour.")] = None,
    worker_price: Annotated[float | None, option(_PRICES, "Of one worker, for an hour.")] = None,
    worker_gflops: Annotated[float, option(_SPEEDS, "float64 products of a worker.")] = _SPEED.worker_gflops,
    link_gbits: Annotated[float, option(_SPEEDS, "Gbit/s to one worker, encrypted.")] = _SPEED.link_gbits,
    masking_gbytes: Annotated[
        float, option(_SPEEDS, "GB/s of shares masked, unmasked and checked.")
    ] = _SPEED.masking_gbytes,
    memory_gbytes: Annotated[
        float, option(_SPEEDS, "GB/s that torch reads and writes in the enclave.")
    ] = _SPEED.memory_gbytes,
    pass_ms: Annotated[float, option(_SPEEDS, "Milliseconds of any pass, round trip included.")] = _SPEED.pass_ms,
    notice_ms: Annotated[float, option(_SPEEDS, "Milliseconds until a missing answer is noticed.")] = _SPEED.notice_ms,
    enclave_gflops: Annotated[
        float, option(_SPEEDS, "float32 products in the enclave, to compare.")
    ] = _SPEED.enclave_gflops,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the tables.", "--json")] = False,
) -> None:
    """Choose a scheme for a model, a fleet and a target, and show what it takes.

    It compares every number of inputs (K) and of spares (E) that the fleet has workers for, and the two arithmetics if
    there is a target, and takes what is safe and costs least: in money if there are prices, else in time. Bytes, flops
    and leakage are counted as the runtime does it. Hours and cost are estimates from the speeds, and from how many
    answers go missing; replace both by yours. Which layers stay in the enclave, and why, is shown too; --place cost
    measures this machine, in less than a second, so use it where the enclave will be.

    Example: CIFAR-10 on eight workers of five operators, any two workers colluding:

        darknight plan --model resnet18 --shape 3x32x32 --batch-size 128 \\
          --examples 50000 --epochs 90 --colluders 2 \\
          --operators north:2,south:2,east:2,west,hill --worker-gflops 5000

    What would it cost with floats, at most one nat about each example?

        darknight plan --arithmetic real --leakage-target 1 --worker-price 0.5

    A target that cannot be met says what would make it possible.

    Exit codes: 0 done, 1 the target cannot be met, 2 bad usage, 130 interrupted.
    """
    request = Request(
        model=model,
        shape=shape_in(shape),
        classes=classes,
        batch_size=batch_size,
        examples=examples,
        epochs=epochs if epochs is not None else 1 if inference else _EPOCHS,
        training=not inference,
        operators=_operators(fleet, workers, operators),
        colluders=colluders,
        spares=spares,
        integrity=integrity,
        unreliable=unreliable,
        max_inputs=max_inputs,
        arithmetic=arithmetic,
        leakage_target=leakage_target,
        prices=_prices(enclave_price, worker_price),
        place=place,
        rates=measured_rates() if place == COST else None,
        local=local,
        speeds=Speeds(
            worker_gflops=worker_gflops,
            link_gbits=link_gbits,
            masking_gbytes=masking_gbytes,
            memory_gbytes=memory_gbytes,
            pass_ms=pass_ms,
            notice_ms=notice_ms,
            enclave_gflops=enclave_gflops,
        ),
    )
    with (
        display_on(Console(stderr=True, highlight=False, emoji=False)) as display,
        display.stage("counting and choosing"),
    ):
        found = make_plan(request)
    summary = plan_summary(found, fleet)
    if json:
        print(dumps(summary, indent=2))
    else:
        Console(highlight=False, emoji=False).print(plan_tables(summary))


def _operators(fleet: Path | None, workers: int | None, operators: str | None) -> tuple[str, ...]:
    """Who runs each worker."""
    if fleet is not None:
        if workers is not None or operators is not None:
            raise UsageError("--fleet names the workers and their operators. Drop --workers and --operators.")
        return tuple(entry.operator for entry in read_fleet_file(fleet).workers)
    if operators is None:
        count = _WORKERS if workers is None else workers
        if not 1 <= count <= _MOST_WORKERS:
            raise UsageError(f"--workers {count}; needs a whole number from 1 to {_MOST_WORKERS}.")
        return tuple(f"operator {number + 1}" for number in range(count))
    found = tuple(name for entry in operators.split(",") for name in _hands(entry))
    if workers is not None and workers != len(found):
        raise UsageError(f"--workers {workers}, but --operators names {len(found)}. Drop one of them.")
    return found


def _hands(entry: str) -> list[str]:
    """south:2 -> two workers of south."""
    name, colon, count = entry.strip().partition(":")
    if not name or (colon and not (count.isascii() and count.isdigit() and 1 <= int(count[:9]) <= _MOST_WORKERS)):
        raise UsageError(f"--operators: {entry!r}; needs a name, and after a colon how many workers: north,south:2.")
    return [name] * (int(count) if colon else 1)


def _prices(enclave: float | None, worker: float | None) -> Prices | None:
    return None if enclave is None and worker is None else Prices(enclave=enclave or 0.0, worker=worker or 0.0)
