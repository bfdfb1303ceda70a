"""Output of commands: tables, JSON objects, and on stderr the progress of long work."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .arguments import PROGRAM

COLUMNS = 80
"""Of a table where there is no terminal."""
EVERY_SECONDS = 10.0
"""Between two lines of progress where stderr is no terminal."""
_UNITS = (
    ("gb per second", "GB/s"),
    ("gbps", "GB/s"),
    ("mbit per second", "Mbit/s"),
    ("tokens per second", "tokens/s"),
    ("mib", "MiB"),
    ("gib", "GiB"),
    ("seconds", "s"),
)
_NUMBER = re.compile(r"^$|^[-+]?[\d.,]+(?:e[-+]\d+)?(?: ?%)?(?: \(.*\))?$|^nan$|^inf$")


def note(message: str) -> None:
    """Print a line on stderr that is no refusal."""
    print(f"{PROGRAM}: note: {message}", file=sys.stderr)


def note_compilation() -> None:
    """Say on stderr that code is compiled, where nothing has been compiled yet: it takes a minute and more."""
    from ..utils.jit import cache_folder

    if not any(cache_folder().rglob("*.nbi")):
        note("the planner is compiled first, once on this machine: a minute, more where others use it")


def print_lines(*lines: str) -> None:
    """Print what is no table."""
    for line in lines:
        print(line)


def print_json(fields: Mapping[str, Any]) -> None:
    print(json.dumps(fields))


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of 80 columns, or as wide as the terminal. One that is too wide is turned: its rows become columns,
    as many to a table as fit."""
    from rich.console import Console
    from rich.measure import Measurement

    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[_shown(row.get(name, "")) for name in columns] for row in rows]
    console = Console()
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    console.print(title, markup=False, highlight=False)
    table = _table([[heading(name), *cells] for name, cells in zip(columns, zip(*lines, strict=True), strict=True)])
    wide = console.options.update(max_width=10_000)
    if len(columns) <= 2 or Measurement.get(console, wide, table).minimum <= console.width:
        console.print(table)
        return
    heads = [heading(name) for name in columns]
    while lines:
        for count in range(len(lines), 0, -1):
            table = _table([heads, *lines[:count]])
            if count == 1 or Measurement.get(console, wide, table).minimum <= console.width:
                break
        console.print(table)
        lines = lines[count:]


def _table(columns: Sequence[Sequence[str]]) -> Any:
    """Return a table of columns, each with its heading first; words may be wrapped, numbers not."""
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for index, (head, *cells) in enumerate(columns):
        numbers = all(map(_NUMBER.match, cells))
        word = max(map(len, head.split()), default=0)
        widest = max(map(len, cells), default=0)
        least = max(word, widest if numbers else min(24, widest))
        table.add_column(escape(head), justify="right" if numbers and index else "left", min_width=least)
    for line in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(escape, line))
    return table


def heading(name: str) -> str:
    """Return the heading of a column: its key's words, with its unit as it is written."""
    words = name.replace("_", " ")
    for long, short in _UNITS:
        words = re.sub(rf"\b{long}\b", short, words)
    return words


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# -- progress --------------------------------------------------------------------------------------------------------


@contextmanager
def progress(what: str, total: int, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr, or without a terminal a line now and then; yields the function that advances it, by one or
    by so many."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    done = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
    console = Console(stderr=True)
    if console.is_terminal:
        with Progress(TextColumn(what), BarColumn(), done, TimeElapsedColumn(), console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda count=1: bar.advance(task, count)
        return
    lines, so_far = Spinner(None), 0
    unit = 2**20 if of_bytes else 1

    def text() -> str:
        return f"{what} {so_far // unit}/{total // unit}{' MiB' if of_bytes else ''}"

    def advance(count: int = 1) -> None:
        nonlocal so_far
        so_far += count
        lines.update(text())

    yield advance
    lines.say(text())


class Spinner:
    """Shows what is done now: on a terminal at once, else as a line now and then."""

    def __init__(self, status: Any) -> None:
        self._status = status
        self._began = self._said = time.monotonic()

    def update(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        elif time.monotonic() - self._said >= EVERY_SECONDS:
            self.say(text)

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        note(f"{text}, {self._said - self._began:.0f} s")


@contextmanager
def spinner() -> Iterator[Spinner]:
    """Show a sign of life on stderr, for work whose length is not known."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Spinner(None)
        return
    with console.status("measuring") as status:
        yield Spinner(status)
