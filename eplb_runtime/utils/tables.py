"""Tables of plain text, 80 columns wide at most: for ``print`` in a training script, without a terminal library."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

COLUMNS = 80


def counted(number: int, noun: str) -> str:
    """``1 expert``, ``4 experts``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns side by side; the last one is wrapped."""
    lines = [tuple(headings), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings) - 1)]
    indent = sum(widths) + 2 * len(widths)
    shown = []
    for number, line in enumerate(lines):
        start = "".join(f"{cell:<{width}}  " for cell, width in zip(line, widths, strict=False))
        last = textwrap.wrap(" ".join(line[-1].split()), max(20, COLUMNS - indent)) or [""]
        shown += [(start + last[0]).rstrip(), *(" " * indent + more for more in last[1:])]
        if number == 0:
            shown.append("-" * min(COLUMNS, indent + max(len(line[-1]) for line in lines)))
    return "\n".join(shown)
