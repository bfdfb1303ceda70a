"""Megatron-Core's ``overlap_moe_expert_parallel_comm``: its own combined schedule, in which one micro-batch goes
forward while another goes backward, with every home moved after each step.

On a CPU: streams and events of CUDA are answered so that all is done when it returns, in the order in which Megatron's
schedule asks for it. Grouped layers that leave their weights' gradients for later (``delay_wgrad_compute``) are
TransformerEngine's, and have a stand-in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cuda_graph_double
import fused_permutation_double
import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import INTERLEAVED, STEPS, SmallJob, assert_moved_without_a_change, both, forward_step
from ranks import run_ranks
from test_megatron import GroupedLinear
from test_megatron_fp8 import prepare
from test_megatron_graphs import GraphedJob
from torch import Tensor

pytestmark = jobs.long_megatron
OVERLAP = {"overlap_moe_expert_parallel_comm": True, "moe_router_topk": 3}
CASES: dict[str, dict[str, Any]] = {
    "gathers and reductions beside": {**OVERLAP, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "optimizer of float16, shared experts": {
        **OVERLAP,
        "distributed": False,
        "moe_shared_expert_intermediate_size": 32,
    },
}
ALONE = {"overlap_moe_expert_parallel_comm": False}
DELAYED = {**OVERLAP, "delay_wgrad_compute": True, "overlap_grad_reduce": True}
GRAPHED = {
    "overlap_moe_expert_parallel_comm": True,
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"],
}
SECOND_TOKEN = {**INTERLEAVED, **OVERLAP, "mtp_num_layers": 1, "moe_permute_fusion": True, "distributed": False}


class Later(torch.autograd.Function):
    """Rows of each expert by its weights, whose gradients are left for later."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], linear: DelayedLinear) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.counts, ctx.linear = counts, linear
        pairs = zip(rows.split(counts), linear.parameters(), strict=True)
        return torch.cat([torch.nn.functional.linear(mine, weight) for mine, weight in pairs])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        ctx.linear.left.append((rows, gradient.clone(), ctx.counts))
        pairs = zip(gradient.split(ctx.counts), ctx.linear.parameters(), strict=True)
        return torch.cat([mine @ weight for mine, weight in pairs]), None, None


class DelayedLinear(GroupedLinear):
    """As TransformerEngine's with ``delay_wgrad_compute``: `backward_dw` gives its weights their gradients, in the
    order of the backward passes, and calls what Megatron's DistributedDataParallel has registered for that."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left: list[tuple[Tensor, Tensor, list[int]]] = []
        self.hooks: list[Callable[[], None]] = []
        for weight in self.parameters():
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        self.hooks.append(hook)

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        return Later.apply(rows, counts, self), None

    def backward_dw(self) -> None:
        rows, gradient, counts = self.left.pop(0)
        for weight, mine, given in zip(self.parameters(), rows.split(counts), gradient.split(counts), strict=True):
            weight.grad = given.T @ mine
        for hook in self.hooks:
            hook()


class Event:
    """A CUDA event where everything is done when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = record


def answer_streams() -> None:
    """What the combined schedule asks of CUDA besides."""

    @contextlib.contextmanager
    def span(*_: Any, **__: Any) -> Iterator[None]:
        yield

    torch.cuda.Event = Event
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.cuda.nvtx.range = span
    torch.Tensor.record_stream = lambda *_: None


class OverlapJob(SmallJob):
    def train(self, steps: range) -> list[tuple[Any, ...]]:
        return self.train_by(forward_step, steps)


class StagesJob(jobs.Job):
    """Of two pipeline stages."""

    train = OverlapJob.train


class OverlapGraphedJob(GraphedJob, OverlapJob):
    """Megatron captures after the first step."""


def on_two_ranks(rank: int) -> dict[str, Any]:
    jobs.prepare_small()
    answer_streams()
    results: dict[str, Any] = {case: both(partial(OverlapJob, **options)) for case, options in CASES.items()}
    results["one after another"] = OverlapJob(**{**CASES["gathers and reductions beside"], **ALONE}).train(range(1))
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    RowParallelLinear.backward_dw = lambda _: None  # type: ignore[attr-defined]  # as ColumnParallelLinear's
    cuda_graph_double.install()
    results["graphs"] = both(partial(OverlapGraphedJob, **GRAPHED), steps=STEPS + 1)  # replayed before and after a move
    prepare(DelayedLinear)
    results["delayed"] = both(partial(OverlapJob, **DELAYED))
    return results


def on_four_ranks(rank: int) -> dict[str, Any]:
    jobs.prepare(pipeline_model_parallel_size=2)
    answer_streams()
    import megatron_cpu

    torch.arange = megatron_cpu._on_cpu(torch.arange)
    fused_permutation_double.use()
    return {
        "interleaved": both(partial(StagesJob, **INTERLEAVED, **OVERLAP)),
        "second token": both(partial(StagesJob, **SECOND_TOKEN)),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks)


@pytest.mark.parametrize("case", [*CASES, "graphs", "delayed"])
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_moved_without_a_change(results, case)


def test_the_first_step_is_that_of_one_micro_batch_after_another(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        seen = of_rank["gathers and reductions beside"]["moving"]["seen"]
        assert seen[0] == pytest.approx(of_rank["one after another"][0], rel=1e-5)


def test_experts_of_interleaved_stages_move_and_no_bit_changes() -> None:
    results = run_ranks(4, on_four_ranks)
    assert_moved_without_a_change(results, "interleaved")
    assert_moved_without_a_change(results, "second token")
