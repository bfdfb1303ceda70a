"""``eplb-runtime simulate``: a series of loads, played through several policies."""

from __future__ import annotations

import argparse
from typing import Any

from . import arguments as kinds
from .arguments import LOAD, POLICIES, add_command, add_options, choice, cluster, option, positive
from .inputs import read_windows, topology_of
from .printing import note_compilation, print_json, print_table, spinner

EXAMPLES = """
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5 \\
      --policies static,deepseek,incremental --gate payoff
"""

GIVEN = ("every", "steps_per_window", "groups", "max_moves", "gate")
SIZES = ("hidden_size", "expert_hidden_size", "flops")


def add(commands: Any) -> None:
    default = ["static", "deepseek", "incremental"]
    policies = f"{', '.join(POLICIES)}; static is always shown (default: {','.join(default)})"
    gate = "always: if the imbalance falls; payoff: if it pays for itself; off: as the policy says (default: always)"
    options = [
        option("trace", "TRACE", str, "a series of windows; " + LOAD),
        *cluster(),
        option("--every", "K", positive, "replan every K windows; the first K are only planned on", required=True),
        option("--policies", "A,B,...", kinds.several(kinds.policy), policies, default),
        choice("--gate", ("always", "payoff", "off"), gate, "always"),
    ]
    times = [
        option("--steps-per-window", "N", positive, "training steps of a window (default: 1)", 1),
        option("--hidden-size", "N", positive, "of the model (default: 7168, DeepSeek-V3)", 7168),
        option("--expert-hidden-size", "N", positive, "of one expert (default: 2048)", 2048),
        option("--flops", "F", kinds.positive_float, "FLOP/s a rank sustains on expert GEMMs (default: 4e14)", 400e12),
    ]
    summary = "play a series of loads through several policies: plan on the past, judge on what came next"
    command = add_command(commands, "simulate", _run, summary, EXAMPLES, options)
    group = command.add_argument_group("step times", "a model that compares policies, not one that predicts")
    add_options(group, times)


def _run(arguments: argparse.Namespace) -> None:
    from ..tools.simulate import Series, StepModel, simulate

    policies = arguments.policies if "static" in arguments.policies else ["static", *arguments.policies]
    topology = topology_of(arguments)
    load = read_windows(arguments.trace, arguments)
    note_compilation()
    with spinner():
        runs = simulate(
            Series(load, **{name: getattr(arguments, name) for name in GIVEN}),
            topology,
            slots_per_rank=arguments.slots_per_rank,
            policies=policies,
            step_model=StepModel(**{name: getattr(arguments, name) for name in SIZES}),
        )
    summaries = [run.summary() for run in runs]
    if arguments.json:
        print_json({"policies": summaries})
        return
    rows = []
    for run, summary in zip(runs, summaries, strict=True):
        row = {"rebalances": f"{summary.pop('rebalances')} of {len(run.replans)}", "GB moved": run.moved_bytes / 1e9}
        for name, value in summary.items():
            row |= {f"{name} {of}": one for of, one in value.items()} if isinstance(value, dict) else {name: value}
        rows.append({"policy": row.pop("policy"), "layout": run.layout, **row})
    judged = f"{len(load) - arguments.every} windows of {load.shape[1]} layers judged, replanned every "
    what = "imbalance is that of the windows after each plan, not of those it was made from"
    print_table(f"{judged}{arguments.every}; {what}", rows)
