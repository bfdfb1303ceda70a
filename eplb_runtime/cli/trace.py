"""``eplb-runtime trace``: what the traces of torch.profiler say, two jobs side by side, and all ranks in one file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.tables import counted
from .arguments import add_command, adder, positive
from .inputs import require_output
from .printing import print_json, print_lines, print_table, progress

if TYPE_CHECKING:
    from ..observe.traces import Analysis, Change, MarkedSteps

LONG_BYTES = 4 * 2**20


def add(commands: Any) -> None:
    trace = commands.add_parser("trace", help="what profiler traces say: busy, hidden, exposed; compare, merge")
    actions = trace.add_subparsers(title="what to do", metavar="WHAT", required=True)
    text = "say what ran, what was hidden under computing, and what each phase of a layer took"
    examples = """
  eplb-runtime trace analyse rank0.json.gz
  eplb-runtime trace analyse traces/                        # all ranks of a job
  eplb-runtime trace analyse rank0.json --layers --kernels 30 --json
"""
    analyse = add_command(actions, "analyse", _analyse, text, examples)
    analyse.add_argument("traces", metavar="FILE", nargs="+", help="a trace (.json, .json.gz), or a folder of them")
    analyse.add_argument("--layers", action="store_true", help="phases by layer and micro-batch, not summed")
    adder(analyse)("--kernels", "N", positive, "kernels shown, the longest first (default: 10)", default=10)
    examples = """
  eplb-runtime trace merge traces/                          # writes traces/merged.json.gz
  eplb-runtime trace merge traces/ -o job.json
"""
    merge = add_command(actions, "merge", _merge, "put the traces of all ranks into one file for Perfetto", examples)
    merge.add_argument("folder", metavar="DIR", help="with a trace of each rank")
    merge.add_argument("-o", "--output", metavar="FILE", help=".json or .json.gz (default: DIR/merged.json.gz)")
    examples = """
  eplb-runtime bench train --profile traces
  eplb-runtime trace compare traces/static traces/homes
