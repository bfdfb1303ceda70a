"""How far tokens travel under a placement: to a copy on their own rank, on their own node, or on another.

A batch's tokens go to copies on their own rank first, then on their node, then to the rest (`split_for_rank`); so what
leaves a node of an expert's tokens is what the copies there do not take. Sources are counted by node, the ranks of a
node send alike.

Shape suffixes in addition to those of ``routing``: N nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..moe.routing.tables import SplitTables
from ..moe.routing.water_filling import split_totals
from ..placement import Placement
from ..topology import Topology
from .evaluate import UNITS, in_units

FloatArray = NDArray[np.float64]


def received(
    load: FloatArray, placement: Placement, topology: Topology, share_LNE: FloatArray | None = None
) -> FloatArray:
    """float64 ``[L, R, 2]``: tokens that each rank gets from other ranks of its node, and from other nodes.

    Args:
        load: float64 ``[L, E]``.
        share_LNE: as in `types.PlanRequest`; None: tokens come from all nodes alike.
    """
    nodes, node_ranks, ranks = topology.num_nodes, topology.ranks_per_node, topology.num_ranks
    result, slot_LEC = np.empty((len(load), ranks, 2)), placement.logical_to_physical
    if placement.home is None:
        tokens_LEC = np.broadcast_to((load / placement.copy_count)[:, :, None], slot_LEC.shape)
    else:
        quota_LEC = split_totals(in_units(load), SplitTables.of(placement))
        tokens_LEC = quota_LEC * (load.sum(axis=1) / UNITS)[:, None, None]
    for layer, (load_E, slot_EC) in enumerate(zip(load, slot_LEC, strict=True)):
        expert, copy = np.nonzero(slot_EC >= 0)
        computed_ER = np.zeros((len(load_E), ranks))
        np.add.at(computed_ER, (expert, placement.rank_of(slot_EC[expert, copy])), tokens_LEC[layer, expert, copy])
        share_EN = np.full((len(load_E), nodes), 1.0 / nodes) if share_LNE is None else share_LNE[layer].T
        computed_EN = computed_ER.reshape(len(load_E), nodes, node_ranks).sum(axis=2)
        come_EN = load_E[:, None] * share_EN
        far_EN = np.maximum(computed_EN - come_EN, 0.0)
        far_EN = np.divide(far_EN, computed_EN, out=np.zeros_like(far_EN), where=computed_EN > 0)
        far_ER = computed_ER * np.repeat(far_EN, node_ranks, axis=1)
        own_ER = np.minimum(computed_ER, np.repeat(come_EN / node_ranks, node_ranks, axis=1))
        result[layer, :, 0] = np.maximum(computed_ER - far_ER - own_ER, 0.0).sum(axis=0)
        result[layer, :, 1] = far_ER.sum(axis=0)
    return result


def crossing_share(
    load: FloatArray, placement: Placement, topology: Topology, share_LNE: FloatArray | None = None
) -> FloatArray:
    """float64 ``[L]``: the share of all tokens that are computed on another node than they come from."""
    total = load.sum(axis=1)
    far = received(load, placement, topology, share_LNE)[:, :, 1].sum(axis=1)
    return np.asarray(np.divide(far, total, out=np.zeros_like(total), where=total > 0))
