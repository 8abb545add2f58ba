"""How far a command is: bars on a terminal, one line for each epoch elsewhere. Always on stderr."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBars

if TYPE_CHECKING:  # commands that train nothing need not load what trains
    from darknight.train import Epoch, Progress


class Display(ABC):
    """What shows the progress of a whole command."""

    @abstractmethod
    def stage(self, text: str) -> AbstractContextManager[None]:
        """Show that something goes on that cannot say how long it takes."""

    @abstractmethod
    def count(self, label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show how many of `total` are done; what it gives is called with how many more."""

    @abstractmethod
    def training(self, label: str) -> Progress:
        """Show a training; `train.fit` reports to what this returns."""


@contextmanager
def display_on(console: Console) -> Iterator[Display]:
    """Bars where somebody watches, lines where output is kept."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[detail]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with RichBars(*columns, console=console) as bars:
        yield _Bars(bars)


class _Bars(Display):
    def __init__(self, bars: RichBars) -> None:
        self._bars = bars

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        task = self._bars.add_task("", total=None, detail=text)
        try:
            yield
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def count(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        task = self._bars.add_task(label, total=total, detail="")
        done = 0

        def more(number: int) -> None:
            nonlocal done
            done += number
            self._bars.update(task, completed=done, detail=f"{done:,} of {total:,}")

        yield more

    def training(self, label: str) -> Progress:
        return _TrainingBar(self._bars, label)


class _TrainingBar:
    def __init__(self, bars: RichBars, label: str) -> None:
        self._bars = bars
        self._label = label
        self._epochs = 0
        self._accuracy = ""

    def started(self, *, epochs: int, steps: int, done: int) -> None:
        self._epochs = epochs
        self._task: TaskID = self._bars.add_task(self._label, total=steps, completed=done, detail="")

    def step(self, *, epoch: int, step: int, loss: float, learning_rate: float) -> None:
        self._bars.update(self._task, advance=1, detail=self._detail(epoch, loss))

    def epoch(self, epoch: Epoch) -> None:
        self._accuracy = f"  accuracy {epoch.accuracy:.3f}"
        self._bars.update(self._task, detail=self._detail(epoch.number, epoch.loss))

    def _detail(self, epoch: int, loss: float) -> str:
        return f"epoch {epoch}/{self._epochs}  loss {loss:.3f}{self._accuracy}"


class _Lines(Display):
    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def stage(self, text: str) -> Iterator[None]:
        _say(self._console, text)
        yield

    @contextmanager
    def count(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        _say(self._console, f"{label} {total:,}")
        yield lambda number: None

    def training(self, label: str) -> Progress:
        return _TrainingLines(self._console, label)


class _TrainingLines:
    def __init__(self, console: Console, label: str) -> None:
        self._console = console
        self._label = label
        self._epochs = self._steps = self._first = self._done = 0
        self._begin = 0.0

    def started(self, *, epochs: int, steps: int, done: int) -> None:
        self._epochs, self._steps = epochs, steps
        self._first = self._done = done
        self._begin = time.monotonic()

    def step(self, *, epoch: int, step: int, loss: float, learning_rate: float) -> None:
        self._done = step

    def epoch(self, epoch: Epoch) -> None:
        _say(
            self._console,
            f"{self._label:<8} epoch {epoch.number}/{self._epochs}  loss {epoch.loss:.3f}  "
            f"accuracy {epoch.accuracy:.3f}  {epoch.seconds:.1f} s{self._left()}",
        )

    def _left(self) -> str:
        """How long the rest will take, if it goes on like this."""
        done, left = self._done - self._first, self._steps - self._done
        if not done or not left:
            return ""
        return f"  {timedelta(seconds=round((time.monotonic() - self._begin) / done * left))} left"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
