"""Figures of what masking costs: where the time of a step goes, and how time, bytes and error grow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from darknight.report.drawn import COLOURS, MARKS, QUOTED, Drawn, dressed, legend_above, panels, whole_numbers
from darknight.report.experiment_file import Experiment
from darknight.report.paper_quotes import FIGURE_2, FIGURE_2_PRINTED

_PARTS = {  # of the enclave, in the order of the bar
    "masking": ("masking and unmasking", "#0b6e99"),
    "checking": ("checking", "#6d28d9"),
    "links": ("links to workers", "#7cc4ea"),
    "staying": ("layers that stay", "#b45309"),
    "optimizer": ("optimizer", "#f0b95a"),
}
_SWEEPS = {
    "inputs": "K, inputs of a virtual batch (count); M=1",
    "colluders": "M, colluders (count); K=2",
    "batch": "batch (images); K=4, M=1",
}


def time_split_figure(experiment: Experiment) -> Drawn:
    """Two bars for each network, the plain step and the enclave's part, and what workers do beside them."""
    models = [name for name in experiment.planned if name in experiment.cells]
    figure, grid = panels(2, height=1.6 + 0.9 * len(models), width=10.5, sharey=True)
    left, right = grid[0]
    for row, model in enumerate(models):
        cell = experiment.cells[model]
        done = 0.0
        for part, colour in (("linear", "#15803d"), ("non_linear", "#b45309")):
            share = cell["plain"][part]
            words = "plain: linear" if part == "linear" else "plain: all else"
            left.barh(
                row - 0.2, share, 0.34, left=done, color=colour, alpha=0.45, hatch="..", edgecolor="white",
                label=words if row == 0 else None,
            )  # fmt: skip
            done += share
        done = 0.0
        for part, (words, colour) in _PARTS.items():
            share = cell["enclave"][part]
            left.barh(row + 0.2, share, 0.34, left=done, color=colour, label=words if row == 0 else None)
            done += share
        right.barh(row, cell["workers"], 0.34, color=COLOURS[1])
    for axes, x in (
        (left, "processor time of the enclave (plain step = 1)"),
        (right, "processor time of all workers together (plain step = 1)"),
    ):
        dressed(axes, x=x, y="network (name, batch)" if axes is left else "")
        axes.set_yticks(range(len(models)), [f"{name}\nbatch {experiment.cells[name]['batch']}" for name in models])
    left.set_ylim(len(models) - 0.5, -0.5)
    legend_above(figure, left, columns=4)
    most = "; ".join(f"{model} {experiment.cells[model]['ceiling']:.2f}" for model in models)
    return Drawn(
        name="time-split",
        title="Where the time of a training step goes (measured)",
        caption=f"Measured at {experiment.scale['size']}x{experiment.scale['size']}, best of "
        f"{experiment.scale['times']}, one thread on each side, no GPU. Left, for each network: above, the "
        "plain step with everything in the enclave; below, what is left to the enclave when workers do the products. "
        "What to see: by how much the lower bar is shorter (it is longer where masking costs more than it takes away), "
        f"and what it is made of. The plain step over it: {most}; no number of workers can give more. Right: what the "
        "products cost on processors, exactly and masked; on GPUs that would be other hardware's time.",
        figure=figure,
    )


def speed_up_figure(experiment: Experiment) -> Drawn:
    """Quoted and measured beside each other, and never in one colour."""
    models = list(dict.fromkeys([*FIGURE_2, *(name for name in experiment.planned if name in experiment.cells)]))
    figure, grid = panels(1, width=8.0, height=3.4)
    axes = grid[0][0]
    quoted = [(place, FIGURE_2[name]) for place, name in enumerate(models) if name in FIGURE_2]
    axes.bar(
        [place - 0.19 for place, _ in quoted],
        [value for _, value in quoted],
        0.36,
        color="white",
        edgecolor=QUOTED,
        hatch="///",
        label="quoted: the paper's speed-up on three GPUs",
    )
    ours = [(place, experiment.cells[name]["ceiling"]) for place, name in enumerate(models) if name in experiment.cells]
    axes.bar(
        [place + 0.19 for place, _ in ours],
        [value for _, value in ours],
        0.36,
        color=COLOURS[1],
        label="measured: plain step over the enclave's part",
    )
    texts = [(place - 0.19, value, FIGURE_2_PRINTED[models[place]]) for place, value in quoted]
    for place, value, text in (*texts, *((place + 0.19, value, f"{value:.2f}") for place, value in ours)):
        axes.annotate(text, (place, value), ha="center", va="bottom", fontsize=9)
    for place, name in enumerate(models):
        if name not in experiment.cells:
            axes.annotate("not\nmeasured", (place + 0.19, 0), ha="center", va="bottom", fontsize=8, color=QUOTED)
    axes.axhline(1.0, color=QUOTED, linewidth=0.9, linestyle="--")
    dressed(axes, x="network (name)", y="speed-up over all in the enclave (ratio)")
    axes.set_xticks(range(len(models)), models)
    legend_above(figure, axes, columns=2)
    return Drawn(
        name="speed-up",
        title="Training speed-up: the paper's Figure 2 (quoted) and our ceiling (measured)",
        caption="Striped: quoted, wall-clock speed-up over everything in SGX, K=2, GTX 1080 Ti, gradients in the "
        "clear. Plain: measured here, K=4, M=1, gradients masked and every pass "
        "checked, an enclave that is an ordinary process, and workers whose time does not count. They are two "
        "different things, so what to see is where a network stands among the others, and not who is faster: one with "
        "few products for its size (MobileNet) has little to gain. Below the dashed line nothing is gained.",
        figure=figure,
    )


