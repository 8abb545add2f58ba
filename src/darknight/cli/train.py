"""darknight train: the flags, and what is shown at the end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from darknight.cli.description_file import read_description
from darknight.cli.files import OutputFolder
from darknight.cli.messages import LogLevel, messages_on, option
from darknight.cli.progress import display_on
from darknight.cli.scheme_options import PLACE_HELP, Arithmetic, SchemeOptions
from darknight.cli.training import Hands, Settings, read_and_build, run_training
from darknight.cli.training_table import training_table
from darknight.coding import Scheme
from darknight.data import DATASETS
from darknight.errors import DarKnightError, UsageError
from darknight.models import MODELS
from darknight.ops.place import STRUCTURE, WORKERS
from darknight.train import OPTIMIZERS, SCHEDULES, Checkpoint, Recipe, Store, check_recipe, checkpoints_in

_TRAINING, _RECIPE, _MASKING = "Training", "Recipe", "Masking"
_WORKERS, _SAVING, _OUTPUT = "Workers", "Checkpoints", "Output"
_SOURCES = ", ".join(f"{name}:{form.argument}" if form.argument else name for name, form in DATASETS.items())
# What a resume takes from the checkpoint; the rest is about this machine and this run.
_KEPT = (
    *("model", "data", "test_share", "image_size", "epochs", "batch_size", "seed", "clear"),
    *("learning_rate", "optimizer", "momentum", "nesterov", "weight_decay", "schedule", "warmup_epochs"),
    *("step_epochs", "step_factor", "clip", "label_smoothing", "augment", "early_stop"),
    *("inputs", "colluders", "spares", "arithmetic", "noise_std", "mixing", "integrity", "leakage_budget", "place"),
)
_BEFORE = {"place": WORKERS}  # what trainings did that were begun before there was such a flag
_MAY_CHANGE = ("epochs", "leakage_budget")  # when it is said in so many words


def train(
    context: typer.Context,
    model: Annotated[
        str, option(_TRAINING, f"One of {', '.join(sorted(MODELS))}, or a file that describes one.")
    ] = "small-cnn",
    data: Annotated[str, option(_TRAINING, f"A path, or one of {_SOURCES}.")] = "digits",
    test_share: Annotated[
        float | None, option(_TRAINING, "Set apart for testing, if the data has no test part.  [default: 0.2]")
    ] = None,
    image_size: Annotated[
        int | None, option(_TRAINING, "To which pictures in folders are scaled.  [default: 224]")
    ] = None,
    epochs: Annotated[int, option(_TRAINING, "Passes over the training examples.")] = 8,
    batch_size: Annotated[int, option(_TRAINING, "Examples in one step.")] = 64,
    seed: Annotated[int, option(_TRAINING, "Of weights, split, batches, rounding; not of masks.")] = 0,
    clear: Annotated[bool, option(_TRAINING, "Also train in the clear.", "--clear/--no-clear")] = True,
    learning_rate: Annotated[float, option(_RECIPE, "The highest, if the schedule changes it.")] = 0.05,
    optimizer: Annotated[str, option(_RECIPE, f"One of {', '.join(OPTIMIZERS)}.")] = "sgd",
    momentum: Annotated[float, option(_RECIPE, "Of sgd.")] = 0.9,
    nesterov: Annotated[bool, option(_RECIPE, "Nesterov's momentum, of sgd.", "--nesterov")] = False,
    weight_decay: Annotated[float, option(_RECIPE, "Not of biases and normalisation layers.")] = 0.0,
    schedule: Annotated[str, option(_RECIPE, f"Of the learning rate: {', '.join(SCHEDULES)}.")] = "constant",
    warmup_epochs: Annotated[int, option(_RECIPE, "Over which the learning rate rises.")] = 0,
    step_epochs: Annotated[int, option(_RECIPE, "Between two steps of the schedule step.")] = 30,
    step_factor: Annotated[float, option(_RECIPE, "Of one such step.")] = 0.1,
    clip: Annotated[float | None, option(_RECIPE, "Largest norm of a gradient.  [default: any]")] = None,
    label_smoothing: Annotated[float, option(_RECIPE, "From 0 to 1.")] = 0.0,
    augment: Annotated[bool, option(_RECIPE, "Crop and flip images, as is usual for the data.", "--augment")] = False,
    early_stop: Annotated[
        int | None, option(_RECIPE, "After so many epochs without a better accuracy.  [default: never]")
    ] = None,
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
    leakage_budget: Annotated[
        float | None, option(_MASKING, "Nats about an example in every batch; stop before more.  [default: any]")
    ] = None,
    place: Annotated[str, option(_MASKING, PLACE_HELP)] = STRUCTURE,
    fleet: Annotated[
        Path | None, option(_WORKERS, "Fleet file with the workers.  [default: start some on this machine]")
    ] = None,
    insecure_one_operator: Annotated[
        bool, option(_WORKERS, "Let one operator hold all shares: nothing is hidden.", "--insecure-one-operator")
    ] = False,
    patience: Annotated[
        float | None, option(_WORKERS, "Seconds for a task.  [default: several times what others need]")
    ] = None,
    checkpoints: Annotated[Path | None, option(_SAVING, "Folder for them.  [default: checkpoints in --output]")] = None,
    save_every: Annotated[float, option(_SAVING, "Seconds between two, less often if saving is slow.")] = 60.0,
    resume: Annotated[bool, option(_SAVING, "Go on with the newest one, with its settings.", "--resume")] = False,
    output: Annotated[Path, option(_OUTPUT, "Folder for summary.json and shares.png.")] = Path("darknight-train"),
    picture: Annotated[
        bool, option(_OUTPUT, "Show what a worker receives of small images.", "--picture/--no-picture")
    ] = True,
    tensorboard: Annotated[Path | None, option(_OUTPUT, "Folder for TensorBoard's curves.  [default: none]")] = None,
    json: Annotated[bool, option(_OUTPUT, "Print one JSON object instead of the table.", "--json")] = False,
    log_level: Annotated[LogLevel, option(_OUTPUT, "What is logged to stderr.")] = LogLevel.WARNING,
) -> None:
    """Train a model on masked shares, beside the same training in the clear.

    Each worker gets the weights and its shares. Without --fleet the workers are processes on this machine, which only
    simulate separate operators. At the end there is a table of what it cost and what it protected, and a picture of
    what one worker receives.

    Example, with two colluding workers tolerated and a result for a script:

        darknight train --colluders 2 --epochs 3 --output run7 --json > run7.json

    CIFAR-10 from the folder that its archive unpacks to, with the usual recipe:

        darknight train --data cifar-10-batches-py --model resnet18 --no-clear \\
          --epochs 90 --schedule cosine --warmup-epochs 5 \\
          --weight-decay 5e-4 --augment

    With workers of several operators (darknight fleet check says whether they are all there):

        darknight train --fleet fleet.toml

    Ctrl-C finishes the step and saves. This, or a crash, costs nothing but time:

        darknight train --output run7 --resume

    Settings come from flags, then from variables such as DARKNIGHT_TRAIN_EPOCHS, then from the table [train] of
    darknight.toml in the current directory.

    Exit codes: 0 done, 1 a DarKnight error, 2 bad usage, 130 interrupted.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    saved = checkpoints or output / "checkpoints"
    with messages_on(console, log_level):
        flags = {name: _plain(context.params[name]) for name in _KEPT}
        checkpoint = _checkpoint(saved) if resume else None
        if checkpoint is not None:
            flags = _flags_of(checkpoint, flags, context, saved)
        settings = Settings(
            model=flags["model"],
            description=read_description(flags["model"]) if checkpoint is None else checkpoint.card.description,
            data=flags["data"],
            test_share=flags["test_share"],
            image_size=flags["image_size"],
            scheme=_scheme(flags),
            recipe=_recipe(flags),
            augment=flags["augment"],
            clear=flags["clear"],
            picture=picture,
            leakage_budget=flags["leakage_budget"],
            place=flags["place"],
            hands=Hands(file=fleet, insecure_one_operator=insecure_one_operator, patience=patience),
            save_every=save_every,
            tensorboard=tensorboard,
            flags=flags,
        )
        settings, examples, network = read_and_build(settings)
        if checkpoint is not None:
            check_recipe(settings.recipe, checkpoint.recipe)
        folder = OutputFolder(output)
        with Store(saved) as store:
            if checkpoint is None:
                _make_room(store)
            again = _command(output, checkpoints, fleet)
            with _told_how_to_resume(store, again), display_on(console) as display:
                summary, drawn = run_training(settings, examples, network, store, checkpoint, display)
    files = {"picture": folder.write("shares.png", drawn)} if drawn else {}
    files |= {"checkpoints": saved, "summary": output / "summary.json"}
    summary["files"] = {kind: str(path) for kind, path in files.items()}
    text = dumps(summary, indent=2)
    folder.write("summary.json", f"{text}\n".encode())
    if json:
        print(text)
    else:
        Console(highlight=False, emoji=False).print(training_table(summary))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Arithmetic) else value


