"""Settings of Megatron-Core, with every home moved after each step: its own model, schedules, DistributedDataParallel
and optimizers, against the same job whose experts stay. Cases of a group run in one job of ranks, prepared as it says.

On a CPU, by the answers of ``launch/examples/megatron_cpu.py`` to what Megatron asks of CUDA. Stand-ins: attention
under context parallelism (`megatron_jobs.gathered_attention`), TransformerEngine's fused permutations and linear layer
(`fused_permutation_double`), DeepEP and HybridEP (`flex_dispatch_double`), CUDA graphs (`cuda_graph_double`), grouped
layers that leave their weights' gradients for later; streams and events of CUDA are answered so that all is done when
it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import cuda_graph_double
import flex_dispatch_double
import fused_permutation_double
import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import (
    EXPERTS,
    INTERLEAVED,
    LENGTH,
    MICRO_BATCHES,
    STEPS,
    SmallJob,
    assert_counted,
    assert_moved_without_a_change,
    both,
    differing,
    forward_step,
    whole,
)
from ranks import run_ranks
from test_megatron import GroupedLinear
from test_megatron_fp8 import prepare as prepare_grouped
from test_megatron_graphs import GraphedJob
from torch import Tensor, nn

pytestmark = jobs.long_megatron
TOP_3 = {"moe_router_topk": 3}
BESIDE = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
UPDATE = 1 / 16
CHOICES = MICRO_BATCHES * 2 * LENGTH
"""Tokens of a rank in a step."""


# -- kinds of jobs, and what they are prepared by --------------------------------------------------------------------


class HalfJob(SmallJob):
    """In float16, whose loss scale overflows and makes Megatron skip steps. Sees the scale after each step, too."""

    def __init__(self, **options: Any) -> None:
        half = {"params_dtype": torch.float16}
        scale = {"initial_loss_scale": 2.0**18, "loss_scale_window": 2, "hysteresis": 1}
        stepped = {"fp16": True, **half, **scale}
        super().__init__(bf16=False, fp16=True, pipeline_dtype=torch.float16, stepped=stepped, **half, **options)
        self.config.grad_scale_func = self.optimizer.scale_loss

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        seen = []
        for step in steps:
            (of_step,) = super().train(range(step, step + 1))
            seen.append((*of_step, float(self.optimizer.get_loss_scale())))
        return seen


class AdaptedJob(SmallJob):
    """Only adapters of attention are trained, as Megatron-Bridge's LoRA for ``linear_qkv`` and ``linear_proj`` does. It
    needs TransformerEngine, so they are put in here, ahead of DistributedDataParallel as by Bridge."""

    def _chunk(self, number: int, chunks: int, ddp: Any, share: bool) -> Any:
        from megatron.core.models.gpt import GPTModel

        own = GPTModel.__init__

        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            own(model, *args, **kwargs)
            adapt(model)

        GPTModel.__init__ = init
        try:
            return super()._chunk(number, chunks, ddp, share)
        finally:
            GPTModel.__init__ = own


def adapt(model: nn.Module) -> None:
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, part in list(model.named_modules()):
        if name.endswith(("linear_qkv", "linear_proj")):
            out, into = part.weight.shape
            part.linear_in = nn.Parameter(torch.randn(4, into, generator=generator).to(part.weight.dtype))
            part.linear_out = nn.Parameter(torch.zeros(out, 4, dtype=part.weight.dtype))
            part.forward = adapted(part, part.forward)


def adapted(part: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        result, bias = own(rows, *args, **kwargs)
        return result + (rows @ part.linear_in.T) @ part.linear_out.T, bias

    return forward


class OverlapJob(SmallJob):
    """By Megatron's combined schedule, in which one micro-batch goes forward while another goes backward."""

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        return self.train_by(forward_step, steps)


class StagesJob(jobs.Job):
    """Of two pipeline stages."""

    train = OverlapJob.train


class OverlapGraphedJob(GraphedJob, OverlapJob):
    """Megatron captures after the first step."""


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


