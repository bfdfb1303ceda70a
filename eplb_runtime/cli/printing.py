"""What commands print: tables, JSON objects, and on stderr the progress of what takes long."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .arguments import PROGRAM

if TYPE_CHECKING:
    from rich.status import Status


def note(message: str) -> None:
    """A line on stderr that is no refusal."""
    print(f"{PROGRAM}: note: {message}", file=sys.stderr)


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = {name: [_shown(row.get(name, "")) for row in rows] for name in columns}
    table = Table()
    for index, name in enumerate(columns):
        numbers = index > 0 and all(_NUMBER.match(cell) for cell in cells[name])
        table.add_column(name.replace("_", " "), justify="right" if numbers else "left")
    for position in range(len(rows)):
        table.add_row(*(escape(cells[name][position]) for name in columns))
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a pipe has no width: do not wrap at 80
    console.print(title, markup=False, highlight=False)
    console.print(table)


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


class progress:
    """A bar on stderr; entering gives the function that advances it, by one or by so many."""

    def __init__(self, what: str, total: int, of_bytes: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        done = DownloadColumn(binary_units=True) if of_bytes else MofNCompleteColumn()
        columns = (TextColumn(what), BarColumn(), done, TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Callable[..., None]:
        self._bar.start()
        return lambda count=1: self._bar.advance(self._task, count)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._bar.stop()
            return
        self._bar.live.transient = True  # no bar: what went wrong is said in one line, and that alone
        self._bar.live.stop()


def spinner() -> Status:
    """A sign of life on stderr, for work whose length is not known."""
    from rich.console import Console

    return Console(stderr=True).status("measuring")
