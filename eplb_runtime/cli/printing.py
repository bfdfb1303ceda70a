"""What commands print: tables, JSON objects, and on stderr the progress of what takes long."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from .arguments import PROGRAM

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = 80
"""Of a table where there is no terminal."""
_SPARE = 6
"""Columns that rich needs to part widths, beyond the least of each."""
_TableParts = tuple[list[str], dict[str, list[str]]]
"""Names of columns, and the cells of each."""


def note(message: str) -> None:
    """A line on stderr that is no refusal."""
    print(f"{PROGRAM}: note: {message}", file=sys.stderr)


COMPILED_FIRST = "the planner is compiled first, once on this machine: a minute, more where others use it"
"""A note before the first plan on a machine."""


@contextmanager
def noting_compilation(poll_seconds: float = 1.0) -> Iterator[None]:
    """Say once on stderr that code is compiled, if what is done inside compiles any: it takes a minute and more."""
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
    """A table of 80 columns, or as wide as the terminal. One that is too wide is turned, so that its rows stand side by
    side; where these are too many, it becomes several tables, each with as many rows as fit."""
    from rich.console import Console

    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [_shown(row.get(name, "")) for row in rows] for name in columns}
    console = Console()
    if not console.is_terminal:
        console = Console(width=COLUMNS)
    console.print(title, markup=False, highlight=False)
    if not rows or _fits(columns, cells, console.width):
        console.print(_table(columns, cells))
    else:
        if len(set(cells[columns[0]])) < len(rows):
            cells[columns[0]] = [f"{head} ({number})".lstrip() for number, head in enumerate(cells[columns[0]], 1)]
        for turned in _turned_tables(columns, cells, console.width):
            console.print(_table(*turned))


def _turned_tables(columns: Sequence[str], cells: Mapping[str, Sequence[str]], width: int) -> Iterator[_TableParts]:
    """Tables that have all rows side by side, each as many as fit, one at least."""
    done, rows = 0, len(cells[columns[0]])
    while done < rows:
        for end in range(rows, done, -1):
            turned = _turned(columns, {name: texts[done:end] for name, texts in cells.items()})
            if _fits(*turned, width) or end == done + 1:
                break
        yield turned
        done = end


def _turned(columns: Sequence[str], cells: Mapping[str, Sequence[str]]) -> _TableParts:
    """The same with a row for each column but the first, which heads the others."""
    first, *others = columns
    heads = list(cells[first])
    turned = {first: [heading(name) for name in others]}
    for position, head in enumerate(heads):
        turned[head] = [cells[name][position] for name in others]
    return [first, *heads], turned


def _fits(columns: Sequence[str], cells: Mapping[str, Sequence[str]], width: int) -> bool:
    """Words may be wrapped, numbers not."""
    return sum(_least(name, cells[name]) + 3 for name in columns) + 1 <= width - _SPARE or len(columns) <= 2


def _least(name: str, cells: Sequence[str]) -> int:
    """Width that a column cannot go below."""
    longest_word = max(map(len, heading(name).split()), default=0)
    if all(_NUMBER.match(cell) for cell in cells):
        return max(longest_word, *map(len, cells)) if cells else longest_word
    return max(longest_word, min(24, max(map(len, cells))))


def _table(names: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for index, name in enumerate(names):
        numbers = index > 0 and all(_NUMBER.match(cell) for cell in cells[name])
        table.add_column(
            escape(heading(name)), justify="right" if numbers else "left", min_width=_least(name, cells[name])
        )
    for position in range(len(cells[names[0]]) if names else 0):
        table.add_row(*(escape(cells[name][position]) for name in names))
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
    """Of a column: a key's words, its unit as it is written."""
    words = name.replace("_", " ")
    for long, short in _UNITS:
        words = re.sub(rf"\b{long}\b", short, words)
    return words


_NUMBER = re.compile(r"^$|^[-+]?[\d.,]+(?:e[-+]\d+)?(?: ?%)?(?: \(.*\))?$|^nan$|^inf$")
"""What stands to the right of its column; growth may follow in brackets."""


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_lines(*lines: str) -> None:
    """Beside tables, what is no table."""
    for line in lines:
        print(line)


def print_json(fields: Mapping[str, Any]) -> None:
    print(json.dumps(fields))


EVERY_SECONDS = 10.0
"""Between two signs of life where stderr is no terminal."""


class progress:
    """A bar on stderr, or without a terminal a line now and then; entering gives the function that advances it, by one
    or by so many."""

    def __init__(self, what: str, total: int, of_bytes: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        done = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
        columns = (TextColumn(what), BarColumn(), done, TimeElapsedColumn())
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task(what, total=total)
        self._lines = _Lines()
        self._what, self._done, self._total, self._of_bytes = what, 0, total, of_bytes

    def __enter__(self) -> Callable[..., None]:
        if self._bar is not None:
            self._bar.start()
        return self._advance

    def _advance(self, count: int = 1) -> None:
        self._done += count
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, count)
        else:
            self._lines.update(self._so_far())

    def _so_far(self) -> str:
        if self._of_bytes:
            return f"{self._what} {self._done / 2**20:,.0f} of {self._total / 2**20:,.0f} MiB"
        return f"{self._what} {self._done}/{self._total}"

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is None:
            if kind is None:
                self._lines.say(self._so_far())
            return
        if kind is None:
            self._bar.stop()
            return
        self._bar.live.transient = True  # no bar: what went wrong is said in one line, and that alone
        self._bar.live.stop()


class _Lines:
    """Signs of life as lines, seldom."""

    def __init__(self) -> None:
        self._began = self._said = time.monotonic()

    def update(self, text: str) -> None:
        if time.monotonic() - self._said >= EVERY_SECONDS:
            self.say(text)

    def say(self, text: str) -> None:
        self._said = time.monotonic()
        note(f"{text}, {self._said - self._began:.0f} s")


class Spinner(Protocol):
    """Shows what is done now."""

    def update(self, text: str) -> None: ...


@contextmanager
def spinner() -> Iterator[Spinner]:
    """A sign of life on stderr, for work whose length is not known."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    with console.status("measuring") as status:
        yield status