def scaling_figure(experiment: Experiment) -> Drawn:
    """A column for each thing that grows, a row each for time, bytes and error."""
    sweeps = [sweep for sweep in _SWEEPS if any(cell["sweep"] == sweep for cell in experiment.cells.values())]
    figure, grid = panels(len(sweeps), 3, height=7.6, sharex="col", sharey="row")
    arithmetics = list(dict.fromkeys(cell["arithmetic"] for cell in experiment.cells.values()))
    for column, sweep in enumerate(sweeps):
        for number, arithmetic in enumerate(arithmetics):
            cells = _along(experiment, sweep, arithmetic)
            if not cells:
                continue
            x = [_place(cell, sweep) for cell in cells]
            strong, pale = _style(number + 1, "-"), _style(number + 1, ":")
            grid[0][column].plot(x, [cell["enclave"] for cell in cells], **strong, label=f"{arithmetic}: enclave")
            grid[0][column].plot(x, [cell["all_workers"] for cell in cells], **pale, label=f"{arithmetic}: all workers")
            grid[1][column].plot(x, [_megabytes(cell) / cell["batch"] for cell in cells], **strong)
            errors = [cell["gradient_error"] for cell in cells], [cell["forward_error"] for cell in cells]
            grid[2][column].plot(x, errors[0], **strong, label=f"{arithmetic}: gradient")
            grid[2][column].plot(x, errors[1], **pale, label=f"{arithmetic}: scores")
        places = [_place(cell, sweep) for cell in experiment.cells.values() if cell["sweep"] == sweep]
        left = column == 0
        dressed(grid[0][column], y="processor time (plain step = 1)" if left else "")
        dressed(grid[1][column], y="sent and received (MB an image)" if left else "")
        dressed(grid[2][column], x=_SWEEPS[sweep], y="relative error (rms ratio)" if left else "")
        if sweep == "batch":
            grid[2][column].set_xscale("log", base=2)
        whole_numbers(grid[2][column], places)
        grid[2][column].set_yscale("log")
    for row in (0, 1):
        grid[row][0].set_ylim(bottom=0)
    grid[2][0].legend(fontsize=7.5, loc="center", bbox_to_anchor=(0.5, 0.25), ncols=2, frameon=False)
    legend_above(figure, grid[0][0], columns=4)
    return Drawn(
        name="scaling",
        title="How cost grows with K, M and the batch (measured)",
        caption=f"Measured: one training step of {experiment.scale['model']} at "
        f"{'x'.join(map(str, experiment.scale['image']))}, batch {experiment.scale['batch_size']} where not swept, "
        f"best of {experiment.scale['rounds']}; real arithmetic in float64 with noise of "
        f"{experiment.scale['noise_std']:g} times the bound; the batch over K, rounded up, is the number of virtual "
        "batches. Errors are of the gradient of all parameters and of the scores. What to see: how little or how much "
        "each line rises from left to right. By the arithmetic, products and bytes of an image go as (K + 2M) / K; "
        "what lies above that is the fixed cost of a call, which every worker pays again and a larger batch shares. "
        "The error of the field is that of its ten bits, whatever K and M are.",
        figure=figure,
    )


def _along(experiment: Experiment, sweep: str, arithmetic: str) -> list[Mapping[str, Any]]:
    cells = [each for each in experiment.cells.values() if (each["sweep"], each["arithmetic"]) == (sweep, arithmetic)]
    return sorted(cells, key=lambda cell: _place(cell, sweep))


def _place(cell: Mapping[str, Any], sweep: str) -> int:
    return int(cell[sweep])


def _megabytes(cell: Mapping[str, Any]) -> float:
    return float((cell["sent_bytes"] + cell["received_bytes"]) / 1e6)


def _style(number: int, line: str) -> dict[str, Any]:
    return {
        "color": COLOURS[number],
        "marker": MARKS[number],
        "markersize": 4,
        "linewidth": 1.4,
        "linestyle": line,
    }
