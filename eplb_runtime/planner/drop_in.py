"""Our policies under the call that serving engines already make: DeepSeek EPLB's ``rebalance_experts``."""

from typing import TYPE_CHECKING

import numpy as np

from ..load import checked_load
from ..placement import Placement
from ..topology import Topology
from .api import check_whole_number, plan
from .policies.align import has_rule
from .policies.deepseek import balance
from .types import PlanError

if TYPE_CHECKING:
    from torch import Tensor


def rebalance_experts(
    weight: "Tensor",
    num_replicas: int,
    num_groups: int | None,
    num_nodes: int,
    num_gpus: int,
    *,
    policy: str | None = None,
    current: "Tensor | None" = None,
) -> "tuple[Tensor, Tensor, Tensor]":
    """Plan all layers, with the arguments and the results of deepseek-ai/EPLB's function of this name.

    Args:
        weight: ``[L, E]``, tokens of each logical expert, on any device; ``[T, L, E]``: of successive windows.
        num_replicas: P, all slots of a layer; a multiple of ``num_gpus``.
        num_groups: expert groups; where ``num_nodes`` divides them, each group stays on one node. None or 1: none.
        num_nodes: nodes; divides ``num_gpus``.
        num_gpus: R.
        policy: a policy of the free layout; None: ``"hierarchical"`` where there are groups to keep together, else
            ``"free"``. ``"deepseek"`` gives the very plan of deepseek-ai/EPLB; so does None where a rank has more slots
            than there are experts for it (on its node, where groups are kept together) and must hold some twice.
        current: integer ``[L, P]``, the expert in each slot now: the plan stays near it, and layers that would gain
            nothing stay as they are. None: plan from scratch.

    Returns:
        int64 on the CPU: ``physical_to_logical`` ``[L, P]``; ``logical_to_physical`` ``[L, E, C]``, padded with -1, C
        the largest copy count; ``copy_count`` ``[L, E]``. A token may go to any copy of its expert: they are planned
        for an even split.

    Raises:
        PlanError: sizes that do not fit, a load that is not usable, or a policy of another layout.
        PlacementError: ``current`` is no placement of these sizes.

    Example:
        The four experts of a layer on two GPUs of three slots; the two that get most have a copy:

        >>> import torch
        >>> load = torch.tensor([[90, 30, 20, 100]])
        >>> physical_to_logical, logical_to_physical, copy_count = rebalance_experts(load, 6, 1, 1, 2)
        >>> copy_count.tolist()
        [[2, 1, 1, 2]]
    """
    import torch

    asked = 1 if num_groups is None else num_groups
    sizes = {"num_replicas": num_replicas, "num_groups": asked, "num_nodes": num_nodes, "num_gpus": num_gpus}
    for name, value in sizes.items():
        check_whole_number(name, value)
    if num_gpus < 1 or num_nodes < 1 or num_gpus % num_nodes:
        raise PlanError(f"{num_gpus} ranks cannot be spread evenly over {num_nodes} nodes")
    if num_replicas % num_gpus:
        raise PlanError(f"{num_replicas} slots cannot be spread evenly over {num_gpus} ranks")
    groups = asked if has_rule(asked, num_nodes) else 1
    load = checked_load(weight, "load", PlanError)
    slots_per_rank = num_replicas // num_gpus
    within_reach = load.shape[-1] // (num_nodes if groups > 1 else 1)
    if slots_per_rank > within_reach and policy in (None, "deepseek") and current is None:
        maps = balance(load.mean(axis=0), num_replicas, groups, num_nodes, num_gpus)
    else:
        now_LP = None if current is None else torch.as_tensor(current).cpu().numpy()
        placement = plan(
            load,
            Topology(num_gpus, num_gpus // num_nodes),
            slots_per_rank=slots_per_rank,
            current=None if now_LP is None else Placement(now_LP, load.shape[-1], num_gpus),
            policy=policy or ("hierarchical" if groups > 1 else "free"),
            layout="free",
            groups=groups,
        ).placement
        maps = (placement.physical_to_logical, placement.logical_to_physical, placement.copy_count)
    slots, copies, count = (torch.from_numpy(map_.astype(np.int64)) for map_ in maps)
    return slots, copies, count
