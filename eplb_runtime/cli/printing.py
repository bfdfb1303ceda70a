"""Output of commands: tables, JSON objects, and on stderr the progress of long work."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .arguments import PROGRAM

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = 80
"""Of a table where there is no terminal."""
EVERY_SECONDS = 10.0
"""Between two lines of progress where stderr is no terminal."""
COMPILED_FIRST = "the planner is compiled first, once on this machine: a minute, more where others use it"
"""A note before the first plan on a machine."""


def note(message: str) -> None:
    """Print a line on stderr that is no refusal."""
    print(f"{PROGRAM}: note: {message}", file=sys.stderr)


@contextmanager
def noting_compilation(poll_seconds: float = 1.0) -> Iterator[None]:
    """Say once on stderr that code is compiled, if the block compiles any: it takes a minute and more."""
    from ..utils.jit import cache_folder

    def functions() -> int:
        return sum(1 for _ in cache_folder().rglob("*.nbi"))

    before, over = functions(), threading.Event()

    def watch() -> None:
        while not over.wait(poll_seconds):
            if functions() > before:
                note(COMPILED_FIRST)
                return

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of 80 columns, or as wide as the terminal. One that is too wide is turned: its rows become columns,
    as many to a table as fit."""
    from rich.console import Console

    columns = list(dict.fromkeys(name for row in rows for name in row))
    heads, lines = (
        [heading(name) for name in columns],
        [[_shown(row.get(name, "")) for name in columns] for row in rows],
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    console.print(title, markup=False, highlight=False)
    if len(columns) <= 2 or _width(heads, lines) <= console.width:
        console.print(_table(heads, lines))
        return
    while lines:
        for count in range(len(lines), 0, -1):
            first, *others = zip(*lines[:count], strict=True)
            turned = [[name, *cells] for name, cells in zip(heads[1:], others, strict=True)]
            if count == 1 or _width([heads[0], *first], turned) <= console.width:
                break
        console.print(_table([heads[0], *first], turned))
        lines = lines[count:]


def _width(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> int:
    """Columns of the terminal that a table takes at least, with what rich needs to part them."""
    return 7 + sum(3 + _least(head, [line[index] for line in lines]) for index, head in enumerate(heads))


def _least(head: str, cells: Sequence[str]) -> int:
    """Width that a column cannot go below: words may be wrapped, numbers not."""
    widest = max(map(len, cells), default=0)
    word = max(map(len, head.split()), default=0)
    return max(word, widest if all(map(_NUMBER.match, cells)) else min(24, widest))


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for index, head in enumerate(heads):
        cells = [line[index] for line in lines]
        numbers = index > 0 and all(map(_NUMBER.match, cells))
        table.add_column(escape(head), justify="right" if numbers else "left", min_width=_least(head, cells))
    for line in lines:
        table.add_row(*map(escape, line))
    return table


_UNITS = (
    ("gb per second", "GB/s"),
    ("gbps", "GB/s"),
    ("mbit per second", "Mbit/s"),
    ("tokens per second", "tokens/s"),
    ("mib", "MiB"),
    ("gib", "GiB"),
    ("seconds", "s"),
)


def heading(name: str) -> str:
    """The heading of a column: its key's words, with its unit as it is written."""
    words = name.replace("_", " ")
    for long, short in _UNITS:
        words = re.sub(rf"\b{long}\b", short, words)
    return words


_NUMBER = re.compile(r"^$|^[-+]?[\d.,]+(?:e[-+]\d+)?(?: ?%)?(?: \(.*\))?$|^nan$|^inf$")


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_lines(*lines: str) -> None:
    """Print what is no table."""
    for line in lines:
        print(line)


def print_json(fields: Mapping[str, Any]) -> None:
    print(json.dumps(fields))


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

    def text() -> str:
        return f"{what} {so_far / 2**20:,.0f} of {total / 2**20:,.0f} MiB" if of_bytes else f"{what} {so_far}/{total}"

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
