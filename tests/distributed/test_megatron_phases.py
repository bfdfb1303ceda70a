"""Weights, gradients and optimizer state that are freed and loaded between phases, as verl does around its rollouts:
2 ranks, EP 2, Megatron's own model, DistributedDataParallel and optimizers, every home moved after each step.

What frees and loads is written anew here, by what verl's functions do to Megatron's buffers and state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
import torch.distributed as dist
from megatron_jobs import (
    STEPS,
    assert_moved_without_a_change,
    attached,
    leaves_of,
    moved_by,
    trained,
)
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb

pytestmark = jobs.long_megatron
DISTRIBUTED, OF_FLOAT16 = "distributed optimizer", "optimizer of float16"
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: dict[str, dict[str, Any]] = {
    DISTRIBUTED: {},
    "distributed optimizer, parameters gathered beside": OVERLAPPED,
    OF_FLOAT16: {"distributed": False},
}


class Phases:
    """Frees what a job trains, and loads it again.

    Args:
        model: Megatron's DistributedDataParallel.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]
        self._parameters = list(model.parameters())
        self._leaves = [leaf for leaf in optimizer.chained_optimizers if not leaf.is_stub_optimizer]
        self._sizes: dict[int, int] = {}
        self.freed = 0

    def free(self) -> None:
        for buffer in self._buffers:
            if buffer.param_data is not None:
                buffer.param_data.in_host_memory = buffer.param_data.data.clone()
            for data in (buffer.param_data, buffer.grad_data):
                if data is not None and data.untyped_storage().size() > 0:
                    self.freed += 1
                    self._sizes[id(data)] = data.untyped_storage().size()
                    data.untyped_storage().resize_(0)
        if self._buffers[0].param_data is None:  # parameters of their own: `.data` is put elsewhere
            self._elsewhere(self._parameters)
        self._move_state()

    def load(self) -> None:
        # Whatever has taken the old place meanwhile: loaded memory begins at another address.
        self._taken = [torch.empty(size, dtype=torch.uint8) for size in self._sizes.values()]
        for buffer in self._buffers:
            for data in (buffer.param_data, buffer.grad_data):
                if data is not None:
                    data.untyped_storage().resize_(self._sizes[id(data)])
            buffer.grad_data.zero_()
            if buffer.param_data is not None:
                buffer.param_data.copy_(buffer.param_data.in_host_memory)
        if self._buffers[0].param_data is None:
            self._elsewhere(self._parameters)
        self._move_state()

    def _move_state(self) -> None:
        for leaf in self._leaves:
            masters = getattr(leaf, "shard_fp32_from_float16_groups", getattr(leaf, "fp32_from_float16_groups", []))
            self._elsewhere([master for group in masters for master in group])
            for state in leaf.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in state:
                        state[key] = state[key].clone()

    @staticmethod
    def _elsewhere(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            old = tensor.data
            tensor.data = tensor.data.clone()
            old.fill_(float("nan"))  # who keeps the old memory trains with it


class FreedJob(jobs.Job):
    """Its weights, gradients and state are freed and loaded after each step."""

    freed = 0

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        phases, seen = Phases(self.models[0], self.optimizer), []
        for step in steps:
            seen += super().train(range(step, step + 1))
            phases.free()
            phases.load()
        self.freed += phases.freed
        return seen


def maker(case: str, kind: type[jobs.Job] = jobs.Job) -> Callable[[], Any]:
    return partial(kind, num_layers=2, moe_router_topk=3, **CASES[case])


def decided_without_memory(guard: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """What a decision says while weights have no memory on some ranks, and whether training goes on."""
    job = maker(DISTRIBUTED)()
    balancer = attached(job, move=True, interval=2)
    if guard == "off":
        balancer._guard._mode = "off"
    phases = Phases(job.models[0], job.optimizer)
    job.train(range(1))
    before, epoch, events = moved_by(balancer), balancer.placement.epoch, len(list(balancer.events))
    if dist.get_rank() in ranks:
        phases.free()
    ours_moved = balancer.rebalance()
    if dist.get_rank() in ranks:
        phases.load()
    said = [repr(event) for event in list(balancer.events)[events:]]
    same = balancer.placement.epoch == epoch and moved_by(balancer) == before
    job.train(range(1, 4))
    later = moved_by(balancer)
    balancer.close()
    return {"moved": ours_moved, "same": same, "said": said, "later": later - before}


def not_resizable(job: jobs.Job, _: eplb.Balancer) -> dict[str, Any]:
    """Number of parameters and of state whose storage torch lets nobody resize after attach and moves, and of all."""
    found = [parameter.untyped_storage().resizable() for model in job.models for parameter in model.parameters()]
    found += list(resizable_state(job.optimizer))
    return {"not resizable": (found.count(False), len(found))}


def resizable_state(optimizer: Any) -> Iterator[bool]:
    for leaf in leaves_of(optimizer):
        for state in leaf.optimizer.state.values():
            yield from (value.untyped_storage().resizable() for value in state.values())


def number_freed(job: FreedJob, _: eplb.Balancer) -> dict[str, Any]:
    return {"freed": job.freed}


def everything(rank: int) -> dict[str, Any]:
    jobs.prepare()
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = {
            "static": trained(maker(case), move=False),
            "moving": trained(maker(case, FreedJob), move=True, also=number_freed),
        }
    results["of float16"] = trained(maker(OF_FLOAT16), move=True, steps=1, also=not_resizable)
    for guard in ("on", "off"):
        for ranks in ((0, 1), (1,)):
            results[f"{guard} {ranks}"] = decided_without_memory(guard, ranks)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_experts_move_between_phases_that_free_all_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) >= {"weight", "param", "exp_avg", "exp_avg_sq"}
    for of_rank in results:
        assert of_rank[case]["moving"]["freed"] >= 2 * STEPS


def test_parameters_and_state_stay_resizable(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        fixed, of_all = of_rank["of float16"]["not resizable"]
        assert fixed == 0 < of_all


@pytest.mark.parametrize("guard", ["on", "off"])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_decision_while_weights_have_no_memory_moves_nothing_and_says_so(
    results: list[dict[str, Any]], guard: str, ranks: tuple[int, ...]
) -> None:
    for of_rank in results:
        found = of_rank[f"{guard} {ranks}"]
        assert found["moved"] is False and found["same"]
        line = "load weights ahead of decisions" if guard == "on" else "its memory is freed"
        assert any(line in event for event in found["said"]), found["said"]
        assert "setStorage" not in str(found["said"])
        assert found["later"] > 0, "once they are loaded, experts move"
