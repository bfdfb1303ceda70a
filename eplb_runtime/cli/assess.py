"""``eplb-runtime assess``: whether balancing would pay for a job whose load was recorded."""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import fields
from itertools import count
from typing import TYPE_CHECKING, Any

from .arguments import (
    LOAD,
    InputError,
    add_command,
    add_dense_layers,
    adder,
    not_negative,
    not_negative_float,
    positive,
    positive_float,
    share,
    windows,
)
from .inputs import read_job
from .printing import COLUMNS, noting_compilation, print_json, print_lines, print_table, spinner

if TYPE_CHECKING:
    from ..tools.assess import Scenario


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "assess",
        _run,
        "say whether balancing would pay for a recorded job",
        """
  eplb-runtime assess runs/first                        # the folder of eplb.record or of BalancerConfig(run=...)
  eplb-runtime assess runs/first --ranks 64 --ranks-per-node 8
  eplb-runtime assess sample --ranks 8 --step-seconds 2.5 --moe-share 0.5
  eplb-runtime assess router_traces/ --ranks 8          # of Megatron's --moe-routing-trace-path
  eplb-runtime assess rollouts/ --ranks 8               # of slime's --save-debug-rollout-data rollouts/{rollout_id}.pt
""",
    )
    command.add_argument("record", metavar="RUN|TRACE", help="a recorded series of windows; " + LOAD)
    add = adder(command)
    add("--ranks", "R", positive, "ranks of the EP group (default: as recorded)")
    add("--ranks-per-node", "G", positive, "ranks that share a node (default: as recorded)")
    add("--every", "N", positive, "training steps between plans (default: as recorded)")
    second = "of a rank, in the second plan; 0: move homes alone (default: 1; of Megatron's trace, 0)"
    add("--replica-slots", "K", not_negative, second)
    add("--windows", "A:B", windows, "of the record, only these, as 0:50", default=slice(None))
    add_dense_layers(command)
    add = adder(command.add_argument_group("figures", "what the record says, and else what is assumed"))
    of_step = "share of a step in expert work, dispatch to combine (default: as recorded, or .4, and .2 to .6)"
    add("--moe-share", "X", share, of_step)
    add("--step-seconds", "S", positive_float, "seconds of a training step (default: as recorded, or 1)")
    steps = "training steps that a window stands for (default: as recorded, or by its tokens)"
    add("--steps-per-window", "N", positive, steps)
    add("--expert-parameters", "N", positive, "of one expert (default: as recorded, or DeepSeek-V3's)")
    kept = "that the optimizer keeps for one expert (default: as recorded, or Adam's)"
    add("--optimizer-bytes", "N", not_negative, kept)
    fast = "of a rank, inside its node (default: as measured, or 400; 1 on CPUs)"
    add("--intra-node-bandwidth", "GB/S", positive_float, fast)
    slow = "of a rank, to other nodes (default: as measured, or 50; 1 on CPUs)"
    add("--inter-node-bandwidth", "GB/S", positive_float, slow)
    add("--stall-seconds", "S", not_negative_float, "cost of a rebalance besides its bytes (default: 0.05)")


def _run(arguments: argparse.Namespace) -> None:
    from ..tools.assess import Overrides, assess

    record = read_job(arguments.record, arguments)
    overrides = Overrides(**{entry.name: getattr(arguments, entry.name) for entry in fields(Overrides)})
    try:
        with noting_compilation(), spinner() as shown:
            plans = count(1)
            assessment = assess(record, overrides, lambda: shown.update(f"plan {next(plans)}"))
    except ValueError as error:
        raise InputError(str(error)) from None
    if arguments.json:
        print_json(assessment.fields())
        return
    said = assessment.paragraph()
    if assessment.left_out:
        said += (
            f" Windows of other numbers of steps than {record.steps_per_window}, as most have, were left out: "
            f"{assessment.left_out} of {len(record.load)}."
        )
    print_lines(*textwrap.wrap(said, COLUMNS, break_on_hyphens=False))
    if assessment.pays is None:
        return
    ways = (assessment.now, assessment.homes, assessment.replicas)
    print_lines("")
    title = "Imbalance is max / mean rank load, over all layers and judged windows."
    print_table(title, [_row(way) for way in ways if way is not None])
    if assessment.assumed:
        print_lines("", "Assumed, since neither the record nor an option says it:")
        print_lines(*(f"  {one.what}: {_figure(one.value)} ({one.option})" for one in assessment.assumed))


def _row(way: Scenario) -> dict[str, str]:
    return {
        "experts": way.name,
        "imbalance": f"{way.imbalance:.2f}",
        "p95": f"{way.worst:.2f}",
        "step saved": f"{way.step_saved:.1%}",
        "refresh ms a step": f"{way.refresh_seconds * 1e3:.3g}",
        "moving s a plan": f"{way.move_seconds:.3g}",
        "plans that move": f"{way.rebalances} of {way.plans}",
    }


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
