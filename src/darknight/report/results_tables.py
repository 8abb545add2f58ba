"""Tables of the page of results, as HTML. A cell that is quoted looks so and is in a column or row that says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from darknight.report.accuracy_charts import cell_of, leakage_of, models_of, settings_of
from darknight.report.experiment_file import Experiment
from darknight.report.our_features import OURS
from darknight.report.paper_quotes import FEATURES, FIGURE_2_PRINTED, TABLE_1, TABLE_2

MEASURED = '<span class="mark measured">measured</span>'
QUOTED = '<span class="mark quoted">quoted</span>'
_SIGNS = {"y": ("yes", "✓", "yes"), "n": ("no", "–", "no"), "?": ("open", "?", "not measured")}


def _table(caption: str, head: Sequence[str], rows: Iterable[str], *, kind: str = "") -> str:
    columns = "".join(f'<th class="{"column" if number else ""}">{text}</th>' for number, text in enumerate(head))
    return f"""<p class="caption">{caption}</p>
<div class="wide"><table class="{kind}">
<thead><tr>{columns}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>"""


def _row(name: str, cells: Iterable[str], *, kind: str = "") -> str:
    return f'<tr class="{kind}"><th scope="row">{name}</th>{"".join(cells)}</tr>'


def _number(text: str, *, quoted: bool = False) -> str:
    return f'<td class="number{" quoted" * quoted}">{text}</td>'


# --- accuracy ---------------------------------------------------------------------------------------------------------
def accuracy_table(experiment: Experiment) -> str:
    """After the last epoch: accuracy in percent, and the difference from the clear run in points."""
    models = models_of(experiment)
    rows = []
    for setting in settings_of(experiment):
        cells = []
        for model in models:
            cell, clear = cell_of(experiment, model, setting), cell_of(experiment, model, "clear")
            if cell is None:
                cells.append(_number("not measured"))
            elif cell["stopped"] or not cell["epochs"]:
                cells.append(_number(f"stopped in epoch {len(cell['epochs']) + 1}"))
            else:
                last = 100 * cell["epochs"][-1]["accuracy"]
                known = clear is not None and clear is not cell and clear["epochs"]
                beside = f" ({last - 100 * clear['epochs'][-1]['accuracy']:+.1f})" if clear and known else ""
                cells.append(_number(f"{last:.1f}{beside}"))
        rows.append(_row(escape(setting), cells))
    head = ["setting", *(escape(model) for model in models)]
    return _table(f"{MEASURED} Test accuracy after the last epoch, % (difference from clear, points)", head, rows)


# --- inference --------------------------------------------------------------------------------------------------------
def inference_table(experiment: Experiment) -> str:
    models = models_of(experiment)
    rows = []
    for setting in settings_of(experiment):
        cells = []
        for model in models:
            cell = cell_of(experiment, model, setting)
            if cell is None:
                cells.append(_number("not measured"))
            elif cell["stopped"]:
                cells.append(_number("stopped"))
            else:
                cells.append(
                    _number(f"{100 * cell['top1']:.1f} / {100 * cell['top5']:.1f} / {100 * cell['agreement']:.1f}")
                )
        rows.append(_row(escape(setting), cells))
    return _table(
        f"{MEASURED} Top-1 / top-5 accuracy / same answer as the plain model, %",
        ["noise", *(escape(model) for model in models)],
        rows,
    )


def quoted_inference_table() -> str:
    rows = [
        _row(
            escape(setting),
            [
                _number(f"{one:.2f} / {five:.2f}", quoted=True)
                for one, five in (printed.vgg16, printed.resnet152, printed.mobilenet_v1)
            ],
        )
        for setting, printed in TABLE_2.items()
    ]
    return _table(
        f"{QUOTED} The paper's Table 2: top-1 / top-5 accuracy on ImageNet, %",
        ["noise", "VGG16", "ResNet152", "MobileNetV1"],
        rows,
    )


def leakage_table(experiment: Experiment) -> str:
    """Nats a scalar and masking: theorem, printed, ours."""
    rows, bounds = [], leakage_of(experiment)
    for setting in settings_of(experiment):
        if setting not in bounds:
            continue
        worst = bounds[setting]
        printed = TABLE_2[setting].leakage if setting in TABLE_2 else None
        if setting == "field":
            cells = [_number("–"), _number("–", quoted=True), _number("–"), _number("0")]
        else:
            cells = [
                _number(f"{worst['theorem']:.3g}"),
                _number("–" if printed is None else f"{printed:.3g}", quoted=True),
                _number(f"{worst['dense']:.3g}"),
                _number(f"{worst['systematic']:.3g}"),
            ]
        rows.append(_row(escape(setting), cells))
    return _table(
        "Bounds of leakage, nats a scalar and masking",
        [
            "noise",
            "Theorem 1, computed",
            f"printed in Table 2 {QUOTED}",
            "ours, dense code of this run",
            "ours, systematic code",
        ],
        rows,
    )


# --- time -------------------------------------------------------------------------------------------------------------
def time_table(experiment: Experiment) -> str:
    rows = []
    for model in dict.fromkeys([*FIGURE_2_PRINTED, *experiment.planned]):
        cell, printed = experiment.cells.get(model), FIGURE_2_PRINTED.get(model, "–")
        ours = (
            [_number("not measured")] * 6
            if cell is None
            else [
                _number(f"{cell['plain']['linear']:.2f} / {cell['plain']['non_linear']:.2f}"),
                _number(f"{sum(cell['enclave'][part] for part in ('masking', 'checking', 'links')):.2f}"),
                _number(f"{cell['enclave']['staying'] + cell['enclave']['optimizer']:.2f}"),
                _number(f"{cell['workers']:.1f}"),
                _number(f"{cell['wall']:.1f}"),
                _number(f"{cell['ceiling']:.2f}"),
            ]
        )
        cells = [*ours, _number(printed, quoted=True)]
        rows.append(_row(escape(model), cells))
    return _table(
        f"{MEASURED} in units of the plain step; the last column is {QUOTED}",
        [
            "network",
            "plain: linear / all else",
            "enclave: for the products (masking, checking, links)",
            "enclave: all else",
            "all workers' processors",
            "on the clock, all on this machine",
            "plain over enclave (ceiling)",
            "speed-up in Figure 2 (three GPUs, SGX)",
        ],
        rows,
    )


# --- Table 1 ----------------------------------------------------------------------------------------------------------
def features_table() -> str:
    """The paper's rows as printed, and ours, whose cells lead to their tests."""
    rows = [_row(f"{escape(name)}", [_sign(mark) for mark in marks]) for name, marks in TABLE_1.items()]
    ours = [_sign(OURS[name].mark, anchor(name)) for name in FEATURES]
    rows.append(_row("DarKnight, this system", ours, kind="ours"))
    return _table(
        f"{QUOTED} The paper's Table 1, as printed; the last row is ours and every cell of it leads to its tests",
        ["system", *(escape(name) for name in FEATURES)],
        rows,
        kind="features",
    )


