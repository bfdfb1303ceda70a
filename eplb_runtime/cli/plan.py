"""``eplb-runtime plan``: a placement for a measured load."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import LOAD, POLICY, add_cluster, add_command, adder, positive
from .inputs import policy_options, read_windows, topology_of
from .printing import print_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "plan",
        _run,
        "plan a placement for a measured load",
        """
  eplb-runtime plan load.npz --ranks 64 --ranks-per-node 8 --slots-per-rank 5 -o placement.json
  eplb-runtime plan load.npz --ranks 64 --ranks-per-node 8 --slots-per-rank 5 --current placement.json --max-moves 100
  eplb-runtime plan dump.pt --dense-layers 3 --ranks 32 --ranks-per-node 8 --slots-per-rank 9 --policy free --json
""",
    )
    command.add_argument("load", metavar="LOAD", help=LOAD)
    add_cluster(command)
    add = adder(command)
    add("--policy", "NAME", str, f"{POLICY} (default: incremental)", default="incremental")
    command.add_argument("--layout", choices=("home", "free"), help="training or inference (default: the policy's own)")
    add("--current", "PLACEMENT", str, "the placement that stands now, ours or an engine's; moves are counted from it")
    add("--expert-parameters", "N", positive, "of one expert, to count bytes: 12 each with its state, 2 in a copy")
    add("-o", "FILE", str, "write the placement, .json or .safetensors", dest="output")


def _run(arguments: argparse.Namespace) -> None:
    from ..formats.convert import read_placement
    from ..planner import CostModel, plan

    topology, load = topology_of(arguments), read_windows(arguments.load, arguments)
    current = None
    if arguments.current is not None:
        current = read_placement(arguments.current, arguments.ranks, arguments.dense_layers)
    parameters = arguments.expert_parameters
    planned = plan(
        load,
        topology,
        slots_per_rank=arguments.slots_per_rank,
        current=current,
        policy=arguments.policy,
        layout=arguments.layout,
        groups=arguments.groups,
        max_moves=arguments.max_moves,
        options=policy_options(arguments),
        cost=None if parameters is None else CostModel(home_bytes=12 * parameters, replica_bytes=2 * parameters),
    )
    if arguments.output is not None:
        planned.placement.save(arguments.output)
    if not arguments.json:
        print(planned)
        if arguments.output is not None:
            print(f"placement written to {arguments.output}")
        return
    placement = planned.placement
    print_json(
        {
            "policy": planned.policy,
            "layers": placement.num_layers,
            "experts": placement.num_experts,
            "ranks": placement.num_ranks,
            "slots_per_rank": placement.slots_per_rank,
            "imbalance": _mean_and_max(planned.imbalance_after),
            "lower_bound": _mean_and_max(planned.lower_bound),
            "moved_slots": planned.moved_slots,
            "moved_homes": planned.moved_homes,
            "seconds": planned.plan_seconds,
        }
    )


def _mean_and_max(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "max": float(values.max())}
