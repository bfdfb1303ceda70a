"""What computes the experts of a layer on this rank: homes alone, or with copies, whole or sliced over EDP."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ...balancer.gradients.division import Divisors
from ...config import BalancerConfig
from ...distributed.ranks import Job
from ...moe.experts.aligned import Aligned
from ...moe.experts.compute import LocalExperts
from ...moe.experts.slices import is_sliced, local
from ...replicas.bank import ReplicaBank, gathered_memory, replica_memory, slice_of_row
from ...replicas.persistent import PersistentReplicas
from ...replicas.sharded import ReplicaGather, ShardedReplicas
from ...replicas.sync import ReplicaSync
from .description import MoELayer

logger = logging.getLogger("eplb_runtime")


def local_experts(
    index: int,
    layer: MoELayer,
    job: Job,
    divisors: Divisors,
    replicas: ReplicaSync | None,
    bank: ReplicaBank | None,
    gather: ReplicaGather,
) -> LocalExperts:
    """Return the slots of one layer, as dispatch calls them."""
    assert layer.compute is not None
    compute = layer.compute if layer.alignment == 1 else Aligned(layer.compute, layer.alignment)
    leaves = _live_parameters(layer)
    sliced = any(is_sliced(parameter) for parameter in leaves)
    # FSDP averages over EDP; the rest of the division is done before. A host that divides rows reduces by itself.
    of_slices = 1.0 if job.divided_rows else job.gradient_divisor / len(job.edp_ranks)
    divisor = of_slices if sliced else divisors.in_layers
    if replicas is None and layer.live_weights is not None:
        return LocalExperts(compute, layer.live_weights, divisor=1.0 if sliced else divisor)
    if replicas is None:
        return LocalExperts(compute, partial(_live_parameters, layer), divisor)
    assert bank is not None
    if bank.is_sliced:
        live_weights = layer.live_weights or partial(_live_parameters, layer)
        return ShardedReplicas(compute, index, bank, replicas, homes=live_weights, divisor=divisor, gather=gather)
    return PersistentReplicas(compute, index, bank, replicas, divisor)


def _live_parameters(layer: MoELayer) -> list[Tensor]:
    return [layer.parameter(name) for name in layer.parameters]


def log_memory(config: BalancerConfig, homes: Sequence[Sequence[Tensor]], training: bool, parts: int) -> None:
    """Say what replica slots take; ``parts`` as of `ReplicaBank`."""
    here = [[slice_of_row(local(p).detach(), parts).requires_grad_(p.requires_grad) for p in layer] for layer in homes]
    memory = replica_memory(here, config.replica_slots, training)
    sliced = [layer for layer in homes if is_sliced(layer[0])]
    if sliced:
        whole = gathered_memory(sliced, config.replica_slots)
        logger.info(
            "replica slots: %d per rank and layer, sliced as the experts are; memory per rank: %.3g MiB, besides %.3g "
            "MiB of gradients and at most %.3g MiB of one layer's whole copies",
            config.replica_slots,
            memory.kept / 2**20,
            memory.held_back / 2**20,
            whole / 2**20,
        )
        return
    logger.info(
        "replica slots: %d per rank and layer; memory per rank: %.3g MiB (and %.3g MiB with no_sync)",
        config.replica_slots,
        memory.kept / 2**20,
        memory.held_back / 2**20,
    )
