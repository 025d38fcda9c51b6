"""What a person sees while a run goes on: phases with a bar and live numbers, messages, and final tables."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import gin
import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Column, Table


class Phase:
    """One stretch of work with a known or unknown number of steps; made by `Progress.phase`."""

    def __init__(self, progress: "Progress", name: str, total: int | None, done: int, bars: Bars | None):
        self._progress = progress
        self._name = name
        self._total = total
        self._done = self._first = done
        self._bars = bars
        self._began = time.monotonic()
        self._last_line = self._began
        self._shown_at = -1
        self._fields: dict[str, Any] = {}
        self._task = bars.add_task(name, total=total, completed=done, numbers="") if bars else None

    def advance(self, steps: int = 1, **fields: Any) -> None:
        """Counts steps and shows numbers, such as `reward=.4, em=.3, tokens_per_s=2100`; earlier ones stay shown."""
        self._done += steps
        self.show(**fields)

    def show(self, **fields: Any) -> None:
        """Shows numbers without counting a step."""
        self._fields.update(fields)
        if self._bars is not None:
            self._bars.update(self._task, completed=self._done, numbers=_numbers(self._fields))
        elif time.monotonic() - self._last_line >= self._progress.line_every_s:
            self.line()

    def finish(self) -> None:
        """Prints the last state, unless that was just done."""
        if self._shown_at != self._done:
            self.line()

    def line(self) -> None:
        """Prints the state as one line (what a terminal without cursor control gets now and then)."""
        self._last_line = time.monotonic()
        self._shown_at = self._done
        elapsed = self._last_line - self._began
        count = f"{self._done}" if self._total is None else f"{self._done}/{self._total}"
        parts = [f"{self._name} {count}", _numbers(self._fields), f"{_duration(elapsed)} elapsed"]
        if self._total and self._done > self._first:
            parts.append(f"{_duration(elapsed / (self._done - self._first) * (self._total - self._done))} left")
        self._progress.say("  ".join(part for part in parts if part))


@gin.configurable(denylist=["console"])
class Progress:
    """Shows a run's progress on the terminal: live bars on a TTY, a line now and then elsewhere, nothing when quiet.

    Args:
      quiet: Print nothing. Processes other than 0 never print.
      line_every_s: Seconds between lines where there is no TTY.
      console: Where to print; standard output when None.
    """

    def __init__(self, quiet: bool = False, line_every_s: float = 10.0, console: Console | None = None):
        self.quiet = quiet or jax.process_index() != 0
        self.line_every_s = line_every_s
        if console is None:
            # A file or pipe has no width: long lines stay whole there instead of being wrapped at 80.
            console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
        self._console = console
        self._bars: Bars | None = None

    def say(self, text: str) -> None:
        """Prints one message (above a live bar, if there is one)."""
        if not self.quiet:
            self._console.print(text, markup=False, soft_wrap=True)

    def print(self, renderable: Any) -> None:
        """Prints something that rich can draw, such as a table."""
        if not self.quiet:
            self._console.print(renderable)

    @contextmanager
    def phase(self, name: str, total: int | None = None, done: int = 0) -> Iterator[Phase]:
        """Shows a phase while the block runs.

        Args:
          name: Such as `warm start`, `RL`, `evaluation`. Phases may be nested.
          total: Its steps, if known; with it the time left is shown.
          done: Steps done before (a resumed run).
        """
        if self.quiet or not self._console.is_terminal:
            phase = Phase(self, name, total, done, None)
            yield phase
            phase.finish()
            return
        outermost = self._bars is None
        if outermost:
            fixed = {"table_column": Column(no_wrap=True)}
            self._bars = Bars(
                SpinnerColumn(),
                TextColumn("[bold]{task.description}", **fixed),
                BarColumn(bar_width=12),
                MofNCompleteColumn(**fixed),
                TimeElapsedColumn(**fixed),
                TimeRemainingColumn(compact=True, **fixed),
                TextColumn("left", **fixed),
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=False)),  # wraps when narrow
                console=self._console,
            )
            self._bars.start()
        phase = Phase(self, name, total, done, self._bars)
        try:
            yield phase
        finally:
            if outermost:
                self._bars.stop()
                self._bars = None

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Prints a table; the first column is text, the others numbers or text."""
        if self.quiet:
            return
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*(_number(cell) for cell in row))
        self._console.print(table)


def _numbers(fields: Mapping[str, Any]) -> str:
    return "  ".join(f"{name} {_number(value)}" for name, value in fields.items())


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return str(value)
    value = float(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}" if abs(value) >= 1e-3 else f"{value:.2e}"


def _duration(seconds: float) -> str:
    seconds = round(seconds)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"
