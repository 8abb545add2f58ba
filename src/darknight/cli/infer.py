"""darknight infer: the flags, and what is shown at the end."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from darknight.cli.files import OutputFolder
from darknight.cli.inference import InferenceSettings, predictions_file, read_inputs, run_inference
from darknight.cli.inference_table import inference_table
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import display_on
from darknight.cli.scheme_options import Arithmetic, SchemeOptions
from darknight.cli.training import Hands

_INPUT, _MASKING, _WORKERS, _OUTPUT = "Input", "Masking", "Workers", "Output"


def infer(
    checkpoint: Annotated[Path, option(_INPUT, "A file or folder that darknight train wrote.")],
    data: Annotated[str, option(_INPUT, "A path, or what darknight train --data takes.")],
    batch_size: Annotated[int | None, option(_INPUT, "Examples at once.  [default: 256, fewer of large ones]")] = None,
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
    output: Annotated[Path | None, option(_OUTPUT, "File for the predictions: .csv or .json.")] = None,
    top: Annotated[int, option(_OUTPUT, "Classes in it for each example.")] = 5,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Run a trained model on masked shares.

    It takes K + M + E workers: fewer than training, as there are no gradients to mask. Of data with a test part that
    part is used, otherwise all of it, normalised as in training. Where labels are known, accuracy is shown.

    Example, with the best model of a training, on pictures in a folder:

        darknight infer --checkpoint run7 --data pictures --output found.csv

    Exit codes: 0 done, 1 a DarKnight error, 2 bad usage, 130 interrupted.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    with messages_on(console, log_level):
        settings = InferenceSettings(
            checkpoint=checkpoint,
            data=data,
            scheme=SchemeOptions(
                arithmetic=arithmetic,
                inputs=inputs,
                colluders=colluders,
                spares=spares,
                noise_std=noise_std,
                mixing=mixing,
                integrity=integrity,
            )
            .scheme()
            .for_inference(),
            hands=Hands(file=fleet, insecure_one_operator=insecure_one_operator, patience=patience),
            batch_size=batch_size,
            top=top,
            output=output,
        )
        given = read_inputs(settings)
        folder = None if output is None else OutputFolder(output.parent)
        try:
            with display_on(console) as display:
                summary, rows = run_inference(settings, given, display)
        except KeyboardInterrupt as stop:
            print("darknight: interrupted; nothing was written.", file=sys.stderr)
            raise typer.Exit(130) from stop
    if folder is not None and output is not None:
        summary["file"] = str(folder.write(output.name, predictions_file(output, rows, summary)))
    if json:
        print(dumps(summary, indent=2))
    else:
        Console(highlight=False, emoji=False).print(inference_table(summary))
