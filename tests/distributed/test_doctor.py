"""What the doctor finds usable, on one rank and on two."""

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from eplb_runtime.cli import main
from eplb_runtime.distributed import transports
from eplb_runtime.distributed.transports import TRANSPORTS
from eplb_runtime.distributed.transports.base import Message, Pending, Transport, TransportError
from eplb_runtime.tools import doctor
from eplb_runtime.tools.doctor import try_transports
from eplb_runtime.topology import Topology


def test_it_looks_at_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert torch.__version__.startswith(said["versions"]["torch"])
    usable = {backend["name"]: backend["usable"] for backend in said["backends"]}
    assert usable["gloo"] == dist.is_gloo_available()
    assert usable["nccl"] == torch.cuda.is_available()
    assert all(backend["why"] for backend in said["backends"])


def links(rank: int) -> list[Any]:
    def one_rank_cannot(*arguments: Any) -> Any:
        if rank == 1:
            raise ImportError("pip install wire")
        return TRANSPORTS["torch"](*arguments)

    doctor.TRANSPORTS = {"torch": TRANSPORTS["torch"], "half": one_rank_cannot}
    return [*try_transports(torch.device("cpu"))]


def test_links_are_measured_on_all_ranks_and_a_transport_is_usable_on_all_or_none() -> None:
    one, other = run_ranks(2, links)
    assert one == other
    torch_, half = one
    assert torch_.usable and torch_.intra_node_gb_per_second > 0 and torch_.inter_node_gb_per_second is None
    assert (half.usable, half.why) == (False, "rank 1: pip install wire")


# -- Links are measured by messages large enough for them, in a bounded time, the same on every rank -------------------


class Modelled(Transport):
    """Messages take 50 us and then their bytes; nothing is really sent.

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
        self.clock += 50e-6 + self.sizes[-1] / speed
        return Pending()

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")

    def close(self) -> None: ...


SIZES = transports.FIRST_BYTES, transports.LEAST_SECONDS
"""What a job measures with; ranks of other tests have it shorter (`ranks`)."""


def measure_modelled(rank: int, inside: float, between: float, sizes: tuple[int, float]) -> tuple[Topology, list[int]]:
    transports.FIRST_BYTES, transports.LEAST_SECONDS = sizes
    transport = Modelled(rank, inside * (1 + rank), between)  # the slowest rank counts
    transports.time = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: transport.clock)
    control = dist.new_group(backend="gloo")
    return transports.measure(Topology(4, 2), transport, rank, control, 30.0), transport.sizes


@pytest.mark.long
@pytest.mark.parametrize(("inside", "between"), [(400e9, 50e9), (2e9, 12.5e6)], ids=["fast", "slow"])
def test_a_link_is_measured_as_what_it_is(inside: float, between: float) -> None:
    results = run_ranks(4, measure_modelled, inside, between, SIZES)
    topology, sizes = results[0]
    assert all(other == topology for other, _ in results)
    for measured, real in ((topology.intra_node_bandwidth, inside), (topology.inter_node_bandwidth, between)):
        assert 0.75 * real < measured < real
    assert max(sizes) <= transports.MOST_BYTES["cpu"]
    if inside > 1e11:
        assert max(sizes) > SIZES[0], "the first message is too small"
    else:
        assert set(sizes) == {SIZES[0]}, "a slow link is not given more than it needs"


def fail_on_one_rank(rank: int) -> str:
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    with pytest.raises(TransportError) as raised:
        transports.measure(Topology(4, 2), Modelled(rank, 1e9, 1e9, fails=rank == 1), rank, control, 2.0)
    return str(raised.value)


@pytest.mark.long
def test_a_rank_that_cannot_be_reached_is_an_error_on_all_ranks() -> None:
    said = run_ranks(4, fail_on_one_rank)
    assert "in time" in said[1]
    assert all("could not be measured" in line for rank, line in enumerate(said) if rank != 1)
