"""FP8 compute of Megatron-Core's experts from bf16 weights (tensorwise, blockwise and MXFP8 scales), with every home
moved after each step: its own model, TEGroupedMLP, schedule, DistributedDataParallel and distributed optimizer, 2 ranks
that hold half of the experts each.

TransformerEngine's grouped layers, and its padding of rows, have stand-ins here, which quantize inputs, gradients and
weights of each expert by themselves, and keep the quantized weights from the first micro-batch to the last.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import STEPS, SmallJob, assert_moved_without_a_change, batches_of, forward_step, trained
from ranks import run_ranks
from test_megatron import GroupedLinear
from torch import Tensor

import eplb_runtime as eplb

pytestmark = jobs.long_megatron
CASES: dict[str, dict[str, Any]] = {
    "tensorwise": {"moe_router_topk": 3},
    "blockwise": {},
    "mxfp8": {"moe_router_padding_for_quantization": True, "moe_router_topk": 3},
}
BLOCK = {"blockwise": 128, "mxfp8": 32}
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantized(numbers: Tensor, recipe: str) -> Tensor:
    """What FP8 keeps of numbers, in float32; scales are of the tensor, or of blocks along the last dimension."""
    width = numbers.shape[-1]
    block = BLOCK.get(recipe, max(1, width))
    padded = torch.nn.functional.pad(numbers.float(), (0, -width % block)).unflatten(-1, (-1, block))
    if recipe == "tensorwise":
        largest = padded.abs().max() if padded.numel() else padded.new_ones(())
    else:
        largest = padded.abs().amax(dim=-1, keepdim=True) if padded.numel() else padded
    scale = (largest / LARGEST).clamp(min=1e-12)
    if recipe == "mxfp8":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    kept = (padded / scale).to(torch.float8_e4m3fn).float() * scale
    return kept.flatten(-2)[..., :width]


class Product(torch.autograd.Function):
    """Rows of one expert by its weights; all three products are of FP8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, kept: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(rows, kept)
        ctx.recipe, ctx.dtype = recipe, weight.dtype
        return (quantized(rows, recipe) @ kept.T).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, kept = ctx.saved_tensors
        of_rows = quantized(gradient, ctx.recipe) @ kept
        of_weight = quantized(gradient.T.contiguous(), ctx.recipe) @ quantized(rows.T.contiguous(), ctx.recipe).T
        return of_rows.to(rows.dtype), of_weight.to(ctx.dtype), None, None


class QuantizedLinear(GroupedLinear):
    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(num_gemms, input_size, output_size, config=config, **options)
        self.recipe, self.kept = str(config.fp8_recipe), [torch.empty(0)] * num_gemms
        self.is_first_microbatch = True

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        weights = list(self.parameters())
        if self.is_first_microbatch:
            self.kept = [quantized(weight.detach(), self.recipe) for weight in weights]
        self.is_first_microbatch = False
        parts = zip(rows.split(counts), weights, self.kept, strict=True)
        return torch.cat([Product.apply(mine, weight, kept, self.recipe) for mine, weight, kept in parts]), None


class Padding(torch.nn.Module):
    """Rows of each expert to a multiple of 32, by zeros."""

    def __init__(self, count: int, **_: Any) -> None:
        super().__init__()

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        sizes = [-(-count // 32) * 32 for count in counts]
        parts = [
            torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
            for part, size in zip(rows.split(counts), sizes, strict=True)
        ]
        return torch.cat(parts), sizes


class Unpadding(Padding):
    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:  # type: ignore[override]
        sizes = [-(-count // 32) * 32 for count in counts]
        return torch.cat([part[:count] for part, count in zip(rows.split(sizes), counts, strict=True)])


def prepare(linear: type[GroupedLinear] = QuantizedLinear) -> None:
    """Let Megatron make experts of ``linear``, in its own `TEGroupedMLP`."""
    jobs.prepare_small()
    import megatron.core.models.gpt.gpt_layer_specs as specs
    import megatron.core.transformer.moe.experts as experts
    import megatron.core.transformer.transformer_config as configs
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    experts.HAVE_TE, experts.Fp8Padding, experts.Fp8Unpadding = True, Padding, Unpadding
    configs.is_te_min_version = lambda *_: True
    own = specs.get_gpt_decoder_block_spec

    def grouped(*args: Any, **kwargs: Any) -> Any:
        spec = own(*args, **kwargs)
        linears = MLPSubmodules(linear_fc1=linear, linear_fc2=linear)
        for layer in spec.layer_specs:
            mlp = layer.submodules.mlp
            if isinstance(mlp, partial):  # since 0.18 makers of modules are partial functions
                mlp.keywords["submodules"].experts = partial(experts.TEGroupedMLP, submodules=linears)
            else:
                mlp.submodules.experts = ModuleSpec(module=experts.TEGroupedMLP, submodules=linears)
        return spec

    specs.get_gpt_decoder_block_spec = grouped


def by_hand(job: SmallJob, _: eplb.Balancer) -> dict[str, Any]:
    """The loss of a forward that no schedule has begun."""
    with torch.no_grad():
        output, loss_of = forward_step(batches_of(STEPS), job.models[0])
    return {"by hand": loss_of(output)[0].item()}


def quantize_before(balancer: eplb.Balancer) -> None:
    """Let the forward by hand after the last step be as if its weights had just been quantized, without moves."""
    job = balancer._runtime
    counter = job.counter
    own = counter.advance

    def advance() -> None:
        own()
        if counter.closed_steps == STEPS:
            for layer in job.layers:
                for part in layer._module.modules():
                    if hasattr(part, "is_first_microbatch"):
                        part.is_first_microbatch = True

    counter.advance = advance


def pop_caches(job: SmallJob) -> None:
    for part in job.models[0].modules():
        vars(part).pop("is_first_microbatch", None)


def mark_as_quantized(job: SmallJob) -> None:
    next(p for name, p in job.models[0].named_parameters() if ".experts." in name)._quantizer = None


REFUSED: dict[str, Any] = {
    "fp8_recipe=delayed": lambda job: setattr(job.config, "fp8_recipe", "delayed"),
    "fp8_param_gather=True": lambda job: setattr(job.models[0].ddp_config, "fp8_param_gather", True),
    "has no is_first_microbatch": pop_caches,
    "FP8 themselves": mark_as_quantized,
}


def everything(rank: int) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {}
    for case, options in CASES.items():
        make = partial(SmallJob, fp8="e4m3", fp8_recipe=case, **options)
        results[case] = {
            "static": trained(make, move=False, spoil=quantize_before, also=by_hand),
            "moving": trained(make, move=True, also=by_hand),
        }
    make = partial(SmallJob, fp8="e4m3", fp8_recipe="blockwise")
    results["refused"] = {what: jobs.refusal(make, change) for what, change in REFUSED.items()}
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_experts_that_compute_in_fp8_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) >= {"weight", "param", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("case", CASES)
def test_a_forward_by_hand_after_a_move_has_the_weights_of_now(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        assert of_rank[case]["moving"]["by hand"] == of_rank[case]["static"]["by hand"]


def test_what_keeps_scales_or_weights_in_fp8_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for what, said in of_rank["refused"].items():
            assert what in said
