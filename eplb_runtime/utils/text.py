"""Text of our messages: what other libraries say in one line, and tables for ``print`` in a training script."""

import re
import textwrap
from collections.abc import Iterable, Sequence

COLUMNS = 80
_GLOO = re.compile(r"\[\S*gloo/\S*\.(?:cc|h):\d+\] (?P<what>.*?)(?:\. This is typically caused by .*)?$")
"""A message of gloo has the file and line of its own source before it, and general advice after it."""


def one_line(error: BaseException, *, with_type: bool = False) -> str:
    """Return the first line of an error's message, or the name of its type if there is no message. Of gloo's messages
    the source line and the advice are left out. ``with_type`` puts the type's name before messages of other packages'
    errors."""
    kind = type(error)
    text = (str(error).strip().splitlines() or [kind.__name__])[0]
    if told := _GLOO.search(text):
        text = f"gloo: {told['what']}"
    foreign = with_type and not kind.__module__.startswith("eplb_runtime") and text != kind.__name__
    return f"{kind.__name__}: {text}" if foreign else text


def counted(number: int, noun: str) -> str:
    """Return ``1 expert`` or ``4 experts``: the plural is the noun and an s."""
    return f"{number} {noun}{'s' * (number != 1)}"


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as text: headings, dashes, then the rows; the last column is wrapped at 80 characters."""
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
