"""Measure the engine: experts that change ranks with their whole state, beside the same bytes sent as they are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...distributed.consensus import Agreement, gather_bytes
from ...distributed.node import node_of_this_rank
from ...distributed.process_groups import ProcessGroups
from ...distributed.ranks import Ranks
from ...distributed.transports import TRANSPORTS
from ...distributed.transports.automatic import probe
from ...distributed.transports.base import Message, Pending, Transport, Wrapping
from ...migration.between_steps import BetweenSteps
from ...migration.engine import MigrationEngine
from ...migration.progress import MigrationProgress
from ...moe.experts.optimizer_state import Ranges
from ...moe.experts.record import RecordFormat
from ...moe.experts.registry import ExpertTensors
from ...placement import Placement

NAMES = ("torch", "cuda_ipc", "nixl")
SHAPES = ((256, 512), (1024, 1024))
"""(hidden, width) of an expert: 3 x hidden x width parameters, three times that with Adam's state."""

STATE_PLACES = ("on the device", "in host memory", "divided over two")
"""Where float32 masters and Adam's moments of experts in bfloat16 are: as Megatron's optimizers have them, all of an
expert beside it, in host memory with a second master on the device, or cut evenly over two ranks that hold the same."""


class _Weighed(Wrapping):
    """A transport whose messages to other ranks are added up."""

    def __init__(self, inner: Transport, rank: int) -> None:
        super().__init__(inner)
        self._rank = rank
        self.nbytes = 0

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        self.nbytes += sum(message.data.numel() for message in sends if message.peer != self._rank)
        return super().post(sends, receives)


def run(
    device: torch.device,
    repeats: int = 10,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    experts_per_rank: int = 4,
    staging_bytes: int = 256 << 20,
    transports: Sequence[str] | None = None,
) -> dict[str, Any]:
    """All experts of one layer go to the next rank, again and again; float32 with Adam's state. Collective.

    Args:
        device: of this rank.
        repeats: engine and plain messages take turns; a repeat takes as long as its slowest rank, the median counts.
        staging_bytes: as in `BalancerConfig`.
        transports: names of transports; None: all that every rank can use.

    Returns:
        JSON-able; ``"migrate"`` rows have ``transport``, ``hidden``, ``width``, ``expert_mib`` (with state),
        ``experts`` (that each rank sends and receives), ``gb_per_second``, ``transfer_gb_per_second`` and
        ``plain_gb_per_second`` (received by a rank: the engine with its packing, checksums, vote and commit; of it what
        posts, carries and checks; batched isend and irecv of one message an expert), ``ratio`` and ``transfer_ratio``
        (1: as fast as the plain messages), ``wire_ratio`` (bytes sent over those of the experts) and
        ``pause_ms_per_expert``. ``"state"`` rows, with the first transport and shape, have ``place`` (out of
        `STATE_PLACES`; the last one only on an even number of ranks, 4 at least), ``transport``, ``experts`` (that move
        in all), ``mib_per_expert`` (sent by all ranks), ``ms_per_expert`` (the pause over the experts of a rank), and
        ``bytes_ratio`` and ``ms_ratio`` over the first row; they take turns.

    Raises:
        ValueError: there is one rank only.
    """
    if dist.get_world_size() < 2:
        raise ValueError("bench migrate needs 2 ranks or more")
    groups = ProcessGroups(Ranks(), [1], device, 60.0)
    try:
        if transports is None:
            transports = _usable_everywhere(device, groups)
        rows = [
            _row(groups, device, repeats, name, *shape, experts_per_rank, staging_bytes)
            for shape in shapes
            for name in transports
        ]
        state = _by_state(groups, device, repeats, transports[0], shapes[0], experts_per_rank, staging_bytes)
    finally:
        groups.close()
    return {"ranks": groups.job.ep_size, "device": device.type, "migrate": rows, "state": state}


