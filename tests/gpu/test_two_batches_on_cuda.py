"""Two batches at once on GPUs: over NCCL and DeepEP the same bits as one after the other, on streams of
their own and without a host sync. Two ranks; one GPU is enough.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, no_host_sync, on_gpu, ranks_on_gpu
from support.moe_models import batch_of, make_model
from support.shuffle import plan_by, plan_shuffle
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.moe.dispatch import choosing
from eplb_runtime.moe.dispatch.channels import MicroBatchChannel, MicroBatchChannels
from eplb_runtime.topology import Topology

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
RANKS, WIDTH = 2, 512
WAYS = [("all_to_all", "logical", 0), ("all_to_all", "logical", 1)]
WAYS += [("deepep", order, 0) for order in ("logical", "by_rank")]


def skip_without(dispatch: str) -> None:
    of_job = eplb.BalancerConfig(), Topology(RANKS, RANKS), 4, DEVICE
    if dispatch != "all_to_all" and (lacks := choosing.why_not_deepep(*of_job)):
        pytest.skip(lacks)


# -- streams and memory, without a model -------------------------------------------------------------------------------


def busy_streams(rank: int) -> list[bool]:
    """Both write much, drop it and ask for more while earlier work is still queued."""
    device = on_gpu(rank)
    lanes = MicroBatchChannels(MicroBatchChannel(dist.group.WORLD, dist.group.WORLD), device)
    lanes.open(MicroBatchChannel(dist.new_group([0]), dist.new_group([0])))
    right, given = [], torch.arange(1 << 22, device=device)

    def work(sign: int) -> tuple[Tensor, torch.cuda.Stream, int]:
        mine = given.clone()
        for number in range(50):
            mine = mine + sign * number  # each leaves a block of memory that the next may have
        return mine, torch.cuda.current_stream(), torch.cuda.current_device()

    expected = given.clone()
    torch.cuda.synchronize()
    for _ in range(20):
        torch.cuda._sleep(10_000_000)  # the caller's stream is behind: what does not wait for it reads too early
        given = given + 1
        with no_host_sync():
            (up, *here), (down, *beside) = lanes.both(lambda: work(1), lambda: work(-1))
            both = up + down
        expected += 1
        right.append(torch.equal(both, 2 * expected))
        right.append(here[0] != beside[0] and torch.cuda.current_stream() not in (here[0], beside[0]))
        right.append(here[1] == beside[1] == device.index)
    return right


def test_streams_of_their_own_wait_for_the_callers_and_it_for_them() -> None:
    assert all(ranks_on_gpu(1, busy_streams)[0])


# -- whole models ------------------------------------------------------------------------------------------------------


def train_and_evaluate(rank: int, way: tuple[str, str, int], at_once: bool) -> dict[Any, Tensor]:
    """Two micro-batches at once, each third beside a backward pass, experts that move in between; then evaluation."""
    device, (dispatch, order, replica_slots) = on_gpu(rank), way
    model = make_model("olmoe", experts=8, top_k=2, layers=2, width=WIDTH).bfloat16().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = eplb.BalancerConfig(
        interval=1,
        dense_gradients="allreduce",
        replica_slots=replica_slots,
        dispatch=eplb.DispatchConfig(dispatch, combine_order=order),
        migration=eplb.MigrationConfig(lag=0),
    )
    balancer = eplb.attach(model, optimizer, config=config)
    plan_by(balancer, plan_shuffle)
    lanes = balancer.open_second_channel()
    both = balancer.at_once if at_once else lambda first, second: (first(), second())
    pair = lanes.both if at_once else lambda first, second, turned: (first(), second())
    seen: dict[Any, Tensor] = {}

    def loss_of(step: int, number: int) -> Tensor:
        ids = batch_of(rank, step, length=12 - rank - number % 2, seed=number).to(device) % 12
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    for step in range(3):
        model.train()
        one, other = both(lambda: loss_of(step, 0), lambda: loss_of(step, 1))  # noqa: B023
        one.backward()
        # The second was on the second stream, and so is its backward pass: it is not turned.
        third, _ = pair(lambda: loss_of(step, 2), other.backward, False)  # noqa: B023
        third.backward()
        seen["loss", step] = torch.stack([loss.detach() for loss in (one, other, third)])
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen["eval", step] = torch.stack(both(lambda: loss_of(step, 5), lambda: loss_of(step, 6)))  # noqa: B023
    del one, other, third
    seen |= eplb.logical_state_dict(model, optimizer)
    seen["epoch"] = torch.tensor(balancer.placement.epoch)
    balancer.close()
    return {name: value.cpu() for name, value in seen.items()}


def both_ways(rank: int, way: tuple[str, str, int]) -> tuple[list[Any], int]:
    in_turn, at_once = (train_and_evaluate(rank, way, one) for one in (False, True))
    return [name for name in in_turn if not torch.equal(in_turn[name], at_once[name])], int(at_once["epoch"])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_two_batches_at_once_change_no_bit(way: tuple[str, str, int]) -> None:
    skip_without(way[0])
    for wrong, epoch in ranks_on_gpu(RANKS, both_ways, way):
        assert not wrong and epoch >= 2
