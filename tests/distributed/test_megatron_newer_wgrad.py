"""Megatron-Core's ``overlap_dispatch_backward_with_experts_wgrad``, which versions before 0.18 do not have: gradients
of experts' weights are computed beside the backward pass of their dispatch. Every home moves after each step.

Its own schedules, `TEGroupedMLP`, autograd functions, DistributedDataParallel and distributed optimizer. On a CPU:
TransformerEngine's grouped layers, which keep what they need and add to ``main_grad`` when they are asked to, have a
stand-in, and CUDA's streams are answered so that all is done when it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import (
    EXPERTS,
    STEPS,
    Job,
    SmallJob,
    assert_moved_without_a_change,
    assert_read_back,
    both,
    nothing,
    read_back,
    save_into,
    trained,
)
from newer_megatron import NEWER, WHY_NOT, on_newer
from ranks import run_ranks
from test_megatron import GroupedLinear
from test_megatron_fp8 import prepare
from torch import Tensor

pytestmark = [pytest.mark.long, pytest.mark.skipif(not NEWER.is_dir(), reason=WHY_NOT)]
DELAYED = {"overlap_dispatch_backward_with_experts_wgrad": True}
RECOMPUTE = "recompute of activations and norms, three experts a token"
OF_FLOAT16 = "optimizer of float16, shared experts, recompute"
CASES: dict[str, dict[str, Any]] = {
    RECOMPUTE: {
        "moe_router_topk": 3,
        "grad_reduce_in_fp32": True,
        "moe_grouped_gemm": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe_act", "layernorm"],
    },
    OF_FLOAT16: {
        "distributed": False,
        "moe_router_topk": 3,
        "moe_shared_expert_intermediate_size": 32,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
}
STAGES = "pipeline stages"


class Product(torch.autograd.Function):
    """Rows of each expert by its weights. With ``fuse_wgrad_accumulation`` gradients of weights go to ``main_grad``,
    and autograd gets memory that nobody has written in their place, as from TransformerEngine's."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int], linear: FusedLinear, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.counts, ctx.linear = counts, linear
        pairs = zip(rows.split(counts), weights, strict=True)
        return torch.cat([torch.nn.functional.linear(mine, weight) for mine, weight in pairs])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        linear, weights = ctx.linear, list(ctx.linear.parameters())
        of_rows = torch.cat([mine @ weight for mine, weight in zip(gradient.split(ctx.counts), weights, strict=True)])
        linear.left.append((rows, gradient.clone(), ctx.counts))
        if not linear.delay_wgrad_compute:
            linear.add_gradients()
        for weight in weights:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return of_rows, None, None, *(torch.full_like(weight, float("nan")) for weight in weights)


class FusedLinear(GroupedLinear):
    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.delay_wgrad_compute = config.overlap_dispatch_backward_with_experts_wgrad
        self.left: list[tuple[Tensor, Tensor, list[int]]] = []

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        return Product.apply(rows, counts, self, *self.parameters()), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """As of Megatron's wrapper: experts by their numbers over all ranks, as `SequentialMLP` has them."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        weights = list(self.parameters())
        first = parallel_state.get_expert_model_parallel_rank() * len(weights)
        found = {}
        for number, weight in enumerate(weights):
            place = (len(sharded_offsets), first + number, EXPERTS)
            (entry,) = make_sharded_tensors_for_checkpoint(
                {"weight": weight}, prefix, {}, (*sharded_offsets, place), dp_cp_group=metadata["dp_cp_group"]
            ).values()
            holder = parallel_state.get_expert_data_parallel_rank()
            found[f"{prefix}weight{number}"] = replace(entry, replica_id=(*entry.replica_id[:2], holder))
        return found

    def backward_dw(self) -> None:
        if self.delay_wgrad_compute:
            self.add_gradients()

    def add_gradients(self) -> None:
        rows, gradient, counts = self.left.pop(0)
        for weight, mine, given in zip(self.parameters(), rows.split(counts), gradient.split(counts), strict=True):
            weight.main_grad.add_(given.float().T @ mine.float())  # type: ignore[attr-defined]


class Fused:
    """Experts alone have ``gradient_accumulation_fusion``, which dense layers of a CPU do not know."""

    config: Any

    def __init__(self, gradient_accumulation_fusion: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.config.gradient_accumulation_fusion = gradient_accumulation_fusion


class WgradJob(Fused, SmallJob):
    """Without pipeline stages."""


class StagesJob(Fused, jobs.Job):
    """Of two pipeline stages."""


def answer_cuda() -> None:
    """What Megatron's autograd functions ask of streams and events besides."""

    class Event:
        def record(self, *_: Any) -> None:
            pass

    torch.cuda.Event = Event  # type: ignore[misc]
    torch.cuda.Stream.wait_event = lambda *_: None  # type: ignore[assignment]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    import megatron.core.tensor_parallel.random as random

    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)  # of TransformerEngine, for recompute
    random.activation_recompute_forward = random.fp8_autocast = lambda *_, **__: contextlib.nullcontext()


