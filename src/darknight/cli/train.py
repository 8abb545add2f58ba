"""darknight train: the flags, and what is shown at the end."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from darknight.cli.files import OutputFolder
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import display_on
from darknight.cli.scheme_options import Arithmetic, SchemeOptions
from darknight.cli.training import Settings, read_and_build, run_training
from darknight.cli.training_table import training_table
from darknight.data import DATASETS
from darknight.models import MODELS

_TRAINING, _MASKING, _WORKERS, _OUTPUT = "Training", "Masking", "Workers", "Output"


def train(
    model: Annotated[str, option(_TRAINING, f"One of {', '.join(sorted(MODELS))}.")] = "small-cnn",
    data: Annotated[str, option(_TRAINING, f"One of {', '.join(sorted(DATASETS))}.")] = "digits",
    epochs: Annotated[int, option(_TRAINING, "Passes over the training examples.")] = 8,
    batch_size: Annotated[int, option(_TRAINING, "Examples in one step.")] = 64,
    learning_rate: Annotated[float, option(_TRAINING, "Of SGD with momentum.")] = 0.05,
    seed: Annotated[int, option(_TRAINING, "Of weights, split, batches, rounding; not of masks.")] = 0,
    clear: Annotated[bool, option(_TRAINING, "Also train in the clear.", "--clear/--no-clear")] = True,
    inputs: Annotated[int | None, option(_MASKING, "K, examples masked together.  [default: 4]")] = None,
    colluders: Annotated[int | None, option(_MASKING, "M, workers that may collude.  [default: 1]")] = None,
    spares: Annotated[int | None, option(_MASKING, "E, redundant workers.  [default: 0]")] = None,
    arithmetic: Annotated[
        Arithmetic,
        option(_MASKING, "field: exact, shares say nothing. real: floats, a bounded leak. paper: as published."),
    ] = Arithmetic.FIELD,
    noise_std: Annotated[float | None, option(_MASKING, "Of real arithmetic, in times the largest input.")] = None,
    mixing: Annotated[str | None, option(_MASKING, "systematic or dense.  [default: systematic]")] = None,
    integrity: Annotated[str | None, option(_MASKING, "freivalds, parity, both or off.  [default: freivalds]")] = None,
    fleet: Annotated[
        Path | None, option(_WORKERS, "Fleet file with the workers.  [default: start some on this machine]")
    ] = None,
    insecure_one_operator: Annotated[
        bool, option(_WORKERS, "Let one operator hold all shares: nothing is hidden.", "--insecure-one-operator")
    ] = False,
    patience: Annotated[
        float | None, option(_WORKERS, "Seconds for a task.  [default: several times what others need]")
    ] = None,
    output: Annotated[Path, option(_OUTPUT, "Folder for summary.json and shares.png.")] = Path("darknight-train"),
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Train a model on masked shares, beside the same training in the clear.

    Each worker gets the weights and its shares. Without --fleet the workers are processes on this machine, which only
    simulate separate operators. At the end there is a table of what it cost and what it protected, and a picture of
    what one worker receives.

    Example, with two colluding workers tolerated and a result for a script:

        darknight train --colluders 2 --epochs 3 --output run7 --json > run7.json

    With workers of several operators (darknight fleet check says whether they are all there):

        darknight train --fleet fleet.toml

    Settings come from flags, then from variables such as DARKNIGHT_TRAIN_EPOCHS, then from the table [train] of
    darknight.toml in the current directory.

    Exit codes: 0 done, 1 a DarKnight error, 2 bad usage, 130 interrupted.
    """
    console = Console(stderr=True, highlight=False)
    with messages_on(console, log_level):
        settings = Settings(
            model=model,
            data=data,
            scheme=SchemeOptions(
                arithmetic=arithmetic,
                inputs=inputs,
                colluders=colluders,
                spares=spares,
                noise_std=noise_std,
                mixing=mixing,
                integrity=integrity,
            ).scheme(),
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
            clear=clear,
            fleet=fleet,
            insecure_one_operator=insecure_one_operator,
            patience=patience,
        )
        examples, network = read_and_build(settings)
        folder = OutputFolder(output)
        try:
            with display_on(console) as display:
                summary, picture = run_training(settings, examples, network, display)
        except KeyboardInterrupt as stop:
            where = f" {stop}" if str(stop) else ""
            print(f"darknight: interrupted{where}; nothing was written.", file=sys.stderr)
            raise typer.Exit(130) from stop
    files = {"picture": folder.write("shares.png", picture), "summary": output / "summary.json"}
    summary["files"] = {kind: str(path) for kind, path in files.items()}
    text = dumps(summary, indent=2)
    folder.write("summary.json", f"{text}\n".encode())
    if json:
        print(text)
    else:
        Console(highlight=False).print(training_table(summary))
