"""Training over `nccl.ep`'s double beside training over all-to-all, and the life of its groups and handles.

What it promises as every dispatcher does: `test_deepep.py`; on GPUs: `tests/gpu/test_deepep_on_cuda.py`.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import nccl_ep_double as double
import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from transport_contract import soon

import eplb_runtime as eplb
from eplb_runtime.dispatch import choosing
from eplb_runtime.dispatch.carried import Carried, CarriedByRank
from eplb_runtime.dispatch.lanes import Lane, Lanes
from eplb_runtime.dispatch.nccl_ep import NcclEPCarrier
from eplb_runtime.events import RebalanceCommitted

STEPS, SLOTS = 7, 3
WAYS = ("all_to_all", "nccl_ep", "wrong order")


def train(rank: int, way: str) -> dict[str, Any]:
    """Some steps with copies, recompute and experts that move; a rank has fewer tokens than the other."""
    choosing.lacks = lambda *_: ""
    choosing.CARRIERS = {"nccl_ep": partial(NcclEPCarrier, package=double)}
    double.ORDER.ranks_backwards = way == "wrong order"
    double.CALLS.clear()
    model = make_model("olmoe", experts=8, top_k=4, width=64)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = eplb.BalancerConfig(
        interval=2,
        gate="always",
        replica_slots=1,
        dense_gradients="allreduce",
        dispatch="all_to_all" if way == "all_to_all" else "nccl_ep",
    )
    balancer = eplb.attach(model, optimizer, config=config)
    model.train()
    losses = []
    for step in range(STEPS):
        ids = batch_of(rank, step, length=12 - 5 * rank) % 12
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = eplb.logical_state_dict(model, optimizer)
    calls, made = list(double.CALLS), len(double.MADE)
    moved = sum(isinstance(event, RebalanceCommitted) for event in balancer.events)
    del loss
    balancer.close()
    double.ORDER.ranks_backwards = False
    return {
        "losses": losses,
        "state": state,
        "moved": moved,
        "calls": calls,
        "made": made,
        "left": len(double.MADE),
    }


def there_and_back(dispatcher: Carried, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and what becomes of them where every expert gives what it gets; with a backward pass."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 16, generator=generator).requires_grad_()
    slots = torch.rand(tokens, 2 * SLOTS, generator=generator).argsort(dim=1)[:, :2]
    arrived = dispatcher.dispatch(hidden, slots, torch.full((tokens, 2), 0.5))
    out = dispatcher.combine(arrived.rows_MD, arrived.handle)
    out.sum().backward()
    return hidden.detach(), out.detach()


def lives(rank: int) -> dict[str, Any]:
    """What is made and ended while batches grow, end and start again, and in a second lane."""
    group = dist.group.WORLD
    lanes = Lanes(Lane(group, group))
    dispatcher = Carried(group, SLOTS, lanes=lanes, make_carrier=partial(NcclEPCarrier, package=double))
    found: dict[str, Any] = {"right": [], "made": []}

    def look(tokens: int) -> None:
        hidden, out = there_and_back(dispatcher, tokens + rank, tokens)
        found["right"].append(torch.equal(hidden, out))
        gc.collect()
        found["made"].append(sorted(type(one).__name__ for one in double.MADE))

    for tokens in (4, 4, 5, 40, 3):
        look(tokens)
    hidden = torch.randn(3, 16).requires_grad_()
    weights = torch.full((3, 1), 1.0)
    kept = dispatcher.dispatch(hidden, torch.tensor([[0], [4], [5]]), weights)
    look(90)
    look(90)
    back = dispatcher.combine(kept.rows_MD, kept.handle)
    found["a way through the old group"] = torch.equal(back, hidden)
    lanes.open(Lane(dist.new_group([0, 1]), dist.new_group([0, 1])))
    (grad,) = torch.autograd.grad(back.sum(), [hidden])
    found["backward in the second lane"] = torch.equal(grad, torch.ones_like(hidden))
    found["lanes"] = sum(isinstance(one, double.Communicator) for one in double.MADE)
    del kept, back, grad
    look(90)
    dispatcher.close(soon())
    found["closed"] = list(double.MADE)
    look(6)
    dispatcher.close(soon())
    return found


def closed_alone(rank: int) -> int:
    """How much is left where one rank closes and the other does not."""
    group = dist.new_group([0, 1])
    dispatcher = Carried(group, SLOTS, make_carrier=partial(NcclEPCarrier, package=double))
    there_and_back(dispatcher, 4, rank)
    gc.collect()
    if rank == 0:
        dispatcher.close(time.monotonic() + 0.2)
    return len(double.MADE)


def transposed(rank: int) -> list[bool]:
    """Whether rows come home where the router's choices lie column by column; and that they did lie so."""
    group = dist.new_group([0, 1])
    dispatcher = CarriedByRank(group, SLOTS, make_carrier=partial(NcclEPCarrier, package=double))
    hidden = torch.randn(5, 16).bfloat16()
    slots = torch.rand(5, 2 * SLOTS).argsort(dim=1)[:, :2].t().contiguous().t()
    arrived = dispatcher.dispatch(hidden, slots, torch.full((5, 2), 0.5))
    back = dispatcher.combine(arrived.rows_MD, arrived.handle)
    dispatcher.close(soon())
    return [torch.equal(back, hidden), not slots.is_contiguous()]


