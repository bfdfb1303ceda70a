"""Measure the engine: experts that change ranks with their whole state, beside the same bytes sent as they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..experts.record import RecordFormat
from ..experts.registry import ExpertTensors
from ..migration.agreement import Agreement
from ..migration.engine import MigrationEngine
from ..migration.transports.torch_p2p import TorchPointToPoint
from ..placement import Placement
from ..process_groups import ProcessGroups
from ..ranks import Ranks

SHAPES = ((256, 512), (1024, 1024))
"""(hidden, width) of an expert: 3 x hidden x width parameters, three times that with Adam's state."""


def run(
    device: torch.device,
    repeats: int = 10,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    experts_per_rank: int = 4,
    staging_bytes: int = 256 << 20,
) -> dict[str, Any]:
    """All experts of one layer go to the next rank, again and again; float32 with Adam's state. Collective.

    Args:
        device: of this rank.
        repeats: engine and plain messages take turns; a repeat takes as long as its slowest rank, the median counts.
        staging_bytes: as in `BalancerConfig`.

    Returns:
        JSON-able; ``"migrate"`` rows have ``hidden``, ``width``, ``expert_mib`` (with state), ``experts`` (that each
        rank sends and receives), ``gb_per_second`` and ``plain_gb_per_second`` (received by a rank: the engine with its
        packing, checksums, vote and commit; batched isend and irecv of one message an expert), ``ratio`` (1: as fast as
        the bytes themselves) and ``pause_ms_per_expert``.

    Raises:
        ValueError: there is one rank only.
    """
    if dist.get_world_size() < 2:
        raise ValueError("bench migrate needs 2 ranks or more")
    groups = ProcessGroups(Ranks(), [1], device, 60.0)
    try:
        rows = [_row(groups, device, repeats, *shape, experts_per_rank, staging_bytes) for shape in shapes]
    finally:
        groups.close()
    return {"ranks": groups.job.ep_size, "device": device.type, "migrate": rows}


def _row(
    groups: ProcessGroups,
    device: torch.device,
    repeats: int,
    hidden: int,
    width: int,
    homes: int,
    staging_bytes: int,
) -> dict[str, Any]:
    ranks = groups.job.ep_size
    registry = _experts(homes, hidden, width, device)
    transport = TorchPointToPoint(groups.migration, groups.backend, device, 60.0)
    engine = MigrationEngine(
        registry, transport, Agreement(groups.control), homes, groups.job.ep_rank, staging_bytes, 60.0
    )
    placement = Placement.initial(1, homes * ranks, ranks, 0)
    record_format = RecordFormat.of(registry.of_home(0))
    payload = record_format.payload_bytes
    messages = [torch.empty(payload, dtype=torch.uint8, device=device) for _ in range(2 * homes)]
    seconds = torch.zeros(repeats, 2, dtype=torch.float64)
    for repeat in range(-1, repeats):  # the first one warms up
        target = _next_rank(placement)
        dist.barrier(group=groups.control)
        outcome = engine.migrate(placement, target, f"bench/{hidden}x{width}/{repeat}", lambda *_: lambda: None)
        if outcome.failed_phase is not None:
            raise RuntimeError(f"the migration was dropped: {outcome.cause}")
        placement = outcome.placement
        dist.barrier(group=groups.control)
        began = time.perf_counter()
        _send_on(messages[:homes], messages[homes:], groups)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 0:
            seconds[repeat, 0], seconds[repeat, 1] = outcome.pause_seconds, time.perf_counter() - began
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=groups.control)
    pause, plain_seconds = seconds.median(dim=0).values.tolist()
    return {
        "hidden": hidden,
        "width": width,
        "expert_mib": payload / 2**20,
        "experts": homes,
        "gb_per_second": homes * payload / pause / 1e9,
        "plain_gb_per_second": homes * payload / plain_seconds / 1e9,
        "ratio": plain_seconds / pause,
        "pause_ms_per_expert": pause / homes * 1e3,
    }


def _experts(homes: int, hidden: int, width: int, device: torch.device) -> ExpertTensors:
    """Home rows of one layer, with the state that AdamW has after a step."""
    shapes = ((homes, 2 * width, hidden), (homes, hidden, width))
    parameters = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    registry = ExpertTensors(1, homes, [optimizer])
    for index, parameter in enumerate(parameters):
        registry.add(0, f"weight{index}", parameter)
    return registry


def _send_on(sent: Sequence[Tensor], received: Sequence[Tensor], groups: ProcessGroups) -> None:
    """Plain messages to the next rank, and as many from the one before."""
    ranks, me, data = groups.job.ep_size, groups.job.ep_rank, groups.data
    operations = [dist.P2POp(dist.isend, m, (me + 1) % ranks, data, tag=i) for i, m in enumerate(sent)]
    operations += [dist.P2POp(dist.irecv, m, (me - 1) % ranks, data, tag=i) for i, m in enumerate(received)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _next_rank(placement: Placement) -> Placement:
    """Every expert in the same local slot, one rank further."""
    assert placement.home is not None
    home = (placement.home + placement.slots_per_rank) % placement.num_slots
    map_ = np.empty_like(placement.physical_to_logical)
    np.put_along_axis(map_, home.astype(np.int64), np.arange(placement.num_experts, dtype=np.int32)[None], axis=1)
    return Placement(map_, placement.num_experts, placement.num_ranks, home, placement.epoch + 1)
