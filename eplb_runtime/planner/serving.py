"""Our plans under the calls that serving engines make of their own planners: put in their place, one line each.

* vLLM: ``DefaultEplbPolicy.rebalance_experts = staticmethod(serving.vllm)`` (``vllm.distributed.eplb.policy``).
* SGLang: ``deepseek.rebalance_experts = serving.sglang`` (``sglang.srt.eplb.eplb_algorithms``), with
  ``--eplb-algorithm deepseek`` or ``deepseek_hierarchical``; the same line on ``elasticity_aware`` for that one.
* vllm-ascend: ``DefaultEplb.rebalance_experts = serving.vllm_ascend`` (``vllm_ascend.eplb.core.policy``), with
  ``eplb_policy_type`` 1.

None of them has a registry that takes a policy from outside. Run the line in every process that plans, before it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..placement import PlacementError
from .drop_in import rebalance_experts
from .types import PlanError

if TYPE_CHECKING:
    from torch import Tensor


def vllm(
    weight: Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: Tensor | None = None,
    *,
    policy: str | None = None,
) -> Tensor:
    """As vLLM's ``AbstractEplbPolicy.rebalance_experts``: the expert of each slot, int64 ``[L, P]``.

    Args:
        old_global_expert_indices: ``[L, P]``, what stands now: the plan stays near it. Where it is of other sizes, or
            has empty slots, as after the number of ranks changed, the plan is made anew.
        policy: as for ``rebalance_experts``.

    Raises:
        AssertionError: what cannot be planned, which is what vLLM's own planner raises.
    """
    current = old_global_expert_indices
    if current is not None and (tuple(current.shape) != (len(weight), num_replicas) or bool((current < 0).any())):
        current = None
    try:
        return rebalance_experts(
            weight, num_replicas, num_groups, num_nodes, num_ranks, policy=policy, current=current
        )[0]
    except (PlanError, PlacementError) as error:
        raise AssertionError(str(error)) from None


def sglang(
    weight: Tensor,
    num_replicas: int,
    num_groups: int | None,
    num_nodes: int,
    num_gpus: int,
    enable_hierarchical: bool,
    active_ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``rebalance_experts`` of SGLang's ``deepseek`` and ``elasticity_aware``: three maps, as DeepSeek's.

    Args:
        enable_hierarchical: keep groups on their node.
        active_ranks: ``[R]``, 0 for ranks that are gone; their slots hold expert 0 then, as SGLang has it.
    """
    groups = num_groups if enable_hierarchical and (active_ranks is None or bool(active_ranks.all())) else None
    maps = rebalance_experts(weight, num_replicas, groups, num_nodes, num_gpus, available=active_ranks)
    return maps[0].clamp(min=0), maps[1], maps[2]


def vllm_ascend(
    policy: Any, current_expert_table: ArrayLike, expert_workload: ArrayLike
) -> tuple[int, NDArray[np.int64], list[list[list[int]]]]:
    """As vllm-ascend's ``EplbPolicy.rebalance_experts``: whether anything changes, layers by gain, the new table.

    Args:
        policy: ignored; the engine calls it as a method.
        current_expert_table: ``[L, R, S]``, the expert in each slot.
        expert_workload: ``[L, R, S]`` or ``[T, L, R, S]``, the tokens of each slot.

    Returns:
        The new table is ``[L, R, S]``; experts that stay on a rank stay in their slot.
    """
    table = np.asarray(current_expert_table)
    work = np.asarray(expert_workload, dtype=np.float64)
    work = work if work.ndim == 4 else work[None]
    layers, ranks, slots = table.shape
    flat, experts = table.reshape(layers, -1), int(table.max()) + 1
    load = np.zeros((len(work), layers, experts))
    np.add.at(
        load, (np.arange(len(work))[:, None, None], np.arange(layers)[:, None], flat), work.reshape(*work.shape[:2], -1)
    )
    new = rebalance_experts(load, ranks * slots, None, 1, ranks, current=flat)[0].numpy()  # type: ignore[arg-type]
    moved = (new != flat).sum(axis=1)
    order = np.argsort(-moved, kind="stable")
    return int((moved > 0).any()), order, new.reshape(table.shape).tolist()