"""
    compare = add_command(actions, "compare", _compare, "say what changed between two jobs", examples)
    compare.add_argument("a", metavar="A", help="a trace, or a folder with one of each rank")
    compare.add_argument("b", metavar="B", help="the same of the other job")
    adder(compare)("--kernels", "N", positive, "kernels shown, largest change first (default: 8)", default=8)


def _analyse(arguments: argparse.Namespace) -> None:
    from ..observe.traces import together, traces_in

    analyses = _read([path for given in arguments.traces for path in traces_in(Path(given))])
    if arguments.json:
        print_json(together(analyses))
        return
    for one in analyses:
        _print_one(one, arguments.layers, arguments.kernels)


def _print_one(one: Analysis, by_layer: bool, kernels: int) -> None:
    from ..observe.traces.kinds import COMPUTE

    travelled = one.communication
    rank = "" if one.rank is None else f", rank {one.rank}"
    times = {
        "span": one.span_us,
        "busy": one.busy_us,
        "computing": one.compute_us,
        "communication": travelled.us,
        "  hidden under computing": travelled.hidden_us,
        "  exposed": travelled.exposed_us,
        "idle": one.idle_us,
    }
    rows = [{"": what, "us": _us(us), "of span": _share(us, one.span_us)} for what, us in times.items()]
    print_table(f"{one.file}{rank} ({one.device.upper()})", rows)
    share = f"{travelled.hidden_share:.1%} of communication is hidden" if travelled.us else "nothing was sent"
    steps = f"; {counted(one.steps, 'step')} of {_us(one.step_us)} us (median)" if one.steps else ""
    print_lines(f"{share}{steps}", "")
    print_table(
        "kinds of work",
        [{"kind": kind, "runs": int(row["count"]), "us": _us(row["us"])} for kind, row in one.kinds.items()],
    )
    print_table(
        "streams",
        [
            {
                "stream": stream.name,
                "busy us": _us(stream.busy_us),
                "idle us": _us(stream.idle_us),
                "compute us": _us(stream.kinds.get(COMPUTE, 0.0)),
                "send us": _us(sum(us for kind, us in stream.kinds.items() if kind != COMPUTE)),
            }
            for stream in one.streams
        ],
    )
    if one.phases:
        print_table("phases (host: of the thread that runs them)", _phases(one, by_layer))
    print_table(
        f"the longest of {len(one.kernels)} kernels" if one.device == "gpu" else "operators",
        [
            {"runs": kernel.count, "us": _us(kernel.us), "kind": kernel.kind, "name": _shortened(kernel.name)}
            for kernel in one.kernels[:kernels]
        ],
    )


def _phases(one: Analysis, by_layer: bool) -> list[dict[str, Any]]:
    """Return a row for each phase, over layers and micro-batches unless ``by_layer``."""
    rows: dict[tuple[Any, ...], list[float]] = {}
    for phase in one.phases:
        key = (phase.name, phase.layer, phase.micro_batch) if by_layer else (phase.name,)
        took = (phase.spans, phase.host_us, phase.compute_us, phase.communication_us, phase.exposed_us)
        rows[key] = [a + b for a, b in zip(rows.get(key, [0.0] * 5), took, strict=True)]
    shown = []
    heads = ("phase", "layer", "micro-batch" if any(phase.micro_batch is not None for phase in one.phases) else None)
    for key, (spans, *times) in rows.items():
        place = {head: "" if value is None else value for head, value in zip(heads, key, strict=False) if head}
        names = ("host us", "compute us", "send us", "exposed us")
        shown.append({**place, "spans": int(spans), **dict(zip(names, map(_us, times), strict=True))})
    return shown


def _merge(arguments: argparse.Namespace) -> None:
    from ..observe.traces import merge, traces_in

    folder = Path(arguments.folder)
    paths = traces_in(folder)
    output = Path(arguments.output) if arguments.output is not None else folder / "merged.json.gz"
    require_output(str(output), (".json", ".gz"))
    with _reading(2 * sum(path.stat().st_size for path in paths)) as advance:
        merged = merge(paths, output, advance)
    if arguments.json:
        print_json({"output": str(output), **asdict(merged)})
        return
    print_lines(
        f"{output}: {len(merged.ranks)} ranks, {merged.events:,} events, {merged.flows:,} flows",
        "open it at ui.perfetto.dev",
    )


def _compare(arguments: argparse.Namespace) -> None:
    from ..observe.traces import compare, traces_in

    of_a, of_b = ([*traces_in(Path(given))] for given in (arguments.a, arguments.b))
    analyses = _read([*of_a, *of_b])
    found = compare(analyses[: len(of_a)], analyses[len(of_a) :], arguments.a, arguments.b)
    if arguments.json:
        print_json(found.to_dict())
        return
    print_lines(
        f"A {found.a} ({len(of_a)} traces{_steps(found.steps_a)})",
        f"B {found.b} ({len(of_b)} traces{_steps(found.steps_b)})",
    )
    if found.is_noise is not None:
        print_lines(
            "the medians of steps differ by less than they do by chance: this is noise"
            if found.is_noise
            else "the medians of steps differ by more than they do by chance"
        )
    print_table(f"us a {found.per}, of a rank", [_change(row) for row in found.summary])
    print_table("phases, us on the thread that runs them", [_change(row) for row in found.phases])
    print_table("kinds of work, us", [_change(row) for row in found.kinds])
    kernels = [replace(row, what=_shortened(row.what)) for row in found.kernels[: arguments.kernels]]
    print_table("largest changes, us", [_change(row) for row in kernels])


def _steps(steps: MarkedSteps) -> str:
    if not steps.count:
        return ""
    return f", {steps.count:g} steps of {_us(steps.median_us)} us, half of them within {_us(steps.spread_us)} us"


def _change(row: Change) -> dict[str, Any]:
    few = max(row.a, row.b) < 10  # a share or a ratio
    a, b = (f"{value:.3f}" if few else _us(value) for value in (row.a, row.b))
    change = "" if row.change is None else f"{row.change:+.1%}"
    if row.is_share and row.change is not None:
        change = f"{100 * row.change:+.1f} points"
    return {"": row.what, "A": a, "B": b, "change": change}


def _read(paths: Sequence[Path]) -> list[Analysis]:
    from ..observe.traces import analyse

    with _reading(sum(path.stat().st_size for path in paths)) as advance:
        return [analyse(path, advance) for path in paths]


def _reading(size: int) -> AbstractContextManager[Callable[[int], None]]:
    """A bar where there is something to wait for."""
    return progress("reading", size, of_bytes=True) if size > LONG_BYTES else nullcontext(lambda count: None)


def _us(microseconds: float) -> str:
    return f"{microseconds:,.0f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _shortened(name: str) -> str:
    """A kernel's name without what C++ puts around it."""
    plain = name.removeprefix("void ").split("(", 1)[0] if not name.startswith("(") else name
    return plain if len(plain) <= 32 else f"{plain[:29]}..."