def feature_tests(experiment: Experiment | None) -> str:
    """A list of our cells: why, by which tests, and how those ended."""
    items = []
    for name in FEATURES:
        feature = OURS[name]
        lines = "".join(f"<br><code>{escape(test)}</code>{_outcome(experiment, name, test)}" for test in feature.tests)
        items.append(
            f'<li id="{anchor(name)}"><strong>{escape(name)}: {_SIGNS[feature.mark][2]}.</strong> '
            f"{escape(feature.why)}{lines}</li>"
        )
    return f'<ol class="tests">{"".join(items)}</ol>'


def anchor(name: str) -> str:
    return f"feature-{name.replace(' ', '-')}"


def _sign(mark: str, target: str | None = None) -> str:
    kind, sign, words = _SIGNS[mark]
    inside = f'<a href="#{target}" title="{words}; its tests">{sign}</a>' if target else sign
    return f'<td class="{kind}" title="{words}">{inside}</td>'


def _outcome(experiment: Experiment | None, name: str, test: str) -> str:
    cell = experiment.cells.get(name) if experiment else None
    if cell is None or test not in cell["tests"]:
        return " (not run for this page)"
    outcome = dict(zip(cell["tests"], cell["outcomes"], strict=False)).get(test, "")
    return f" ({escape(outcome)}{', runs with --full only' * (outcome == 'skipped')})"


# --- scaling ----------------------------------------------------------------------------------------------------------
def scaling_table(experiment: Experiment) -> str:
    rows = [
        _row(
            escape(name),
            [
                _number(f"{cell['workers']}"),
                _number(f"{cell['virtual_batches']}"),
                _number(f"{cell['enclave']:.1f}"),
                _number(f"{cell['all_workers']:.1f}"),
                _number(f"{cell['sent_bytes'] / 1e6:.2f} / {cell['received_bytes'] / 1e6:.2f}"),
                _number(f"{cell['forward_error']:.1e}"),
                _number(f"{cell['gradient_error']:.1e}"),
            ],
        )
        for name, cell in experiment.cells.items()
    ]
    return _table(
        f"{MEASURED} One training step; times in units of the plain step",
        [
            "setting",
            "workers",
            "virtual batches",
            "enclave, processor time",
            "all workers, processor time",
            "sent / received, MB",
            "error of scores",
            "error of gradient",
        ],
        rows,
    )
