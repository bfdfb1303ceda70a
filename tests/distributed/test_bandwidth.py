"""Links are measured by messages large enough for them, in a bounded time, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from eplb_runtime.distributed import bandwidth
from eplb_runtime.distributed.transports.base import Message, Pending, PendingGroup, Transport, TransportError
from eplb_runtime.topology import Topology

START_SECONDS = 50e-6


class Modelled(Transport):
    """Messages take a start and then their bytes; nothing is really sent.

    Args:
        inside, between: bytes/s to a rank of the same pair, and to others.
        fails: whether this rank's peer never comes.
    """

    device = torch.device("cpu")

    def __init__(self, rank: int, inside: float, between: float, fails: bool = False) -> None:
        self.rank, self.inside, self.between, self.fails = rank, inside, between, fails
        self.sizes: list[int] = []
        self.clock = 0.0

    def warm_up(self, deadline: float) -> None: ...

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        if self.fails:
            raise TransportError("point-to-point messages were not through in time")
        self.sizes.append(sends[0].data.shape[0])
        speed = self.inside if sends[0].peer // 2 == self.rank // 2 else self.between
        self.clock += START_SECONDS + self.sizes[-1] / speed
        return PendingGroup()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def close(self) -> None: ...


SIZES = bandwidth.FIRST_BYTES, bandwidth.LEAST_SECONDS
"""What a job measures with; ranks of other tests have it shorter (`ranks`)."""


def measure_modelled(rank: int, inside: float, between: float, sizes: tuple[int, float]) -> tuple[Topology, list[int]]:
    bandwidth.FIRST_BYTES, bandwidth.LEAST_SECONDS = sizes
    transport = Modelled(rank, inside * (1 + rank), between)  # the slowest rank counts
    bandwidth.time = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: transport.clock)
    control = dist.new_group(backend="gloo")
    return bandwidth.measure(Topology(4, 2), transport, rank, control, 30.0), transport.sizes


@pytest.mark.parametrize(("inside", "between"), [(400e9, 50e9), (2e9, 12.5e6)])
def test_a_fast_link_is_measured_as_what_it_is(inside: float, between: float) -> None:
    results = run_ranks(4, measure_modelled, inside, between, SIZES)
    assert all(topology == results[0][0] for topology, _ in results)
    topology, sizes = results[0]
    first, _ = SIZES
    for measured, real in ((topology.intra_node_bandwidth, inside), (topology.inter_node_bandwidth, between)):
        assert 0.75 * real < measured < real
    assert max(sizes) <= bandwidth.MOST_BYTES["cpu"]
    if inside > 1e11:
        assert first / (START_SECONDS + first / inside) < 0.35 * inside, "the control: the first message is too small"
        assert max(sizes) > first
    else:
        assert set(sizes) == {first}, "a slow link is not given more than it needs"


def fail_on_one_rank(rank: int) -> str:
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    with pytest.raises(TransportError) as raised:
        bandwidth.measure(Topology(4, 2), Modelled(rank, 1e9, 1e9, fails=rank == 1), rank, control, 2.0)
    return str(raised.value)


def test_a_rank_that_cannot_be_reached_is_an_error_on_all_ranks() -> None:
    said = run_ranks(4, fail_on_one_rank)
    assert "in time" in said[1]
    assert all("could not be measured" in line for rank, line in enumerate(said) if rank != 1)