def said(change: Callable[[Job], Any] = lambda job: None, **options: Any) -> str:
    return jobs.refusal(partial(WgradJob, **{**DELAYED, **options}), change)


def on_parts(kind: str, name: str, value: Any) -> Callable[[Job], None]:
    def change(job: Job) -> None:
        for part in job.models[0].modules():
            if type(part).__name__ == kind:
                setattr(part, name, value)

    return change


def refused() -> dict[str, str]:
    return {
        "overlap_grad_reduce=True": said(overlap_grad_reduce=True),
        "gradient_accumulation_fusion=False": said(gradient_accumulation_fusion=False),
        "use_transformer_engine_op_fuser": said(on_parts("TEGroupedMLP", "_with_fused_impl", True)),
    }


def on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    prepare(FusedLinear)
    answer_cuda()
    results: dict[str, Any] = {}
    for case, options in CASES.items():
        make = partial(WgradJob, **DELAYED, **options)
        results[case] = {
            "static": trained(make, move=False),
            "moving": trained(make, move=True, also=save_into(folder) if case == OF_FLOAT16 else nothing),
        }
    results["at once"] = trained(partial(WgradJob, **CASES[RECOMPUTE]), move=False)["seen"]
    early = WgradJob(**{**DELAYED, **CASES[RECOMPUTE]}, overlap_grad_reduce=True)
    results["reduced too early"] = early.train(range(STEPS))
    results["checkpoint"] = read_back(folder, partial(WgradJob, **DELAYED, **CASES[OF_FLOAT16]))
    results["refused"] = refused()
    return results


def on_four_ranks(rank: int) -> dict[str, Any]:
    jobs.prepare(pipeline_model_parallel_size=2)
    prepare(FusedLinear)
    answer_cuda()
    return {STAGES: both(partial(StagesJob, **DELAYED, num_layers=2))}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_newer, on_two_ranks, str(tmp_path_factory.mktemp("wgrad")))


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_moved_without_a_change(results, case)


def test_experts_of_stages_move_and_no_bit_changes() -> None:
    assert_moved_without_a_change(run_ranks(4, on_newer, on_four_ranks), STAGES)


def test_the_trajectory_is_that_of_gradients_computed_at_once(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank[RECOMPUTE]["static"]["seen"] == of_rank["at once"]


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    assert_read_back(results, OF_FLOAT16, "checkpoint")


def test_reductions_that_do_not_wait_are_wrong_in_megatron_itself(results: list[dict[str, Any]]) -> None:
    """From the second step on, in which it begins to reduce before the end. That is why they are refused."""
    for of_rank in results:
        early, right = ([step[-1] for step in of_rank[which][1:]] for which in ("reduced too early", "at once"))
        print(f"norms of steps whose gradients are reduced too early: {early}, at the end: {right}")
        assert all(norm != pytest.approx(other, rel=5e-4) for norm, other in zip(early, right, strict=True))


def test_what_would_not_come_as_expected_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for what, line in of_rank["refused"].items():
            assert what in line