class Linear(nn.Linear):
    """TransformerEngine's of a whole weight on each rank; returns a bias beside."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(rows), None


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


def prepare_fused() -> None:
    jobs.prepare_small()
    import megatron.core.transformer.moe.moe_layer as moe_layer

    use_fused_permutations()
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear


def use_fused_permutations() -> None:
    import megatron_cpu

    torch.arange = megatron_cpu._on_cpu(torch.arange)
    fused_permutation_double.use()


def prepare_flex() -> None:
    jobs.prepare_small()
    answer_streams()
    flex_dispatch_double.use()


def prepare_overlap() -> None:
    jobs.prepare_small()
    answer_streams()


def answer_backward_dw() -> None:
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    RowParallelLinear.backward_dw = lambda _: None  # type: ignore[attr-defined]  # as ColumnParallelLinear's


def prepare_overlap_graphed() -> None:
    prepare_overlap()
    answer_backward_dw()
    cuda_graph_double.install()


def prepare_delayed() -> None:
    answer_streams()
    prepare_grouped(DelayedLinear)
    answer_backward_dw()


def prepare_stages() -> None:
    jobs.prepare(pipeline_model_parallel_size=2)
    answer_streams()
    use_fused_permutations()


# -- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Cases of one job of ranks.

    Args:
        prepare: called on each rank before anything is made.
        cases: settings of Megatron's TransformerConfig, and `Job`'s own.
        common: to all of them.
        alone: cases that Megatron trains without us, too.
    """

    prepare: Callable[[], None]
    cases: Mapping[str, Mapping[str, Any]]
    kind: type[Any] = SmallJob
    common: Mapping[str, Any] | None = None
    ranks: int = 2
    steps: int = STEPS
    alone: tuple[str, ...] = ()

    def make(self, case: str) -> Callable[[], Any]:
        return partial(self.kind, **{**(self.common or {}), **self.cases[case]})


FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
GROUPS = {
    "parallelisms": Group(
        jobs.prepare_small,
        {
            "context parallelism": {"context_parallel_size": 2},
            "tensor and sequence parallelism": {
                "tensor_model_parallel_size": 2,
                "sequence_parallel": True,
                "expert_tensor_parallel_size": 1,
            },
            "full recompute": FULL,
            "selective recompute": {
                "recompute_granularity": "selective",
                "recompute_modules": ["core_attn", "moe"],
                "distributed": False,
            },
            "expert bias": {
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": UPDATE,
            },
        },
        common=TOP_3,
        alone=("context parallelism", "tensor and sequence parallelism"),
    ),
    "fused permutation": Group(
        prepare_fused,
        {
            "fused": {"bf16": False},  # sums in float32 of numbers in bfloat16 seldom show their order
            "tokens over the capacity dropped": {"moe_expert_capacity_factor": 1.0, **FULL, "distributed": False},
            "overlapped shared experts": {
                "moe_shared_expert_intermediate_size": 32,
                "moe_shared_expert_overlap": True,
            },
            "latent experts": {"moe_latent_size": 16, "moe_permute_fusion": False},
        },
        common={**TOP_3, "moe_permute_fusion": True},
        alone=("fused",),
    ),
    "float16": Group(
        jobs.prepare_small,
        {"distributed, gathers overlapped": BESIDE, "optimizer of float16": {"distributed": False}},
        kind=HalfJob,
        common=TOP_3,
        steps=4,
        alone=("optimizer of float16",),
    ),
    "frozen experts": Group(
        jobs.prepare_small,
        {"distributed optimizer": BESIDE, "optimizer of float16": {"distributed": False}},
        kind=AdaptedJob,
        common=TOP_3,
        ranks=4,
    ),
    "flex": Group(
        prepare_flex,
        {
            "deepep": {"moe_flex_dispatcher_backend": "deepep"},
            "hybridep": {"moe_flex_dispatcher_backend": "hybridep", "distributed": False},
        },
        common=FLEX,
    ),
    "flex, overlap": Group(
        prepare_flex,
        {backend: {"moe_flex_dispatcher_backend": backend} for backend in ("deepep", "hybridep")},
        kind=OverlapJob,
        common={**FLEX, **OVERLAP},
    ),
    "overlap": Group(
        prepare_overlap,
        {
            "gathers and reductions beside": BESIDE,
            "optimizer of float16": {"distributed": False, "moe_shared_expert_intermediate_size": 32},
        },
        kind=OverlapJob,
        common={**TOP_3, **OVERLAP},
    ),
    "overlap, graphs": Group(
        prepare_overlap_graphed,
        {
            "graphs": {
                "cuda_graph_impl": "transformer_engine",
                "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"],
            }
        },
        kind=OverlapGraphedJob,
        common=OVERLAP,
        steps=STEPS + 1,  # replayed before and after a move
    ),
    "overlap, delayed": Group(
        prepare_delayed,
        {"delayed": {"delay_wgrad_compute": True, "overlap_grad_reduce": True}},
        kind=OverlapJob,
        common={**TOP_3, **OVERLAP},
    ),
    "overlap, stages": Group(
        prepare_stages,
        {
            "interleaved": INTERLEAVED,
            "second token": {
                **INTERLEAVED,
                "mtp_num_layers": 1,
                "moe_permute_fusion": True,
                "distributed": False,
            },
        },
        kind=StagesJob,
        common={**TOP_3, **OVERLAP},
        ranks=4,
    ),
}
ALL = [(group, case) for group, own in GROUPS.items() for case in own.cases]


