"""docs/results.md says what the committed results say, and its pictures are theirs."""

import re
from pathlib import Path

import pytest

from darknight.report.accuracy_charts import cell_of, models_of, settings_of
from darknight.report.results_folder import figures_of, read_results

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/results.md").read_text()
RESULTS = read_results(ROOT / "results")


def tables(text):
    """Rows of cells, by the heading that a row stands under."""
    found, heading = {}, ""
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| ") and not line.startswith("| ---"):
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def accuracy_rows(experiment):
    for setting in settings_of(experiment):
        cells = [cell_of(experiment, model, setting) for model in models_of(experiment)]
        yield [setting, *("-" if cell is None else f"{100 * cell['epochs'][-1]['accuracy']:.1f}" for cell in cells)]


def inference_rows(experiment):
    for setting in settings_of(experiment):
        cells = [cell_of(experiment, model, setting) for model in models_of(experiment)]
        yield [
            setting,
            *("-" if cell is None else f"{100 * cell['top1']:.1f}, {100 * cell['agreement']:.1f}" for cell in cells),
        ]


def scaling_rows(experiment):
    for name, cell in experiment.cells.items():
        if name.startswith("field/"):
            times = f"{cell['enclave']:.1f}", f"{cell['all_workers']:.1f}"
            yield [name.removeprefix("field/"), f"{cell['workers']}", *times, f"{cell['gradient_error']:.1e}"]


ROWS = {"accuracy": accuracy_rows, "inference": inference_rows, "scaling": scaling_rows}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_a_table_is_that_of_the_file(name):
    assert name in RESULTS, "docs/results.md has a table of it"
    found = tables(TEXT)
    (heading,) = [each for each in found if f"`results/{name}.json`" in TEXT.split(each, 1)[1].split("\n## ", 1)[0]]
    rows = list(ROWS[name](RESULTS[name]))
    assert rows
    assert found[heading][1:] == rows


def test_a_changed_number_would_be_noticed():
    row = next(ROWS["accuracy"](RESULTS["accuracy"]))
    changed = TEXT.replace(f"| {' | '.join(row)} |", f"| {' | '.join([row[0], '99.9', *row[2:]])} |")
    assert tables(changed) != tables(TEXT)


def test_pictures_are_those_that_the_results_give_and_small():
    drawn = {each.name for figures in figures_of(RESULTS).values() for each in figures}
    pictures = {path.stem: path for path in (ROOT / "docs/pictures/results").iterdir()}
    assert pictures.keys() == drawn
    assert set(re.findall(r"\]\(pictures/results/([\w-]+)\.png\)", TEXT)) == drawn
    assert all(path.stat().st_size < 150_000 for path in pictures.values())


def test_every_command_and_scale_is_told():
    for made in RESULTS.values():
        assert made.command in TEXT
    for name in re.findall(r"`(tests/[\w/.]+)", TEXT) + re.findall(r"\]\(([\w/.-]+)\)", TEXT):
        assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name
