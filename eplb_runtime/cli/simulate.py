"""``eplb-runtime simulate``: a series of loads, played through several policies."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from . import arguments as kinds
from .arguments import LOAD, InputError, add_command, choice, cluster, counted_windows, option, read_job, topology_of
from .printing import print_json, print_table, spinner

if TYPE_CHECKING:
    from ..observe.run_state import JobRecord

EXAMPLES = """
  eplb-runtime simulate runs/first                      # its ranks, nodes and interval, and a replica slot
  eplb-runtime simulate runs/first --policies deepseek,incremental --gate payoff
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5
"""

GIVEN = ("every", "steps_per_window", "groups", "max_moves", "gate")


def add(commands: Any) -> None:
    default = ["static", "deepseek", "incremental"]
    policies = f"{', '.join(kinds.POLICIES)}; static is always shown (default: {','.join(default)})"
    gate = "always: if the imbalance falls; payoff: if it pays for itself; off: as the policy says (default: always)"
    options = [
        option("trace", "TRACE", str, "a series of windows; " + LOAD),
        *cluster(needed=False),
        option("--every", "K", kinds.positive, "replan every K windows, the first K not judged (default: as recorded)"),
        option("--policies", "A,B,...", kinds.several(kinds.policy), policies, default),
        choice("--gate", ("always", "payoff", "off"), gate, "always"),
        option("--steps-per-window", "N", kinds.positive, "training steps of a window (default: 1)", 1),
    ]
    summary = "play a series of loads through several policies: plan on the past, judge on what came next"
    add_command(commands, "simulate", _run, summary, EXAMPLES, options)


def _take_from(record: JobRecord, arguments: argparse.Namespace) -> None:
    """Take what was not given from the record, as `assess` does."""
    from ..tools.assess import figures_of

    names = ("ranks", "ranks_per_node", "slots_per_rank", "every")
    missing = [name for name in names if getattr(arguments, name) is None]
    if missing and not record.job.ranks:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise InputError(f"{arguments.trace} does not say what job it is of: give {options}")
    if missing:
        figures = figures_of(record, {name: getattr(arguments, name) for name in names[:2]})
        slots = record.load.shape[2] // figures.ranks + figures.replica_slots
        known = (figures.ranks, figures.topology.ranks_per_node, slots, figures.every_windows)
        vars(arguments).update((name, one) for name, one in zip(names, known, strict=True) if name in missing)


def _run(arguments: argparse.Namespace) -> None:
    from ..tools.simulate import Series, StepModel, simulate

    policies = arguments.policies if "static" in arguments.policies else ["static", *arguments.policies]
    record = read_job(arguments.trace, arguments)
    _take_from(record, arguments)
    model = StepModel(weight_bytes=record.job.expert_bytes, state_bytes=record.job.optimizer_bytes or None)
    load = counted_windows(record.load, arguments.trace)
    with spinner():
        runs = simulate(
            Series(load, **{name: getattr(arguments, name) for name in GIVEN}),
            topology_of(arguments),
            slots_per_rank=arguments.slots_per_rank,
            step_model=model,
            policies=policies,
        )
    summaries = [run.summary() for run in runs]
    if arguments.json:
        print_json({"policies": summaries})
        return
    rows = []
    for run, summary in zip(runs, summaries, strict=True):
        row = {"rebalances": f"{summary.pop('rebalances')} of {len(run.plans)}", "GB moved": run.moved_bytes / 1e9}
        for name, value in summary.items():
            row |= {f"{name} {of}": one for of, one in value.items()} if isinstance(value, dict) else {name: value}
        rows.append({"policy": row.pop("policy"), "layout": run.plans[0].placement.layout, **row})
    judged = f"{len(load) - arguments.every} windows of {load.shape[1]} layers judged, replanned every "
    what = "imbalance is that of the windows after each plan, not of those it was made from"
    print_table(f"{judged}{arguments.every}; {what}", rows)
