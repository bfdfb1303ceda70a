"""Megatron-Core's distributed optimizer over several ranks that hold the same experts: 4 ranks, EP 2 x EDP 2, its own
model, schedule, DistributedDataParallel and optimizer, with every home moved after each step.

It divides a flat buffer over the two, so an expert's master and moments lie on one of them or are cut between both.
Ranges are read from Megatron's own objects, and put together and in order by `Balancer.placement` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import (
    STEPS,
    assert_moved_without_a_change,
    assert_read_back,
    attached,
    differing,
    read_back,
    save_into,
    trained,
)
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.balancer.gradients import norm_of_ranges

pytestmark = jobs.needs_megatron
BLOCK = 256
"""Elements of a block of the norm: small, so that these experts have several."""
SHAPE = {"num_layers": 1, "moe_ffn_hidden_size": 40, "moe_router_topk": 3}
SIX = {**SHAPE, "num_moe_experts": 6}
CUT, WHOLE, LATE = "one bucket, an expert cut", "experts whole", "buckets, weights gathered in the next forward"
CASES: dict[str, dict[str, Any]] = {
    CUT: SIX,
    WHOLE: {**SHAPE, "clip_grad": 0.0},
    "float32": {**SIX, "bf16": False},
    LATE: {**SHAPE, "num_layers": 2, "bucket_size": 10_000, "overlap_grad_reduce": True, "overlap_param_gather": True},
}


def prepare() -> None:
    jobs.prepare()
    norm_of_ranges.BLOCK = BLOCK


class DividedJob(jobs.Job):
    def tensors(self, placement: eplb.Placement | None) -> dict[str, dict[Any, Any]]:
        """All that this rank has: whole tensors, and ranges of experts' state with where they begin."""
        self.gather_weights()
        leaf_of = self.leaf_of()
        whole, ranges = self.dense(), {}
        for key, parameter in self.experts(placement):
            whole[(*key, "weight")] = parameter
            if leaf := leaf_of.get(id(parameter)):
                begin = leaf._get_model_param_range_map(parameter)["param"].start
                for what, value in self.state_of(leaf, parameter).items():
                    ranges[(*key, what)] = (begin, value.detach().clone().flatten())
        return {"whole": {key: value.detach().clone().flatten() for key, value in whole.items()}, "ranges": ranges}

    def kept_here(self) -> list[tuple[int, int]]:
        """For each expert tensor of this rank, how many of its elements are stepped here, and of all."""
        leaf_of = self.leaf_of()
        return [
            (leaf._get_model_param_range_map(parameter)["param"].size if leaf else 0, parameter.numel())
            for parameter, leaf in ((one, leaf_of.get(id(one))) for _, one in self.experts(None))
        ]


def kept_here(job: DividedJob, *_: Any) -> dict[str, Any]:
    return {"kept here": job.kept_here()}


def give_steps() -> None:
    """0.16.1 does not find the number of steps where torch's AdamW keeps it, also without us; TransformerEngine's and
    Apex's have no such tensor."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    own = DistributedOptimizer._set_main_param_and_optimizer_states

    def take(leaf: Any, parameter: Tensor, tensors: dict[str, Tensor]) -> None:
        own(leaf, parameter, {"step": torch.tensor(float(STEPS)), **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = take


def everything(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    make = {case: partial(DividedJob, **options) for case, options in CASES.items()}
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = {
            "static": trained(make[case], move=False, also=kept_here),
            "moving": trained(make[case], move=True, also=save_into(folder) if case == CUT else jobs.nothing),
        }
    give_steps()
    results["checkpoint"] = read_back(folder, make[CUT])
    job = make[WHOLE]()
    results["alone"] = {"seen": job.train(range(STEPS)), "tensors": job.tensors(None)}
    return results


def moved_once(rank: int) -> dict[str, Any]:
    """EDP 3: what is there before a move, and after it."""
    prepare()
    job = DividedJob(**CASES[LATE])
    balancer = attached(job, move=True, interval=100)
    job.train(range(1))
    before = job.tensors(balancer.placement)
    balancer.rebalance()
    after = job.tensors(balancer.placement)
    places = balancer.placement.physical_to_logical.tolist()
    losses = job.train(range(1, 2))
    balancer.close()
    return {
        "before": {"tensors": before},
        "after": {"tensors": after},
        **kept_here(job),
        "placement": places,
        "seen": losses,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, everything, str(tmp_path_factory.mktemp("megatron divided")))


def whole(of_ranks: Iterable[Mapping[str, Any]]) -> dict[Any, Tensor]:
    """All tensors of the job. Those that several ranks have must be the same on them; ranges must meet end to end."""
    found: dict[Any, Tensor] = {}
    ranges: dict[Any, list[tuple[int, Tensor]]] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank["tensors"]["whole"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
        for key, one in of_rank["tensors"]["ranges"].items():
            ranges.setdefault(key, []).append(one)
    for key, of_key in ranges.items():
        if key[3] == "step":
            assert len({float(value) for _, value in of_key}) == 1
            found[key] = of_key[0][1]
            continue
        of_key.sort(key=lambda one: one[0])
        assert [begin for begin, _ in of_key] == [sum(len(one) for _, one in of_key[:n]) for n in range(len(of_key))]
        found[key] = torch.cat([one for _, one in of_key])
        assert len(found[key]) == len(found[(*key[:3], "weight")])
    return found


@pytest.mark.parametrize("case", CASES)
def test_experts_with_divided_state_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    kinds = assert_moved_without_a_change(results, case, whole)
    assert kinds == {"weight", "param", "exp_avg", "exp_avg_sq", "step"}


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    assert_read_back(results, CUT, "checkpoint", whole)


def test_experts_are_whole_or_cut_as_the_cases_say(results: list[dict[str, Any]]) -> None:
    for case in CASES:
        for of_rank in results:
            kept = of_rank[case]["static"]["kept here"]
            assert 0 < sum(here for here, _ in kept) < sum(of_all for _, of_all in kept)
            is_cut = any(0 < here < of_all for here, of_all in kept)
            assert is_cut == (case != WHOLE)


def test_without_clipping_megatron_alone_trains_the_same(results: list[dict[str, Any]]) -> None:
    alone = whole([of_rank["alone"] for of_rank in results])
    assert differing(alone, whole([of_rank[WHOLE]["moving"] for of_rank in results])) == []


def test_three_ranks_that_hold_the_same_have_what_they_had_after_a_move() -> None:
    results = run_ranks(6, moved_once)
    before, after = (whole([of_rank[when] for of_rank in results]) for when in ("before", "after"))
    assert all(row != sorted(row) for row in results[0]["placement"])
    assert any(0 < here < of_all for of_rank in results for here, of_all in of_rank["kept here"])
    assert differing(before, after) == []
    assert all(loss > 0 for of_rank in results for of_step in of_rank["seen"] for loss in of_step)
