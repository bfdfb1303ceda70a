"""``eplb-runtime simulate``: a series of loads, played through several policies."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import (
    LOAD,
    POLICY,
    add_command,
    add_options,
    choice,
    cluster,
    names,
    not_negative_float,
    option,
    positive,
    positive_float,
)
from .inputs import read_windows, require_output, require_policies, topology_of, with_tokens
from .printing import note_compilation, print_json, print_table, progress

EXAMPLES = """
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5
  eplb-runtime simulate series.npz --ranks 8 --ranks-per-node 8 --slots-per-rank 5 --every 5 \\
      --policies static,deepseek,incremental --gate payoff -o windows.json
"""


def add(commands: Any) -> None:
    default = "static,deepseek,incremental"
    policies = f"{POLICY}; static is always shown (default: {default})"
    gate = "always: if the imbalance falls; payoff: if it pays for itself; off: as the policy says (default: always)"
    options = [
        option("trace", "TRACE", str, "a series of windows; " + LOAD),
        *cluster(),
        option("--every", "K", positive, "replan every K windows; the first K are only planned on", required=True),
        option("--policies", "A,B,...", names, policies, names(default)),
        option("--merge", "N", positive, "first merge every N windows of the series into one", 1),
        option("--history", "N", positive, "windows of the past that a plan sees (default: 4 K)"),
        option("-o", "FILE", str, "write every judged window, .json", dest="output"),
        choice("--gate", ("always", "payoff", "off"), gate, "always"),
    ]
    times = [
        option("--steps-per-window", "N", positive, "training steps of a window (default: 1)", 1),
        option("--hidden-size", "N", positive, "of the model (default: 7168, DeepSeek-V3)", 7168),
        option("--expert-hidden-size", "N", positive, "of one expert (default: 2048)", 2048),
        option("--flops", "F", positive_float, "FLOP/s a rank sustains on expert GEMMs (default: 4e14)", 400e12),
        option("--stall-seconds", "S", not_negative_float, "cost of a rebalance besides its bytes (default: 0)", 0.0),
    ]
    summary = "play a series of loads through several policies: plan on the past, judge on what came next"
    command = add_command(commands, "simulate", _run, summary, EXAMPLES, options)
    group = command.add_argument_group("step times", "a model that compares policies, not one that predicts")
    add_options(group, times)


def _run(arguments: argparse.Namespace) -> None:
    from ..tools.simulate import Series, StepModel, merge_windows, num_replans, simulate, write_windows

    require_policies(arguments.policies)
    policies = arguments.policies if "static" in arguments.policies else ["static", *arguments.policies]
    require_output(arguments.output, (".json",))
    topology = topology_of(arguments)
    load = merge_windows(with_tokens(arguments.trace, read_windows(arguments.trace, arguments)), arguments.merge)
    note_compilation()
    with progress("plans", len(policies) * num_replans(len(load), arguments.every)) as advance:
        runs = simulate(
            Series(
                load,
                arguments.every,
                arguments.history,
                arguments.steps_per_window,
                arguments.groups,
                arguments.max_moves,
                arguments.gate,
            ),
            topology,
            slots_per_rank=arguments.slots_per_rank,
            policies=policies,
            step_model=StepModel(
                hidden_size=arguments.hidden_size,
                expert_hidden_size=arguments.expert_hidden_size,
                flops=arguments.flops,
                stall_seconds=arguments.stall_seconds,
            ),
            on_progress=advance,
        )
    if arguments.output is not None:
        write_windows(runs, arguments.output)
    summaries = [run.summary() for run in runs]
    if arguments.json:
        print_json({"policies": summaries})
        return
    rows = [
        {
            "policy": summary["policy"],
            "layout": run.layout,
            "balancedness mean": f"{summary['balancedness']['mean']:.4f}",
            "balancedness p5": f"{summary['balancedness']['p5']:.4f}",
            "imbalance mean": f"{summary['imbalance']['mean']:.4f}",
            "imbalance p95": f"{summary['imbalance']['p95']:.4f}",
            "imbalance max": f"{summary['imbalance']['max']:.4f}",
            "cross-node tokens": f"{summary['crossing_share']:.1%}",
            "slots moved a replan": f"{summary['moved_slots_share']:.2%}",
            "rebalances": f"{summary['rebalances']} of {len(run.replans)}",
            "GB moved": f"{run.moved_bytes / 1e9:.1f}",
            "plan ms": f"{summary['plan_seconds'] * 1e3:.2f}",
            "step ms": f"{summary['step_seconds'] * 1e3:.3f}",
        }
        for run, summary in zip(runs, summaries, strict=True)
    ]
    judged = f"{len(load) - arguments.every} windows of {load.shape[1]} layers judged, replanned every "
    what = "imbalance is that of the windows after each plan, not of those it was made from"
    print_table(f"{judged}{arguments.every}; {what}", rows)
