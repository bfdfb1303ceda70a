"""Play a series of loads through several policies: plan on the past, judge on what came next.

examples:
  eplb-runtime simulate runs/first                      # its ranks, nodes and interval, and a replica slot
  eplb-runtime simulate runs/first --policies deepseek,incremental --gate payoff
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5
"""

import argparse
from dataclasses import replace

from . import arguments as kinds
from .arguments import LOAD, InputError, choice, cluster, counted_windows, option, read_job
from .printing import print_json, print_table, spinner

DEFAULT = ["static", "deepseek", "incremental"]
POLICIES = f"{', '.join(kinds.POLICIES)}; static is always shown (default: {','.join(DEFAULT)})"
GATE = "always: if the imbalance falls; payoff: if it pays for itself; off: as the policy says (default: always)"
OPTIONS = [
    option("trace", "TRACE", str, "a series of windows; " + LOAD),
    *cluster(needed=False),
    option("--every", "K", kinds.positive, "replan every K windows, the first K not judged (default: as recorded)"),
    option("--policies", "A,B,...", kinds.several(kinds.policy), POLICIES, DEFAULT),
    choice("--gate", ("always", "payoff", "off"), GATE, "always"),
    option("--steps-per-window", "N", kinds.positive, "training steps of a window (default: 1)", 1),
]
NEEDED = ("ranks", "ranks_per_node", "slots_per_rank", "every")
GIVEN = ("steps_per_window", "groups", "max_moves", "gate")


def run(arguments: argparse.Namespace) -> None:
    from ..tools.assess import figures_of
    from ..tools.simulate import Series, StepModel, simulate

    policies = arguments.policies if "static" in arguments.policies else ["static", *arguments.policies]
    record, given = read_job(arguments.trace, arguments), vars(arguments)
    missing = [f"--{name.replace('_', '-')}" for name in NEEDED if given[name] is None]
    if missing and not record.job.ranks:
        raise InputError(f"{arguments.trace} does not say what job it is of: give {', '.join(missing)}")
    named = (*NEEDED[:2], "intra_node_bandwidth", "inter_node_bandwidth")
    figures = figures_of(record, {name: given[name] for name in named})
    slots = arguments.slots_per_rank or record.load.shape[2] // figures.ranks + figures.replica_slots
    every = arguments.every or figures.every_windows
    weights, state, model = record.job.expert_bytes, record.job.optimizer_bytes, StepModel()
    model = replace(model, replica_bytes=weights) if weights else model
    model = replace(model, home_bytes=weights + state) if weights and state else model
    load = counted_windows(record.load, arguments.trace)
    series = Series(load, every, **{name: given[name] for name in GIVEN})
    with spinner():
        runs = simulate(series, figures.topology, slots_per_rank=slots, step_model=model, policies=policies)
    summaries = [run.summary() for run in runs]
    if arguments.json:
        return print_json({"policies": summaries})
    rows = []
    for run, summary in zip(runs, summaries, strict=True):
        row = {"rebalances": f"{summary.pop('rebalances')} of {len(run.plans)}", "GB moved": run.moved_bytes / 1e9}
        for name, value in summary.items():
            row |= {f"{name} {of}": one for of, one in value.items()} if isinstance(value, dict) else {name: value}
        rows.append({"policy": row.pop("policy"), "layout": run.plans[0].placement.layout, **row})
    judged = f"{len(load) - every} windows of {load.shape[1]} layers judged, replanned every {every}"
    what = "imbalance is that of the windows after each plan, not of those it was made from"
    print_table(f"{figures.ranks} ranks with {slots} slots each; {judged}; {what}", rows)
