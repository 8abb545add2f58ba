"""A folder of results: one file for each experiment, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from darknight.errors import DataError
from darknight.report.accuracy_charts import accuracy_figure, inference_figure, leakage_figure
from darknight.report.cost_charts import scaling_figure, speed_up_figure, time_split_figure
from darknight.report.drawn import Drawn
from darknight.report.experiment_file import Experiment, read_experiment

# In the order of the page, with the command that measures each.
COMMANDS: Mapping[str, str] = {
    "accuracy": "python experiments/accuracy.py --out results/accuracy.json",
    "inference": "python experiments/inference.py --out results/inference.json",
    "time-split": "python experiments/time_split.py --out results/time-split.json",
    "features": "python experiments/features.py --out results/features.json",
    "scaling": "python experiments/scaling.py --out results/scaling.json",
}
_FIGURES = {
    "accuracy": (accuracy_figure,),
    "inference": (inference_figure, leakage_figure),
    "time-split": (time_split_figure, speed_up_figure),
    "features": (),
    "scaling": (scaling_figure,),
}


def read_results(folder: Path) -> dict[str, Experiment]:
    """By name, in the order of the page. Everything that ends in .json there must be an experiment, each once."""
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be read ({error.strerror}). Give a folder of results.") from error
    found: dict[str, tuple[Path, Experiment]] = {}
    for path in files:
        experiment = read_experiment(path)
        if experiment.name in found:
            first = found[experiment.name][0].name
            raise DataError(f"{folder}: {first} and {path.name} are both {experiment.name}. Take one out.")
        found[experiment.name] = path, experiment
    if not found:
        raise DataError(f"{folder}: no results. Measure something first: {COMMANDS['scaling']} --quick.")
    return {name: found[name][1] for name in COMMANDS if name in found}


def figures_of(experiments: Mapping[str, Experiment]) -> dict[str, list[Drawn]]:
    """By experiment; none for one in which no cell is complete."""
    return {
        name: [draw(experiment) for draw in _FIGURES[name]] if experiment.cells else []
        for name, experiment in experiments.items()
    }
