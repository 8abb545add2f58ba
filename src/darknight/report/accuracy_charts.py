"""Figures of what masking does to accuracy: training by epoch, inference by noise, and what may leak at that noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from darknight.report.drawn import COLOURS, MARKS, QUOTED, Drawn, dressed, legend_above, panels, whole_numbers
from darknight.report.experiment_file import Experiment
from darknight.report.paper_quotes import TABLE_2

_CLEAR, _FIELD = "clear", "field"


def settings_of(experiment: Experiment) -> list[str]:
    """Clear and the field first, then noise from the weakest."""
    found = {cell["setting"]: cell["noise"] for cell in experiment.cells.values()}
    order = {_CLEAR: (0, 0.0), _FIELD: (1, 0.0)}
    return sorted(found, key=lambda name: order.get(name, (2, _strength(found[name]))))


def _strength(noise: Mapping[str, float] | None) -> float:
    return 0.0 if noise is None else noise["variance"] + noise["mean"] ** 2


def models_of(experiment: Experiment) -> list[str]:
    """In the order in which they were planned."""
    found = {cell["model"] for cell in experiment.cells.values()}
    return [model for model in dict.fromkeys(name.split("/")[0] for name in experiment.planned) if model in found]


def cell_of(experiment: Experiment, model: str, setting: str) -> Mapping[str, Any] | None:
    return experiment.cells.get(f"{model}/{setting}")


def uncertainty(examples: int) -> float:
    """Half the width of the 95 % interval of an accuracy near one half, in points: by how much chance moves it.

    >>> round(uncertainty(500), 1)
    4.4
    """
    return 196 * math.sqrt(0.25 / examples)


def accuracy_figure(experiment: Experiment) -> Drawn:
    """Accuracy and loss by epoch, a column for each network."""
    models, settings, scale = models_of(experiment), settings_of(experiment), experiment.scale
    figure, grid = panels(len(models), 2, height=5.6, sharex=True, sharey="row")
    for column, model in enumerate(models):
        for number, setting in enumerate(settings):
            cell = cell_of(experiment, model, setting)
            if cell is None or not cell["epochs"]:
                continue
            epochs = range(1, len(cell["epochs"]) + 1)
            style = _line(number, setting)
            grid[0][column].plot(epochs, [100 * epoch["accuracy"] for epoch in cell["epochs"]], **style)
            grid[1][column].plot(epochs, [epoch["loss"] for epoch in cell["epochs"]], **style)
        left = column == 0
        dressed(grid[0][column], title=model, y="test accuracy (%)" if left else "")
        dressed(grid[1][column], x="epoch (passes over the training images)", y="training loss (nats)" if left else "")
        whole_numbers(grid[1][column], _ticks(scale["epochs"]))
    legend_above(figure, grid[0][0], columns=len(settings))
    worst = _worst_difference(experiment, models, settings)
    return Drawn(
        name="accuracy",
        title="Accuracy by epoch: in the clear, under the paper's noise, in the field (measured)",
        caption=f"Measured: {scale['train_examples']:,} training and {scale['test_examples']:,} test images of "
        f"{scale['data']}, {scale['epochs']} epochs, batch {scale['batch_size']}, one seed. What to see: whether lines "
        f"stay with the dashed one, which is training in the clear. {worst} The choice of "
        f"test images alone moves an accuracy by {uncertainty(scale['test_examples']):.1f} points (95 %). The losses "
        "below are of the same batches in the same order, and show more: where they lie on each other, "
        "masking changed next to nothing.",
        figure=figure,
    )


def _line(number: int, setting: str) -> dict[str, Any]:
    clear = setting == _CLEAR
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKS[number % len(MARKS)],
        "markersize": 4,
        "linewidth": 2.2 if clear else 1.3,
        "linestyle": "--" if clear else "-",
        "label": setting,
        "zorder": 3 if clear else 2,
    }


def _ticks(epochs: int) -> Sequence[int]:
    step = max(1, -(-epochs // 8))
    return range(step, epochs + 1, step)


def _worst_difference(experiment: Experiment, models: Sequence[str], settings: Sequence[str]) -> str:
    """In words, at the last epoch."""
    found = []
    for model in models:
        clear = cell_of(experiment, model, _CLEAR)
        for setting in settings:
            cell = cell_of(experiment, model, setting)
            if clear and cell and cell is not clear and clear["epochs"] and cell["epochs"] and not cell["stopped"]:
                found.append((100 * (cell["epochs"][-1]["accuracy"] - clear["epochs"][-1]["accuracy"]), model, setting))
    if not found:
        return ""
    points, model, setting = max(found, key=lambda each: abs(each[0]))
    return f"After the last epoch the largest difference from it is {points:+.1f} points ({model}, {setting})."


def inference_figure(experiment: Experiment) -> Drawn:
    """Top-1 accuracy, and how often the answer is that of the plain model."""
    models, settings, scale = models_of(experiment), settings_of(experiment), experiment.scale
    figure, grid = panels(2, height=3.9)
    for row, model in enumerate(models):
        shown = [(place, cell) for place, name in enumerate(settings) if (cell := cell_of(experiment, model, name))]
        places = [place + 0.18 * (row - (len(models) - 1) / 2) for place, _ in shown]
        style = {"color": COLOURS[row + 1], "marker": MARKS[row + 1], "markersize": 6, "linestyle": "", "label": model}
        half = uncertainty(scale["test_examples"])
        top = [100 * cell["top1"] for _, cell in shown]
        grid[0][0].errorbar(places, top, yerr=half, elinewidth=0.8, capsize=2, **style)
        grid[0][1].plot(places, [100 * cell["agreement"] for _, cell in shown], **style)
    for axes, y in ((grid[0][0], "top-1 accuracy (%)"), (grid[0][1], "same answer as the plain model (%)")):
        dressed(axes, x="noise N(mean, variance), in units of the bound C1 of a layer's input", y=y)
        axes.set_xticks(range(len(settings)), [name.replace(", ", ",\n") for name in settings])
    least = 100 * min((cell["agreement"] for cell in experiment.cells.values()), default=1.0)
    grid[0][1].set_ylim(bottom=least - 0.1 * (100.5 - least), top=100 + 0.05 * (100.5 - least))
    legend_above(figure, grid[0][1], columns=len(models))
    return Drawn(
        name="inference",
        title="Inference under the noise of the paper's Table 2 (measured)",
        caption=f"Measured: {scale['test_examples']:,} test images of {scale['data']}, networks trained in the clear "
        f"on {scale['train_examples']:,} for {scale['epochs']} epochs. Bars: what chance does (95 %). What to see: "
        "left, whether noise moves an accuracy out of its bar; right, which shows more, how many answers are not the "
        f"plain model's: at worst {least:.1f} % are the same.",
        figure=figure,
    )


def leakage_of(experiment: Experiment) -> dict[str, dict[str, float]]:
    """By setting, the largest bounds over all networks, in nats a scalar and masking."""
    found: dict[str, dict[str, float]] = {}
    for cell in experiment.cells.values():
        for key, value in (cell["leakage"] or {}).items():
            kept = found.setdefault(cell["setting"], {})
            kept[key] = max(value, kept.get(key, 0.0))
    return found


def leakage_figure(experiment: Experiment) -> Drawn:
    """Bounds in nats a scalar, by noise: by theorem, printed, ours."""
    cells = leakage_of(experiment)
    settings = [name for name in settings_of(experiment) if name in cells and name != _FIELD]
    figure, grid = panels(1, width=8.0, height=3.9)
    axes = grid[0][0]
    places = range(len(settings))
    printed = {name: TABLE_2[name].leakage for name in settings if name in TABLE_2}
    axes.plot(
        [place for place in places if printed.get(settings[place])],
        [value for name in settings if (value := printed.get(name))],
        **_dots(QUOTED, "P", "printed in Table 2 (quoted)"),
        markerfacecolor="white",
    )
    for key, colour, mark, label in (
        ("theorem", COLOURS[3], "v", "Theorem 1, computed"),
        ("dense", COLOURS[1], "o", "ours, the paper's dense code"),
        ("systematic", COLOURS[2], "D", "ours, the systematic code"),
    ):
        axes.plot(places, [cells[name][key] for name in settings], **_dots(colour, mark, label))
    axes.set_yscale("log")
    dressed(
        axes,
        x="noise N(mean, variance), in units of the bound C1 of a layer's input",
        y="bound of leakage (nats a scalar and masking)",
    )
    axes.set_xticks(places, settings)
    legend_above(figure, axes, columns=2)
    return Drawn(
        name="leakage",
        title="What one masking may leak at that noise (bounds, computed; one column quoted)",
        caption="Bounds on what one worker learns about one scalar from one masking; they add up over features, layers "
        "and steps. What to see: the paper prints twice what its Theorem 1 gives; the bound for the same dense code, "
        "with its noise spread evenly and no assumption on the inputs, is smaller, and that of the systematic code "
        "smaller again. In the field, our default, it is zero and cannot be drawn.",
        figure=figure,
    )


def _dots(colour: str, mark: str, label: str) -> dict[str, Any]:
    return {"color": colour, "marker": mark, "markersize": 8, "linestyle": "", "label": label}
