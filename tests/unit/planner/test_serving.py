"""Our plans under the calls that serving engines make; their own tests need their repositories."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb_runtime.planner import rebalance_experts, serving

LAYERS, EXPERTS, RANKS, SLOTS = 3, 32, 8, 40
WEIGHT = torch.from_numpy(np.random.default_rng(0).lognormal(0.0, 0.7, (LAYERS, EXPERTS)) * 1000)


def hottest(by_slot: torch.Tensor) -> torch.Tensor:
    """Max / mean rank load by even split, of each layer."""
    count = torch.stack([torch.bincount(row, minlength=EXPERTS) for row in by_slot])
    load = (WEIGHT / count).gather(1, by_slot).reshape(LAYERS, RANKS, -1).sum(dim=2)
    return load.amax(dim=1) / load.mean(dim=1)


def test_vllm_gets_the_slots_alone_near_what_stands() -> None:
    anew = serving.vllm(WEIGHT, SLOTS, 1, 1, RANKS)
    assert torch.equal(anew, rebalance_experts(WEIGHT, SLOTS, 1, 1, RANKS)[0]) and anew.dtype == torch.int64
    standing = torch.arange(SLOTS).remainder(EXPERTS).repeat(LAYERS, 1)
    near = serving.vllm(WEIGHT, SLOTS, 1, 1, RANKS, standing)
    assert (near != standing).sum() < (anew != standing).sum()
    assert torch.equal(serving.vllm(WEIGHT, SLOTS, 1, 1, RANKS, near), near)
    for other in (standing[:, :32], torch.where(standing == 3, -1, standing)):
        assert torch.equal(serving.vllm(WEIGHT, SLOTS, 1, 1, RANKS, other), anew)
    with pytest.raises(AssertionError, match="41 slots"):
        serving.vllm(WEIGHT, 41, 1, 1, RANKS)


def test_sglang_keeps_groups_where_it_asks_and_does_without_ranks() -> None:
    plain = serving.sglang(WEIGHT, SLOTS, 4, 2, RANKS, False)
    grouped = serving.sglang(WEIGHT, SLOTS, 4, 2, RANKS, True)
    assert torch.equal(plain[0], rebalance_experts(WEIGHT, SLOTS, None, 2, RANKS)[0])
    assert torch.equal(grouped[0], rebalance_experts(WEIGHT, SLOTS, 4, 2, RANKS)[0])
    active = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1])
    by_slot, by_expert, count = serving.sglang(WEIGHT, SLOTS, 4, 2, RANKS, True, active)
    assert (by_slot >= 0).all() and (count > 0).all()
    slots = by_expert[by_expert >= 0]
    assert not torch.isin(slots, torch.arange(10, 15)).any() and len(slots) == 35 * LAYERS == int(count.sum())


def test_vllm_ascend_gets_a_table_in_which_who_stays_keeps_the_slot() -> None:
    table = torch.arange(SLOTS).remainder(EXPERTS).repeat(LAYERS, 1).reshape(LAYERS, RANKS, -1)
    count = torch.stack([torch.bincount(row.ravel(), minlength=EXPERTS) for row in table])
    work = (WEIGHT / count).gather(1, table.reshape(LAYERS, -1)).reshape(table.shape)
    changed, order, new = serving.vllm_ascend(None, table, work)
    made = torch.tensor(new)
    assert changed == 1 and sorted(order.tolist()) == list(range(LAYERS))
    assert (hottest(made.reshape(LAYERS, -1)) < 1.02).all() and (hottest(table.reshape(LAYERS, -1)) > 1.2).all()
    for layer, rank in np.ndindex(LAYERS, RANKS):
        before, after = table[layer, rank], made[layer, rank]
        stays = torch.isin(after, before)
        assert torch.equal(after[stays], before[stays]) and len(torch.unique(after)) == len(after)
    again, _, same = serving.vllm_ascend(None, made, torch.ones_like(work) * 0)
    assert again == 0 and torch.equal(torch.tensor(same), made)
    windows = torch.stack([work, work])
    assert serving.vllm_ascend(None, table, windows)[2] == new


def test_vllm_gets_the_error_it_knows_where_what_stands_is_no_placement() -> None:
    with pytest.raises(AssertionError, match="expert 1 stands in no slot"):
        serving.vllm(torch.ones(1, 4), 4, 1, 1, 2, torch.zeros(1, 4, dtype=torch.int64))
