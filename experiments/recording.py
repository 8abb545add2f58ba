"""What every experiment does alike: its file, which is resumed where it is there already, and lines of progress.

    run = Recording("accuracy", Path("results/accuracy.json"), scale={...}, planned=[...])
    for name in run.missing:
        run.add(name, {...})        # written at once

Not an experiment itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from darknight.bench import machine, program
from darknight.data import Dataset, read_dataset
from darknight.data.dataset import Tensors
from darknight.errors import DarKnightError, DataError, UsageError
from darknight.report.experiment_file import Experiment, read_experiment, write_experiment

_SAME = ("version", "torch", "python")  # between two sessions of one experiment


class Recording:
    """The file of an experiment while it runs. An earlier one at another scale is never mixed with this one."""

    def __init__(self, name: str, path: Path, *, scale: Mapping[str, Any], planned: Sequence[str]) -> None:
        self._path = path
        self._begun = time.perf_counter()
        fresh = Experiment(
            name=name,
            command=command_line(path),
            scale=scale,
            machine=machine(),
            program=program(),
            planned=tuple(planned),
        )
        self._experiment = self._resumed(fresh) if path.exists() else fresh
        if self._experiment.cells:
            self.tell(f"{len(self._experiment.cells)} of {len(planned)} cells are there already")

    @property
    def missing(self) -> tuple[str, ...]:
        return self._experiment.missing

    def add(self, name: str, cell: Mapping[str, Any]) -> None:
        """One more cell, on the disk when this returns."""
        cells = {**self._experiment.cells, name: cell}
        self._experiment = replace(self._experiment, cells=cells)
        write_experiment(self._path, self._experiment)
        self.tell(f"{name} is complete, {len(cells)} of {len(self._experiment.planned)}")

    def tell(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._begun:7.0f} s] {text}", file=sys.stderr, flush=True)

    def _resumed(self, fresh: Experiment) -> Experiment:
        found = read_experiment(self._path)
        if (found.name, found.scale) != (fresh.name, fresh.scale):
            raise UsageError(f"{self._path} is of another experiment or scale. Give the same flags, or another --out.")
        if found.machine != fresh.machine:
            raise UsageError(f"{self._path} was measured on another machine. Use another --out.")
        for key in _SAME:
            if found.program.get(key) != fresh.program.get(key):
                raise UsageError(f"{self._path} was measured with another {key} of the program. Use another --out.")
        commits = [each for each in (found.program.get("commit"), fresh.program.get("commit")) if each]
        planned = (*found.planned, *(name for name in fresh.planned if name not in found.planned))
        return replace(
            found,
            program={**found.program, "commit": ", ".join(dict.fromkeys(", ".join(commits).split(", "))) or None},
            planned=planned,
        )


def command_line(path: Path) -> str:
    """The command as a reader would give it, without folders of this machine."""
    script, *arguments = sys.argv
    shown = [path.name if argument == str(path) and path.is_absolute() else argument for argument in arguments]
    return " ".join(["python", f"experiments/{Path(script).name}", *shown])


def cifar_slice(train: int, test: int) -> Dataset:
    """The first examples of a slice of CIFAR-10, which is not part of the project: it is in a folder that
    DARKNIGHT_SHARED names. Normalised by the whole slice."""
    folder = os.environ.get("DARKNIGHT_SHARED")
    file = Path(folder) / "data" / "cifar10_small.npz" if folder else None
    if file is None or not file.is_file():
        raise DataError(
            "the slice of CIFAR-10 is missing: DARKNIGHT_SHARED must name a folder that holds data/cifar10_small.npz "
            "(x_train, y_train, x_test, y_test: 32x32 images in colour). To see that the experiment works without it, "
            "use --quick."
        )
    whole = read_dataset(str(file), seed=0)
    return shortened(whole, train, test, name="CIFAR-10, a slice")


def shortened(whole: Dataset, train: int, test: int, *, name: str) -> Dataset:
    """The first examples of both parts, in memory."""
    if train > len(whole.train) or test > len(whole.test):
        raise UsageError(f"{train} and {test} examples; there are {len(whole.train)} and {len(whole.test)}.")
    return replace(
        whole,
        name=name,
        train=Tensors(whole.train_x[:train].clone(), whole.train.labels[:train].clone()),
        test=Tensors(whole.test_x[:test].clone(), whole.test.labels[:test].clone()),
    )


def digits_slice(train: int, test: int) -> Dataset:
    """scikit-learn's digits, 8x8: enough to see that an experiment works."""
    return shortened(read_dataset("digits", seed=0), train, test, name="scikit-learn's digits")


def run_or_explain(main: Any) -> None:
    """Errors in one line; Ctrl-C is 130, and the same command goes on afterwards."""
    try:
        main()
    except UsageError as error:
        sys.exit(_complain(error, 2))
    except DarKnightError as error:
        sys.exit(_complain(error, 1))
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)


def _complain(error: DarKnightError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
