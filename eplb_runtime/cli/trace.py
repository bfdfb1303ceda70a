"""Say what profiler traces say: busy, hidden, exposed.

examples:
  eplb-runtime trace analyse rank0.json.gz
  eplb-runtime trace analyse traces/                        # all ranks of a job
  eplb-runtime trace analyse rank0.json --layers --json
"""

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.text import counted
from .arguments import flag, option
from .printing import print_json, print_table, spinner

if TYPE_CHECKING:
    from ..observe.traces import Analysis


OPTIONS_OF_ANALYSE = [
    option("traces", "FILE", str, "a trace (.json, .json.gz), or a folder of them", nargs="+"),
    flag("--layers", "phases by layer and micro-batch, not summed"),
]
ACTIONS = {"analyse": ("Say what ran, what was hidden, and what phases took.", OPTIONS_OF_ANALYSE)}


def run(arguments: argparse.Namespace) -> None:
    from ..observe.traces import analyse, traces_in

    with spinner():
        analyses = [analyse(path) for given in arguments.traces for path in traces_in(Path(given))]
    if arguments.json:
        each = [asdict(one) for one in analyses]
        return print_json(each[0] if len(each) == 1 else {"traces": each})
    for one in analyses:
        _print_one(one, arguments.layers)
    if twice := [str(rank) for rank, n in Counter(one.rank for one in analyses).items() if n > 1 and rank is not None]:
        print(f"several files are of rank {', '.join(twice)}: leave out those of other runs")


def _print_one(one: "Analysis", by_layer: bool) -> None:
    sent = one.communication
    times = {"span": one.span_us, "busy": one.busy_us, "computing": one.compute_us, "communication": sent.us}
    times |= {"  hidden under computing": sent.hidden_us, "  exposed": sent.exposed_us, "idle": one.idle_us}
    rank = "" if one.rank is None else f", rank {one.rank}"
    rows = [{"": what, "us": _us(us), "of span": f"{us / (one.span_us or 1):.1%}"} for what, us in times.items()]
    print_table(f"{one.file}{rank} ({one.device.upper()})", rows)
    share = f"{sent.hidden_share:.1%} of communication is hidden" if sent.us else "nothing was sent"
    steps = f"; {counted(one.steps, 'step')} of {_us(one.step_us)} us (median)" if one.steps else ""
    print(f"{share}{steps}\n")
    if one.phases:
        print_table("phases (host: of the thread that runs them)", _phases(one, by_layer))
    longest = [
        {"runs": kernel.count, "us": _us(kernel.us), "kind": kernel.kind, "name": _shortened(kernel.name)}
        for kernel in one.kernels[:10]
    ]
    print_table(f"the longest of {len(one.kernels)} kernels" if one.device == "gpu" else "operators", longest)


def _phases(one: "Analysis", by_layer: bool) -> list[dict[str, Any]]:
    """Return a row for each phase, over layers and micro-batches unless ``by_layer``."""
    heads, rows = ("phase", "layer", "micro-batch"), dict[tuple[Any, ...], Counter[str]]()
    for phase in one.phases:
        key = (phase.name, phase.layer, phase.micro_batch) if by_layer else (phase.name,)
        of_phase = {"host": phase.host_us, "compute": phase.compute_us, "send": phase.communication_us}
        rows.setdefault(key, Counter()).update({"spans": phase.spans, **of_phase, "exposed": phase.exposed_us})
    spans = {key: row.pop("spans") for key, row in rows.items()}
    times = {key: {f"{name} us": _us(us) for name, us in row.items()} for key, row in rows.items()}
    return [{**dict(zip(heads, key, strict=False)), "spans": spans[key], **times[key]} for key in rows]


def _us(microseconds: float) -> str:
    return f"{microseconds:,.0f}"


def _shortened(name: str) -> str:
    plain = name.removeprefix("void ").split("(", 1)[0] if not name.startswith("(") else name
    return plain if len(plain) <= 32 else f"{plain[:29]}..."
