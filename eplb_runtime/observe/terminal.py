"""A run in a terminal of 80 columns: what `eplb-runtime top` shows. Needs rich."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..utils.tables import counted
from .reading import View, ViewError, unpacked
from .recorded import RecordedLoad
from .summary import CAME_TRUE_TOLD

MOST_RANKS, MOST_LAYERS, MOST_DECISIONS, MOST_TROUBLES = 16, 5, 8, 3
BAR = 24
"""Characters of a rank's bar; the busiest fills it."""
LEAST_SPAN = 0.1
"""Of imbalance, that the height of a curve stands for."""
LEAST_SECONDS = 1e-6
"""Shorter times are rounding."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


def screen(view: View, now: float) -> RenderableType:
    """What is shown of a run.

    Args:
        view: as `reading.Source.view` gives it.
        now: seconds since 1970.

    Raises:
        ViewError: the view is none of ours.
    """
    try:
        parts: list[RenderableType] = [_head(view, now), *_load(view), _decisions(view), *_troubles(view)]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise ViewError(f"what it says cannot be shown: {type(error).__name__}: {error}") from None
    return Group(*parts)


def recorded_screen(folder: str, recorded: RecordedLoad) -> RenderableType:
    """What is shown of a load that was recorded without a balancer.

    Args:
        folder: as it was given.
    """
    imbalance_TL = recorded.imbalance_TL
    imbalance_L = imbalance_TL.mean(axis=0)
    layers, ranks = recorded.rank_load_LR.shape
    own = "" if recorded.is_own else ", as if there were so many"
    seconds = recorded.job.step_seconds
    load_2LR = np.stack([recorded.rank_load_LR] * 2)
    return Group(
        Text.assemble((f"{recorded.steps} steps", "bold"), "  recorded without a balancer")
        + Text(f"  {_seconds(seconds)} a step" if seconds else ""),
        Text(f"{layers} layers of {recorded.experts} experts in logical order on {ranks} ranks{own}"),
        Text.assemble(
            "imbalance ",
            (f"{imbalance_L.mean():.3f}", "bold"),
            f" mean, {imbalance_L.max():.3f} worst layer  ",
            sparkline(imbalance_TL.mean(axis=1).tolist(), 16),
        ),
        _ranks(load_2LR, with_start=False),
        _layers(imbalance_L, None),
        Text(f"would balancing pay? eplb-runtime assess {folder}"),
    )


def picture(shown: RenderableType, columns: int) -> str:
    """What a terminal shows, as SVG that fetches nothing: any font of equal widths will do."""
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True)
    console.print(shown)
    drawn = console.export_svg(title="eplb-runtime top")
    return re.sub(r"@font-face\s*{.*?}", "", drawn, flags=re.DOTALL).replace("Fira Code", "monospace")


PATIENCE_SECONDS, PATIENCE_INTERVALS = 60.0, 5
"""A job that has been silent for longer than both may have been killed."""


def _is_silent(view: View, now: float) -> bool:
    """Return whether a job that did not say that it ended has said nothing for long."""
    progress, measured = view.get("progress"), [value for value in view["curve"]["step_seconds"] if value]
    step_seconds = float(progress["step_seconds"] if progress else measured[-1] if measured else 0.0)
    usual = PATIENCE_INTERVALS * _usual_seconds(view, step_seconds)
    silent = float(progress["idle_seconds"]) if progress else now - float(view["time"])
    return silent > max(PATIENCE_SECONDS, usual)


def _usual_seconds(view: View, step_seconds: float) -> float:
    """Seconds between two decisions; without periodic ones the longest that lay between two; infinite: not known."""
    if (interval := view["job"]["interval"]) is not None:
        return int(interval) * step_seconds
    times = [float(row["time"]) for row in view["decisions"]]
    return max((after - before for before, after in pairwise(times)), default=math.inf)


def _head(view: View, now: float) -> RenderableType:
    job, progress = view["job"], view.get("progress")
    step = view["step"] if progress is None else max(int(view["step"]), int(progress["step"]))
    standing = str(view["standing"])
    if standing == "balancing" and _is_silent(view, now):
        standing = "no news"
    colour = {"balancing": "green", "paused": "yellow", "suspended": "yellow", "no news": "yellow"}.get(standing, "red")
    why = f": {view['cause']}" if view["cause"] and view["cause"] != "closed" else ""
    lines = [
        Text.assemble(
            (f"step {step}", "bold"),
            f"  epoch {view['epoch']}  ",
            (standing, colour),
            f"{why}  {_ago(now - float(view['time']))}",
            *([f"  {_seconds(progress['step_seconds'])} a step"] if progress and progress["step_seconds"] else []),
        ),
        Text(
            f"{job['layers']} layers of {job['experts']} experts on {job['ranks']} ranks of {job['slots_per_rank']} "
            f"slots; {job['policy']} {_cadence(job['interval'])}"
        ),
    ]
    totals = view["totals"]
    moved = sum(totals["moved_bytes"].values()) / 2**20
    placed = totals.get("placed_replicas")  # a page of an earlier version has none
    replicas = f"{counted(placed, 'replica')} placed, " if placed else ""
    lines.append(
        Text(
            f"{counted(totals['rebalances'], 'rebalance')} in {counted(totals['decisions'], 'decision')}, "
            f"{counted(sum(totals['moved_experts'].values()), 'expert')}, {moved:,.1f} MiB, {replicas}"
            f"{_seconds(totals['pause_seconds'])} pause, {_seconds(totals['saved_seconds'])} saved"
        )
    )
    if view.get("expert_work"):
        lines.append(Text(f"{view['expert_work']}; saved: compared with the start"))
    if view.get("predictions"):
        lines.append(Text(str(view["predictions"])))
        lines.append(Text(CAME_TRUE_TOLD, style="dim"))
    return Group(*lines)


def _cadence(interval: int | None) -> str:
    return "by rebalance() alone" if interval is None else f"every {interval} steps"


def _load(view: View) -> Iterable[RenderableType]:
    """Imbalance over time, of ranks and of the worst layers."""
    measured = view["measured"]
    if measured is None:
        yield Text("no load was measured yet")
        return
    imbalance_L, start_L = (_matrix(measured[name]).reshape(-1) for name in ("imbalance", "imbalance_start"))
    curve = [float(value) for value in view["curve"]["mean"] if value is not None]
    yield Text.assemble(
        "imbalance ",
        (f"{imbalance_L.mean():.3f}", "bold"),
        f" mean, {imbalance_L.max():.3f} worst layer; {start_L.mean():.3f} without moves  ",
        sparkline(curve, 16),
    )
    yield _ranks(_matrix(measured["rank_load"]).astype(np.float64))
    yield _layers(imbalance_L, start_L)


def _ranks(load_2LR: NDArray[np.float64], with_start: bool = True) -> Table:
    """The load of each rank in units of the mean; of many ranks the heaviest."""
    load_R, start_R = load_2LR.sum(axis=1) / np.maximum(load_2LR.sum(axis=1).mean(axis=1, keepdims=True), 1)
    order = np.arange(len(load_R))
    if len(order) > MOST_RANKS:
        order = np.argsort(-load_R, kind="stable")[:MOST_RANKS]
    table = Table(box=None, padding=(0, 1), show_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("load / mean", justify="right")
    table.add_column("")
    if with_start:
        table.add_column("at start", justify="right")
    most = max(float(load_R.max()), 1e-9)
    for rank in order.tolist():
        bar = "█" * max(0, round(BAR * load_R[rank] / most))
        colour = "red" if load_R[rank] > 1.25 else "yellow" if load_R[rank] > 1.05 else "green"
        at_start = [f"{start_R[rank]:.3f}"] if with_start else []
        table.add_row(str(rank), f"{load_R[rank]:.3f}", Text(bar, colour), *at_start)
    if len(load_R) > len(order):
        table.add_row("", "", f"the heaviest of {len(load_R)} ranks")
    return table


def _layers(imbalance_L: NDArray[np.float64], start_L: NDArray[np.float64] | None) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False)
    for heading in ("layer", "imbalance", *(["at start"] if start_L is not None else [])):
        table.add_column(heading, justify="right")
    for layer in np.argsort(-imbalance_L, kind="stable")[:MOST_LAYERS].tolist():
        at_start = [] if start_L is None else [f"{start_L[layer]:.3f}"]
        table.add_row(str(layer), f"{imbalance_L[layer]:.3f}", *at_start)
    return table


def _decisions(view: View) -> RenderableType:
    table = Table(box=None, padding=(0, 1), show_edge=False)
    for heading, justify in (("step", "right"), ("decision", "left"), ("imbalance", "left"), ("why", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    for row in _with_newest_rebalance(view):
        before, after = row.get("imbalance_before"), row.get("imbalance_after")
        said = "" if not before or not after else f"{before:.3f} -> {after:.3f}"
        outcome = str(row.get("outcome", ""))
        table.add_row(str(row["step"]), escape(outcome), said, escape(str(row["reason"])))
    return table if table.row_count else Text("no decision yet")


def _with_newest_rebalance(view: View) -> list[dict[str, Any]]:
    """The newest decisions; where none of them moved experts, the last one that did leads them."""
    newest = list(view["decisions"])[-MOST_DECISIONS:]
    rebalance = view.get("newest_rebalance")  # a page of an earlier version has none
    if not rebalance or any(row["step"] == rebalance["step"] for row in newest):
        return newest
    return [rebalance, *newest[1:]]


def _troubles(view: View) -> Iterable[RenderableType]:
    for row in list(view["troubles"])[-MOST_TROUBLES:]:
        yield Text(f"step {row['step']} {row['kind']}: {row['text']}", "red")


def sparkline(values: Sequence[float], width: int) -> str:
    """The newest values as a row of blocks, from 1 (or the least) to the largest, or to 1.1: noise stays low."""
    newest = [value for value in values if math.isfinite(value)][-width:]
    if not newest:
        return ""
    least, most = min(1.0, *newest), max(1.0 + LEAST_SPAN, *newest)
    scale = (len(_BLOCKS) - 1) / (most - least)
    return "".join(_BLOCKS[max(1, round((value - least) * scale))] for value in newest)


def _matrix(packed: Any) -> NDArray[Any]:
    found = unpacked(packed)
    if found is None:
        raise ViewError("a matrix is missing in what it says")
    return found


def _seconds(seconds: float) -> str:
    if abs(seconds) < LEAST_SECONDS:
        return "0 s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:,.1f} s"


def _ago(seconds: float) -> str:
    if seconds < 60:
        return "just now" if seconds < 5 else f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