def _by_state(
    groups: ProcessGroups,
    device: torch.device,
    repeats: int,
    transport: str,
    shape: tuple[int, int],
    homes: int,
    staging_bytes: int,
) -> list[dict[str, Any]]:
    """The same move, with the optimizer's state in other places."""
    world, rank = dist.get_world_size(), dist.get_rank()
    kinds = STATE_PLACES if world >= 4 and world % 2 == 0 else STATE_PLACES[:2]
    moves: list[_Move] = []
    with ExitStack() as ends:
        for kind in kinds:
            of_kind, part = groups, 0
            if kind == STATE_PLACES[2]:
                of_kind = ProcessGroups(
                    Ranks(ep=tuple(range(rank % 2, world, 2)), divided_state=True), [1], device, 60.0
                )
                ends.callback(of_kind.close)
                part = of_kind.job.migration_rank % 2
            registry = _ExpertState(kind, *shape, homes, part, device).registry()
            carrier = TRANSPORTS[transport](of_kind.migration, of_kind.backend, device, 60.0)
            moves.append(_Move(registry, homes, of_kind, carrier, staging_bytes))
            ends.callback(moves[-1].close)
        seconds = torch.zeros(repeats, len(moves), dtype=torch.float64)
        nbytes = torch.zeros(len(moves), dtype=torch.int64)
        for repeat in range(-1, repeats):  # the first one warms up
            for number, move in enumerate(moves):
                dist.barrier(group=groups.control)
                pause = move.on(f"bench/state/{kinds[number]}/{repeat}").pause_seconds
                nbytes[number] = move.sent_bytes
                if repeat >= 0:
                    seconds[repeat, number] = pause
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=groups.control)
    dist.all_reduce(nbytes, group=groups.control)
    pauses = seconds.median(dim=0).values.tolist()
    rows = []
    for kind, move, pause, sent in zip(kinds, moves, pauses, nbytes.tolist(), strict=True):
        experts = homes * move.ranks
        figures = {"mib_per_expert": sent / experts / 2**20, "ms_per_expert": pause / homes * 1e3}
        rows.append({"place": kind, "transport": transport, "experts": experts, **figures})
    for row in rows:
        row["bytes_ratio"] = row["mib_per_expert"] / rows[0]["mib_per_expert"]
        row["ms_ratio"] = row["ms_per_expert"] / rows[0]["ms_per_expert"]
    return rows


