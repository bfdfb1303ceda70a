"""The migration engine: experts that change ranks with their whole state, against the same bytes as plain messages."""

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...distributed.consensus import Agreement
from ...distributed.process_groups import ProcessGroups
from ...distributed.ranks import Ranks
from ...distributed.transports import TRANSPORTS
from ...migration.engine import MigrationEngine
from ...moe.experts.registry import ExpertTensors
from ...placement import Placement
from ..launch import LaunchError
from . import timed

SHAPES = ((256, 512), (1024, 1024))
"""(hidden, width) of an expert: 3 x hidden x width parameters, three times that with Adam's state."""
HOMES = 4  # experts of a rank
STAGING_BYTES = 256 << 20
DEADLINE_SECONDS = 60.0


def run(
    device: torch.device, repeats: int = 10, transport: str = "auto", shapes: tuple[tuple[int, int], ...] = SHAPES
) -> dict[str, Any]:
    """Time moves of all experts of one layer to the next rank, in float32 with Adam's state. Collective; makes process
    groups and closes them.

    Returns:
        JSON-able; a ``"migrate"`` row for each shape has ``expert_mib`` (with state), GB/s that a rank receives
        (``gb_per_second``: the engine with packing, checksums, vote and commit; ``plain_gb_per_second``: batched isend
        and irecv of one message an expert) and their ``ratio``.

    Raises:
        LaunchError: there is one rank only.
    """
    if dist.get_world_size() < 2:
        raise LaunchError("bench migrate needs 2 ranks or more")
    groups = ProcessGroups(Ranks(), [1], device, DEADLINE_SECONDS)
    try:
        rows = [_row(groups, device, repeats, transport, shape) for shape in shapes]
    finally:
        groups.close()
    return {"ranks": groups.job.ep_size, "device": device.type, "transport": transport, "migrate": rows}


def _row(
    groups: ProcessGroups, device: torch.device, repeats: int, name: str, shape: tuple[int, int]
) -> dict[str, Any]:
    job, registry = groups.job, _experts(*shape, device)
    transport = TRANSPORTS[name](groups.migration, groups.backend, device, DEADLINE_SECONDS)
    transport.warm_up(time.monotonic() + DEADLINE_SECONDS)
    placement = Placement.initial(1, HOMES * job.ep_size, job.ep_size, 0)
    rows, agreement = placement.home_rows(1, job.state_holders), Agreement(groups.control, groups.store)
    engine = MigrationEngine(registry, transport, agreement, rows, job.migration_rank, STAGING_BYTES, DEADLINE_SECONDS)
    payload = sum(tensor.row_bytes for tensor in registry.of_home(0))
    # Memory that was never written is read from one page of zeros, faster than any other.
    messages = [torch.ones(payload, dtype=torch.uint8, device=device) for _ in range(2 * HOMES)]

    def migrate() -> None:
        nonlocal placement
        key = f"bench/{shape}/{placement.epoch}"
        outcome = engine.migrate(placement, _next_rank(placement), key, lambda *_: lambda: None)
        if outcome.failed_phase is not None:
            raise RuntimeError(f"the migration was dropped: {outcome.cause}")
        placement = outcome.placement

    seconds = timed([migrate, lambda: _send_on(messages, groups)], repeats, device, groups.control)
    engine.executor.close()
    ours, plain = (HOMES * payload / 1e9 / seconds.median(dim=0).values).tolist()
    return {"expert_mib": payload / 2**20, "gb_per_second": ours, "plain_gb_per_second": plain, "ratio": ours / plain}


def _experts(hidden: int, width: int, device: torch.device) -> ExpertTensors:
    """Home rows of one layer, with the state that AdamW has after a step."""
    shapes = ((HOMES, 2 * width, hidden), (HOMES, hidden, width))
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    registry = ExpertTensors(1, HOMES, [optimizer])
    for index, parameter in enumerate(parameters):
        registry.add(0, f"weight{index}", parameter)
    return registry


def _send_on(messages: list[torch.Tensor], groups: ProcessGroups) -> None:
    """Plain messages to the next rank, and as many from the one before."""
    ranks, me, data = groups.job.ep_size, groups.job.ep_rank, groups.data
    sent, received = messages[:HOMES], messages[HOMES:]
    operations = [dist.P2POp(dist.isend, m, (me + 1) % ranks, data, tag=i) for i, m in enumerate(sent)]
    operations += [dist.P2POp(dist.irecv, m, (me - 1) % ranks, data, tag=i) for i, m in enumerate(received)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _next_rank(placement: Placement) -> Placement:
    """Every expert in the same local slot, one rank further."""
    step = placement.slots_per_rank
    map_, home = np.roll(placement.physical_to_logical, step, axis=1), placement.require_homes() + step
    return Placement(map_, placement.num_experts, placement.num_ranks, home % placement.num_slots, placement.epoch + 1)