def on_a_rank(rank: int, name: str, cases: list[str]) -> dict[str, Any]:
    group = GROUPS[name]
    group.prepare()
    results: dict[str, Any] = {}
    for case in cases:
        make = group.make(case)
        results[case] = both(make, steps=group.steps)
        results[case]["alone"] = make().train(range(group.steps)) if case in group.alone else None
        results[case]["before"] = {"tensors": make().tensors(None)} if group.kind is AdaptedJob else None
    if name == "flex":
        results["said"] = jobs.refusal(
            group.make("deepep"), lambda job: setattr(job.config, "moe_flex_dispatcher_backend", "ncclep")
        )
    if name == "overlap":
        plain = {**group.common, **BESIDE, "overlap_moe_expert_parallel_comm": False}  # type: ignore[dict-item]
        results["one after another"] = OverlapJob(**plain).train(range(1))
    return results


@cache
def of(group: str) -> list[dict[str, Any]]:
    """What each rank has found of a group's cases."""
    return run_ranks(GROUPS[group].ranks, on_a_rank, group, list(GROUPS[group].cases))


@pytest.mark.parametrize(("group", "case"), ALL, ids=[": ".join(one) for one in ALL])
def test_experts_move_and_no_bit_changes(group: str, case: str) -> None:
    kinds = assert_moved_without_a_change(of(group), case)
    assert kinds == {"weight"} if group == "frozen experts" else kinds >= {"weight", "param", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("case", GROUPS["parallelisms"].cases)
def test_each_choice_is_counted_once(case: str) -> None:
    assert_parallel_counted(of("parallelisms"), case)


def assert_parallel_counted(results: list[dict[str, Any]], case: str) -> None:
    assert_counted(results, case, 3 * CHOICES // (2 if "parallelism" in case else 1))  # tokens that 2 ranks share then


@pytest.mark.parametrize("case", [case for case in GROUPS["fused permutation"].cases if "dropped" not in case])
def test_each_choice_of_fused_permutations_is_counted_once(case: str) -> None:
    assert_counted(of("fused permutation"), case, 3 * CHOICES)


@pytest.mark.parametrize("case", GROUPS["parallelisms"].alone)
def test_losses_and_norms_are_those_of_megatron_alone(case: str) -> None:
    for of_rank in of("parallelisms"):
        alone, moving = of_rank[case]["alone"], of_rank[case]["moving"]["seen"]
        assert moving[0] == pytest.approx(alone[0], rel=1e-5)
        for of_alone, of_moving in zip(alone[1:], moving[1:], strict=True):  # after steps in bfloat16
            assert of_moving == pytest.approx(of_alone, rel=1e-2)


def test_the_first_step_is_that_of_megatron_alone_and_of_one_micro_batch_after_another() -> None:
    for of_rank in of("fused permutation"):
        assert of_rank["fused"]["moving"]["seen"][0] == pytest.approx(of_rank["fused"]["alone"][0], rel=1e-5)
    for of_rank in of("overlap"):
        seen = of_rank["gathers and reductions beside"]["moving"]["seen"]
        assert seen[0] == pytest.approx(of_rank["one after another"][0], rel=1e-5)


def test_the_bias_of_experts_follows_the_load_of_all_steps() -> None:
    moving = [of_rank["expert bias"]["moving"] for of_rank in of("parallelisms")]
    load_SLE = sum(torch.tensor(of_rank["counted"]) for of_rank in moving)
    wanted_LE = UPDATE * (load_SLE.float().mean(dim=-1, keepdim=True) - load_SLE).sign().sum(dim=0)
    biases = {key[2]: tensor for key, tensor in whole(moving).items() if key[0] == "dense" and "expert_bias" in key[2]}
    assert len(biases) == 2 and wanted_LE.count_nonzero() > 0
    for name, wanted in zip(sorted(biases), wanted_LE, strict=True):
        assert torch.equal(biases[name], wanted), name


def test_steps_in_float16_are_skipped_where_megatron_alone_skips_them() -> None:
    for of_rank in of("float16"):
        for case in GROUPS["float16"].cases:
            moving = of_rank[case]["moving"]
            assert 0 < sum(norm is None for *_, norm, _ in moving["seen"]) <= GROUPS["float16"].steps - 2
            assert moving["moved"] > GROUPS["float16"].steps * EXPERTS, "after skipped steps, too"
        found = of_rank["optimizer of float16"]
        for alone, moving in zip(found["alone"], found["moving"]["seen"], strict=True):
            assert (alone[-2] is None, alone[-1]) == (moving[-2] is None, moving[-1])


@pytest.mark.parametrize("case", GROUPS["frozen experts"].cases)
def test_beside_frozen_experts_adapters_alone_are_trained(case: str) -> None:
    results = of("frozen experts")
    before, after = (whole([of_rank[case][when] for of_rank in results]) for when in ("before", "static"))
    changed = differing(before, after)
    assert changed and all(key[0] == "dense" and "linear_" in key[2] for key in changed)


def test_another_flex_backend_is_refused() -> None:
    for of_rank in of("flex"):
        assert "moe_flex_dispatcher_backend=ncclep: nothing has been run with it" in of_rank["said"]
