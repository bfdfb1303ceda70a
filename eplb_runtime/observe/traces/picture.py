"""A picture of traces: a row for each stream, a colour for each kind of work, and below each rank where its
communication was exposed. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...utils.files import write_file
from .analysis import Analysis, TraceTrack
from .intervals import Intervals, union
from .kinds import COLLECTIVE, COMBINE, COMPUTE, DISPATCH, NOTIFY, ONE_SIDED, POINT_TO_POINT

COLOURS = {
    COMPUTE: "#7f9fbf",
    DISPATCH: "#e69f00",
    COMBINE: "#009e73",
    NOTIFY: "#cc79a7",
    COLLECTIVE: "#56b4e9",
    POINT_TO_POINT: "#f0e442",
    ONE_SIDED: "#8c564b",
}
EXPOSED = "#d62728"
MOST_ROWS = 48
_FINEST = 1 / 4000
"""Of the span: gaps below it are not seen, and closing them keeps the picture small."""


def draw(analyses: Sequence[Analysis], path: Path) -> None:
    """Draw what ran when.

    Args:
        path: ``.png``, ``.svg`` or ``.pdf``; written whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [row for number, one in enumerate(analyses) for row in _rows(one, number, len(analyses) > 1)][:MOST_ROWS]
    span = max(one.span_us for one in analyses)
    figure = Figure(figsize=(12, 1.2 + 0.36 * len(rows)), layout="constrained")
    axes = figure.subplots()
    used: dict[str, str] = {}
    for place, (_, tracks) in enumerate(reversed(rows)):
        for track in tracks:
            colour = COLOURS.get(track.kind, EXPOSED)
            used[track.kind] = colour
            spans = _coarser(track.spans_N2, span * _FINEST) / 1e3
            bars = np.stack([spans[:, 0], spans[:, 1] - spans[:, 0]], axis=1)
            axes.broken_barh(
                [(begin, width) for begin, width in bars.tolist()], (place - 0.4, 0.8), color=colour, linewidth=0
            )
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_xlim(0, span / 1e3)
    axes.set_xlabel("ms")
    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in used.items()],
        ncols=4,
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=110)
    write_file(path, drawn.getvalue())


def _rows(one: Analysis, number: int, several: bool) -> list[tuple[str, list[TraceTrack]]]:
    """Name and work of each row, the busiest streams first."""
    rank = f"rank {number if one.rank is None else one.rank}, " if several else ""
    rows = [
        (f"{rank}{stream.name}", [track for track in one.tracks if track.stream == stream.name])
        for stream in one.streams
    ]
    kind = "communication exposed"
    return [*rows, (f"{rank}exposed", [TraceTrack("exposed", kind, one.exposed_N2)])]


def _coarser(spans_N2: Intervals, gap: float) -> Intervals:
    """The same, gaps up to this closed."""
    wider = spans_N2 + np.array([0.0, gap])
    joined = union(wider)
    return joined - np.array([0.0, gap]) if len(joined) else joined