class _ExpertState:
    """Experts in bfloat16, each a tensor of its own, and their state (`STATE_PLACES`); a `StateOwner`.

    Args:
        part: this rank's place among those that hold the same experts.
    """

    varies_in_device = False

    def __init__(self, kind: str, hidden: int, width: int, homes: int, part: int, device: torch.device) -> None:
        shapes = ((2 * width, hidden), (hidden, width))
        self._weights = [
            tuple(nn.Parameter(torch.ones(shape, dtype=torch.bfloat16, device=device)) for _ in range(homes))
            for shape in shapes
        ]
        flat = [weight for of_kind in self._weights for weight in of_kind]
        place = torch.device("cpu") if kind == STATE_PLACES[1] else device
        half = -(-sum(weight.numel() for weight in flat) // 2)
        self._state: dict[Tensor, dict[str, Tensor]] = {}
        self._copies: dict[Tensor, dict[str, tuple[Tensor, ...]]] = {}
        self._ranges: dict[Tensor, Ranges] = {}
        begin = 0
        for weight in flat:
            size = weight.numel()
            cut = min(max(half - begin, 0), size)
            begin += size
            ranges = ((0, cut), (cut, size) if cut < size else (0, 0)) if kind == STATE_PLACES[2] else ()
            first, end = ranges[part] if ranges else (0, size)
            own = (end - first,) if ranges else weight.shape
            names = ("exp_avg", "exp_avg_sq", "param") if end > first else ()
            self._state[weight] = {name: torch.ones(own, device=place) for name in names}
            self._ranges[weight] = ranges
            if kind == STATE_PLACES[1]:
                self._copies[weight] = {"param": (torch.ones(own, device=device),)}

    def registry(self) -> ExpertTensors:
        """Home rows of one layer, with this state."""
        registry = ExpertTensors(1, len(self._weights[0]), [self])
        for number, weights in enumerate(self._weights):
            registry.add(0, f"weight{number}", weights)
        return registry

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        return self._state[parameter]

    def copies_of(self, parameter: Tensor) -> Mapping[str, tuple[Tensor, ...]]:
        return self._copies.get(parameter, {})

    def ranges_of(self, parameter: Tensor) -> Ranges:
        return self._ranges[parameter]


class _Move:
    """One engine, whose experts go on to the next rank each time."""

    def __init__(
        self, registry: ExpertTensors, homes: int, groups: ProcessGroups, transport: Transport, staging_bytes: int
    ) -> None:
        job = groups.job
        self.ranks = job.ep_size
        self._transport = _Weighed(transport, job.migration_rank)
        self._transport.warm_up(soon())
        self._placement = Placement.initial(1, homes * job.ep_size, job.ep_size, 0)
        rows, agreement = self._placement.home_rows(1, job.state_holders), Agreement(groups.control)
        rank = job.migration_rank
        self._engine = MigrationEngine(registry, self._transport, agreement, rows, rank, staging_bytes, 60.0)
        self._migration = BetweenSteps(self._engine, lambda *_: lambda: None)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent in the last move."""
        return self._transport.nbytes

    def on(self, key: str) -> MigrationProgress:
        """Move all."""
        self._transport.nbytes = 0
        self._migration.begin(self._placement, _next_rank(self._placement), key)
        outcome = self._migration.advance()
        if outcome.failed_phase is not None:
            raise RuntimeError(f"the migration was dropped: {outcome.cause}")
        self._placement = outcome.placement
        return outcome

    def close(self) -> None:
        self._engine.close()


def _usable_everywhere(device: torch.device, groups: ProcessGroups) -> list[str]:
    usable = {finding.name for finding in probe(device) if finding.usable}
    votes = torch.tensor([name in usable for name in NAMES], dtype=torch.int64)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=groups.control)
    one_node = len(set(gather_bytes(node_of_this_rank().encode(), groups.control, deadline=soon()))) == 1
    return [name for name, vote in zip(NAMES, votes.tolist(), strict=True) if vote and (name != "cuda_ipc" or one_node)]


def _row(
    groups: ProcessGroups,
    device: torch.device,
    repeats: int,
    name: str,
    hidden: int,
    width: int,
    homes: int,
    staging_bytes: int,
) -> dict[str, Any]:
    registry = _experts(homes, hidden, width, device)
    carrier = TRANSPORTS[name](groups.migration, groups.backend, device, 60.0)
    move = _Move(registry, homes, groups, carrier, staging_bytes)
    payload = RecordFormat.of(registry.of_home(0)).payload_bytes
    # Written once: memory that nobody has touched is read from one page of zeros, faster than any other.
    messages = [torch.ones(payload, dtype=torch.uint8, device=device) for _ in range(2 * homes)]
    seconds = torch.zeros(repeats, 3, dtype=torch.float64)
    for repeat in range(-1, repeats):  # the first one warms up
        dist.barrier(group=groups.control)
        outcome = move.on(f"bench/{name}/{hidden}x{width}/{repeat}")
        dist.barrier(group=groups.control)
        began = time.perf_counter()
        _send_on(messages[:homes], messages[homes:], groups)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if repeat >= 0:
            carried = sum(outcome.seconds.get(part, 0.0) for part in ("post", "transfer", "verify"))
            seconds[repeat] = torch.tensor([outcome.pause_seconds, carried, time.perf_counter() - began])
    move.close()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=groups.control)
    pause, carried, plain = seconds.median(dim=0).values.tolist()
    return {
        "transport": name,
        "hidden": hidden,
        "width": width,
        "expert_mib": payload / 2**20,
        "experts": homes,
        "gb_per_second": homes * payload / pause / 1e9,
        "transfer_gb_per_second": homes * payload / carried / 1e9,
        "plain_gb_per_second": homes * payload / plain / 1e9,
        "ratio": plain / pause,
        "transfer_ratio": plain / carried,
        "wire_ratio": move.sent_bytes / (homes * payload),
        "pause_ms_per_expert": pause / homes * 1e3,
    }


def soon() -> float:
    return time.monotonic() + 60.0


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