def closed_in_flight(rank: int) -> tuple[str, bool]:
    """What a backward pass says when its way has ended; and whether the next batch goes."""
    group = dist.new_group([0, 1])
    dispatcher = Carried(group, SLOTS, make_carrier=partial(NcclEPCarrier, package=double))
    hidden = torch.randn(3, 16).requires_grad_()
    arrived = dispatcher.dispatch(hidden, torch.tensor([[0], [4], [5]]), torch.ones(3, 1))
    out = dispatcher.combine(arrived.rows_MD, arrived.handle)
    dispatcher.close(soon())
    said = ""
    try:
        out.sum().backward()
    except RuntimeError as error:
        said = str(error)
    hidden, out = there_and_back(dispatcher, 4, rank)
    dispatcher.close(soon())
    return said, torch.equal(hidden, out)


def only_gradients(rank: int) -> dict[str, Any]:
    """Groups after each batch where forwards go one way, backward passes the other, and batches grow; and what is left
    where the first way's group cannot be ended."""
    group = dist.new_group([0, 1])
    lanes = Lanes(Lane(group, group))
    lanes.open(Lane(dist.new_group([0, 1]), dist.new_group([0, 1])))
    dispatcher = Carried(group, SLOTS, lanes=lanes, make_carrier=partial(NcclEPCarrier, package=double))
    groups = []
    for tokens in (4, 40, 90, 200):
        there_and_back(dispatcher, tokens + rank, tokens)
        gc.collect()
        groups.append(sum(isinstance(one, double.Group) for one in double.MADE))
    first = next(one for one in double.MADE if isinstance(one, double.Group))

    def fails() -> None:
        raise RuntimeError("no")

    first.destroy, end = fails, first.destroy
    dispatcher.close(soon())
    left = sorted(type(one).__name__ for one in double.MADE)
    end()
    first.comm.destroy()
    return {"groups": groups, "left": left}


def all_of_it(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {way: train(rank, way) for way in WAYS}
    found["lives"] = lives(rank)
    found["transposed"] = transposed(rank)
    found["closed in flight"] = closed_in_flight(rank)
    found["only gradients"] = only_gradients(rank)
    found["closed alone"] = closed_alone(rank)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(2, all_of_it)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    state, others = one["state"], other["state"]
    assert state.keys() == others.keys()
    return [name for name in state if not torch.equal(torch.as_tensor(state[name]), torch.as_tensor(others[name]))]


def test_training_with_copies_recompute_and_migrations_has_the_bits_of_all_to_all(ranks: list) -> None:
    for found in ranks:
        plain, mine = found["all_to_all"], found["nccl_ep"]
        assert mine["moved"] == plain["moved"] > 0
        assert mine["losses"] == plain["losses"] and not differing(mine, plain)


def test_control_rows_in_another_order_are_noticed(ranks: list) -> None:
    assert any(differing(found["wrong order"], found["all_to_all"]) for found in ranks)


def test_a_layers_forward_recompute_and_backward_use_one_handle(ranks: list) -> None:
    """Two layers: recompute dispatches again, and a backward has one way each for rows and gradients."""
    for found in ranks:
        calls = found["nccl_ep"]["calls"]
        step = ["handle", "dispatch", "combine"] * 2 + ["again", "combine", "again", "combine"] * 2
        assert calls[: len(step)] == step
        assert calls.count("handle") == 2 * STEPS


def test_handles_serve_the_next_batch(ranks: list) -> None:
    for found in ranks:
        assert found["nccl_ep"]["made"] <= 1 + 2 + 2 * 2, "a communicator, a group that grew once, two layers' handles"


def test_closing_the_balancer_ends_groups_and_communicators(ranks: list) -> None:
    assert all(found["nccl_ep"]["left"] == 0 for found in ranks)


def test_every_batch_arrives_and_comes_back_whatever_its_size(ranks: list) -> None:
    for found in ranks:
        assert all(found["lives"]["right"]) and len(found["lives"]["right"]) == 9


def test_a_group_that_became_too_small_is_ended_when_its_ways_are_over(ranks: list) -> None:
    one = ["Communicator", "Group", "Handle"]
    both = ["Communicator", "Group", "Group", "Handle", "Handle"]
    for found in ranks:
        made = found["lives"]["made"]
        assert made[:3] == [one, one, one], "room for a few rows more"
        assert made[3:5] == [one, one], "nobody needs it: it is ended before the larger one is made"
        assert made[5] == made[6] == both, "somebody still has a way through the old one"


def test_a_way_is_kept_through_growth_and_into_a_second_lane(ranks: list) -> None:
    for found in ranks:
        lives = found["lives"]
        assert lives["a way through the old group"] and lives["backward in the second lane"] and lives["lanes"] == 2


def test_where_only_gradients_go_groups_that_became_too_small_are_ended_too(ranks: list) -> None:
    for found in ranks:
        assert found["only gradients"]["groups"] == [2, 2, 2, 2], "one each way"


def test_what_cannot_be_ended_is_kept_and_the_other_way_is_ended(ranks: list) -> None:
    for found in ranks:
        assert found["only gradients"]["left"] == ["Communicator", "Group"]


def test_close_ends_everything_and_the_next_batch_makes_it_anew(ranks: list) -> None:
    for found in ranks:
        assert found["lives"]["closed"] == []
        assert found["lives"]["made"][-1] == sorted(["Communicator", "Group", "Handle"] * 2), "in two lanes"


def test_choices_that_lie_column_by_column_are_read_as_rows(ranks: list) -> None:
    assert [found["transposed"] for found in ranks] == [[True, True]] * 2


def test_a_backward_pass_after_close_says_so_and_the_next_batch_goes(ranks: list) -> None:
    for found in ranks:
        said, right = found["closed in flight"]
        assert "close after the backward pass" in said and "\n" not in said and right


def test_what_is_closed_by_one_rank_alone_stays(ranks: list) -> None:
    assert [found["closed alone"] for found in ranks] == [3, 3], "a communicator, a group, a handle"
