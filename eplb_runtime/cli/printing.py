"""Output of commands: tables and JSON objects."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

COLUMNS = 80  # of a table where there is no terminal
_NUMBER = re.compile(r"^$|^[-+]?[\d.,]+(?:e[-+]\d+)?(?: ?%)?(?: \(.*\))?$|^nan$|^inf$")


def print_json(fields: Mapping[str, Any]) -> None:
    print(json.dumps(fields))


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print title and rows as a table, of 80 columns or the terminal's width; transposed and split if too wide."""
    from rich.console import Console

    names = list(dict.fromkeys(name for row in rows for name in row))
    heads = [name.replace("_", " ") for name in names]
    lines = [[shown(row.get(name)) for name in names] for row in rows]
    console = own if (own := Console()).is_terminal else Console(width=COLUMNS)
    console.print(title, markup=False, highlight=False)
    columns = [list(column) for column in zip(heads, *lines, strict=True)]
    table = _table(columns)
    parts, most = [table], len(lines)
    while any(console.measure(part).minimum >= console.width for part in parts) and most and len(names) > 2:
        parts = [_table([heads, *lines[first : first + most]]) for first in range(0, len(lines), most)]
        most -= 1
    console.print(*parts)


def _table(columns: Sequence[Sequence[str]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for index, (head, *cells) in enumerate(columns):
        numbers = index > 0 and all(map(_NUMBER.match, cells))
        side: Literal["left", "right"] = "right" if numbers else "left"
        least = None if numbers else min(24, max(map(len, cells), default=0))  # of words, which may be wrapped
        table.add_column(escape(head), justify=side, min_width=least, no_wrap=numbers, overflow="fold")
    for line in list(zip(*columns, strict=True))[1:]:
        table.add_row(*map(escape, line))
    return table


def shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def spinner() -> Any:
    """Return a context manager that shows a spinner and a line on stderr, if stderr is a terminal."""
    from rich.console import Console

    return Console(stderr=True).status("working; the first time on a machine code is compiled, a minute")