def _scheme(flags: dict[str, Any]) -> Scheme:
    names = ("inputs", "colluders", "spares", "noise_std", "mixing", "integrity")
    chosen = {name: flags[name] for name in names}
    return SchemeOptions(arithmetic=Arithmetic(flags["arithmetic"]), **chosen).scheme()


def _recipe(flags: dict[str, Any]) -> Recipe:
    names = (
        *("epochs", "batch_size", "learning_rate", "optimizer", "momentum", "nesterov", "weight_decay", "schedule"),
        *("warmup_epochs", "step_epochs", "step_factor", "clip", "label_smoothing", "seed", "early_stop"),
    )
    return Recipe(**{name: flags[name] for name in names})


def _checkpoint(folder: Path) -> Checkpoint:
    if folder.is_dir() and checkpoints_in(folder):
        with Store(folder) as store:
            if (found := store.latest()) is not None:
                return found
    raise UsageError(f"--resume: there is no checkpoint in {folder}. Drop it to start anew, or say --checkpoints.")


def _flags_of(checkpoint: Checkpoint, given: dict[str, Any], context: typer.Context, folder: Path) -> dict[str, Any]:
    """The flags that the training was started with. One that is given and differs is refused, but for _MAY_CHANGE."""
    found = checkpoint.extra.get("flags")
    then = {**_BEFORE, **found} if isinstance(found, dict) else {}
    if then.keys() != given.keys():
        raise UsageError(f"{folder} is not of `darknight train`, or of another version of it. Start anew elsewhere.")
    flags = dict(then)
    for name, value in given.items():
        source = context.get_parameter_source(name)
        if (source is None or source.name != "DEFAULT") and value != then[name]:
            if name not in _MAY_CHANGE:
                raise UsageError(
                    f"--{name.replace('_', '-')}: the training in {folder} was started with another value. Drop it, or "
                    "start anew with another --output."
                )
            flags[name] = value
    return flags


def _make_room(store: Store) -> None:
    """A training that is over may be replaced; one that is not might still be wanted."""
    latest = store.latest()
    if latest is not None and not latest.finished:
        raise UsageError(
            f"{store.folder} has a training that stopped after step {latest.step}. Go on with --resume, choose another "
            "--output, or remove that folder."
        )
    store.clear()


def _command(output: Path, checkpoints: Path | None, fleet: Path | None) -> str:
    words = ["darknight", "train", "--resume", "--output", str(output)]
    words += ["--checkpoints", str(checkpoints)] if checkpoints else []
    words += ["--fleet", str(fleet)] if fleet else []
    return shlex.join(words)


@contextmanager
def _told_how_to_resume(store: Store, command: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        where = f" {stop}" if str(stop) else ""
        rest = f"saved. Go on with: {command}" if store.checkpoints() else "nothing was saved."
        print(f"darknight: interrupted{where}; {rest}", file=sys.stderr)
        raise typer.Exit(130) from stop
    except DarKnightError:
        if store.checkpoints():
            print(f"darknight: what was reached is saved. Go on with: {command}", file=sys.stderr)
        raise
