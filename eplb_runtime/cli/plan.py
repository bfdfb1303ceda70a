"""Plan a placement for a measured load.

examples:
  eplb-runtime plan load.npz --ranks 64 --ranks-per-node 8 --slots-per-rank 5 -o placement.json
  eplb-runtime plan load.npz --ranks 64 --ranks-per-node 8 --slots-per-rank 5 --current placement.json --max-moves 100
  eplb-runtime plan dump.pt --dense-layers 3 --ranks 32 --ranks-per-node 8 --slots-per-rank 9 --policy free --json
"""

import argparse
from pathlib import Path

from .arguments import LOAD, POLICIES, cluster, counted_windows, option, policy, read_job
from .printing import print_json, spinner

CURRENT = "the placement of now, ours or an engine's (free layout); moves are counted from it"
OPTIONS = [
    option("load", "LOAD", str, LOAD),
    *cluster(),
    option("--policy", "NAME", policy, f"{', '.join(POLICIES)} (default: incremental)", "incremental"),
    option("--current", "PLACEMENT", str, CURRENT),
    option("-o", "FILE", Path, "write the placement, .json", dest="output"),
]


def run(arguments: argparse.Namespace) -> None:
    from ..planner import plan
    from ..tools.formats.convert import read_placement
    from ..topology import Topology
    from ..utils.files import require_writable

    if arguments.output is not None:
        require_writable(arguments.output, (".json",))
    bandwidths = (1e9 * arguments.intra_node_bandwidth, 1e9 * arguments.inter_node_bandwidth)
    topology, current = Topology(arguments.ranks, arguments.ranks_per_node, *bandwidths), None
    if arguments.current is not None:
        current = read_placement(arguments.current, arguments.ranks, arguments.dense_layers or 0)
    load = counted_windows(read_job(arguments.load, arguments).load, arguments.load)
    asked = {name: getattr(arguments, name) for name in ("slots_per_rank", "policy", "groups", "max_moves")}
    with spinner():
        for _ in range(2):  # the first loads compiled code, so that the seconds of the plan are those of planning
            planned = plan(load, topology, current=current, **asked)
    if arguments.output is not None:
        planned.placement.save(arguments.output)
    if arguments.json:
        placement = planned.placement
        sizes = {"layers": placement.num_layers, "experts": placement.num_experts, "ranks": placement.num_ranks}
        sizes |= {"slots_per_rank": placement.slots_per_rank}
        by_layer = {"imbalance": planned.imbalance_after, "lower_bound": planned.lower_bound}
        judged = {name: {"mean": float(one.mean()), "max": float(one.max())} for name, one in by_layer.items()}
        moved = {"moved_slots": planned.moved_slots, "moved_homes": planned.moved_homes}
        return print_json({"policy": planned.policy, **sizes, **judged, **moved, "seconds": planned.plan_seconds})
    print(planned)
    print("imbalance is that of the load given; for that of the steps after a plan: eplb-runtime simulate")
    if arguments.output is not None:
        print(f"placement written to {arguments.output}")
