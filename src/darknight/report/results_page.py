"""The page of results: what the paper claims beside what this system does, in one HTML file that needs nothing else."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape

from darknight import __version__
from darknight.report.drawn import Drawn
from darknight.report.experiment_file import Experiment
from darknight.report.paper_quotes import FIGURE_2_PARTS, FIGURE_2_SETTING, FIGURE_3, PAPER
from darknight.report.results_folder import COMMANDS
from darknight.report.results_style import STYLE
from darknight.report.results_tables import (
    MEASURED,
    QUOTED,
    accuracy_table,
    feature_tests,
    features_table,
    inference_table,
    leakage_table,
    quoted_inference_table,
    scaling_table,
    time_table,
)

TITLES: Mapping[str, str] = {
    "accuracy": "Accuracy of training",
    "inference": "Inference under noise, and what may leak",
    "time-split": "Where the time goes",
    "features": "Features, beside other systems",
    "scaling": "How cost grows",
}
_MISSING = '<span class="mark missing">not measured</span>'


def results_page(experiments: Mapping[str, Experiment], figures: Mapping[str, Sequence[Drawn]]) -> str:
    """The whole page. Every text is escaped; figures are inside; nothing is loaded from anywhere, and nothing runs."""
    sections = "".join(
        _section(number, name, experiments.get(name), figures.get(name, ())) for number, name in enumerate(TITLES, 1)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>DarKnight: what the paper claims, and what this system does</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<p class="brand">DarKnight results</p>
<h1>What the paper claims, and what this system does</h1>
<p class="lead">{MEASURED} is what the commands below measured, at the scale that each section states.
{QUOTED} is copied from the paper ({escape(PAPER)}) and was not measured here. They are not of the same networks, data
and machines, so no number of one stands for the other.</p>
{_summary(experiments)}
</header>
{sections}
<footer>Made by <code>darknight report</code>, version {escape(__version__)}, from the JSON files of the experiments
alone.</footer>
</main>
</body>
</html>
"""


def _summary(experiments: Mapping[str, Experiment]) -> str:
    rows = []
    for number, (name, title) in enumerate(TITLES.items(), 1):
        experiment = experiments.get(name)
        link = f'<a href="#{name}">{number}. {escape(title)}</a>'
        rows.append(
            f'<tr><td class="target">{link}</td><td>{_state(experiment)}</td>'
            f"<td>{'' if experiment is None else escape(scale_words(experiment))}</td></tr>"
        )
    return f"""<table><thead><tr><th>Experiment</th><th>State</th><th>Scale</th></tr></thead>
<tbody>{"".join(rows)}</tbody></table>"""


def _state(experiment: Experiment | None) -> str:
    if experiment is None or not experiment.cells:
        return _MISSING
    done, all_of_them = len(experiment.cells), len(experiment.planned)
    return MEASURED if done == all_of_them else f"{MEASURED} {done} of {all_of_them} cells"


def scale_words(experiment: Experiment) -> str:
    """The scale in one line.

    >>> scale_words(Experiment(name="features", command="", scale={"full": True}, machine={}, program={}, planned=()))
    'tests at their full count'
    """
    scale = experiment.scale
    match experiment.name:
        case "accuracy" | "inference":
            return (
                f"{scale['data']}: {scale['train_examples']:,} images to train, {scale['test_examples']:,} to test, "
                f"{'x'.join(map(str, scale['image']))}, {scale['epochs']} epochs, batch {scale['batch_size']}, "
                f"seed {scale['seed']}"
            )
        case "time-split":
            return f"{scale['size']}x{scale['size']}, scheme {scale['scheme']}, best of {scale['times']}"
        case "features":
            return f"tests at their {'full' if scale['full'] else 'reduced'} count"
        case _:
            return (
                f"{scale['model']} at {'x'.join(map(str, scale['image']))}, batch {scale['batch_size']}, best of "
                f"{scale['rounds']}, seed {scale['seed']}"
            )


# --- one experiment ---------------------------------------------------------------------------------------------------
def _section(number: int, name: str, experiment: Experiment | None, figures: Sequence[Drawn]) -> str:
    measured = experiment is not None and bool(experiment.cells)
    body = "".join(_figure(drawn) for drawn in figures)
    return f"""<section id="{name}" class="part">
<h2>{number}. {escape(TITLES[name])}</h2>
{_conditions(experiment) if experiment is not None and measured else _how_to(name)}
{body}
{_words(name, experiment if measured else None)}
</section>"""


def _how_to(name: str) -> str:
    return f'<p>{_MISSING} Measure it with</p><code class="command">{escape(COMMANDS[name])}</code>'


def _conditions(experiment: Experiment) -> str:
    machine, program = experiment.machine, experiment.program
    missing = experiment.missing
    absent = f"<p>{_MISSING} {escape(', '.join(missing))}. The same command goes on with them.</p>" if missing else ""
    schemes = experiment.scale.get("schemes")
    how = "".join(f" {escape(name)}: {escape(words)}." for name, words in (schemes or {}).items())
    commit = program.get("commit")
    return f"""<p class="facts">Scale: {escape(scale_words(experiment))}.{how}<br>
On {escape(machine["processor"])}, {machine["cores"]} cores, {machine["memory_gib"]} GiB, {escape(machine["system"])};
version {escape(str(program.get("version")))}{f", commit {escape(str(commit))}" if commit else ""}, torch
{escape(str(program.get("torch")))}, Python {escape(str(program.get("python")))}.</p>
<code class="command">{escape(experiment.command)}</code>{absent}"""


def _figure(drawn: Drawn) -> str:
    source = b64encode(drawn.png).decode()
    return f"""<figure id="figure-{escape(drawn.name)}">
<figcaption class="title">{escape(drawn.title)}</figcaption>
<img src="data:image/png;base64,{source}" alt="{escape(drawn.caption)}">
<figcaption>{escape(drawn.caption)}</figcaption>
</figure>"""


def _words(name: str, experiment: Experiment | None) -> str:
    """Tables, and what the paper says, which is there also where nothing was measured."""
    match name:
        case "accuracy":
            quote = f"<blockquote>{QUOTED} Figure 3: {escape(FIGURE_3)}.</blockquote>"
            return (accuracy_table(experiment) if experiment else "") + quote
        case "inference":
            ours = inference_table(experiment) + leakage_table(experiment) if experiment else ""
            return ours + quoted_inference_table()
        case "time-split":
            quote = f"<blockquote>{QUOTED} Figure 2, {escape(FIGURE_2_SETTING)}. {escape(FIGURE_2_PARTS)}.</blockquote>"
            return (time_table(experiment) if experiment else "") + quote
        case "features":
            return features_table() + feature_tests(experiment)
        case _:
            return scaling_table(experiment) if experiment else ""
