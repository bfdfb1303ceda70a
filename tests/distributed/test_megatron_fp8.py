"""FP8 compute of Megatron-Core's experts from bf16 weights (tensorwise, blockwise and MXFP8 scales), with every home
moved after each step: its own model, TEGroupedMLP, schedule, DistributedDataParallel and distributed optimizer, 2 ranks
that hold half of the experts each.

TransformerEngine's grouped layers, and its padding of rows, have stand-ins here, which quantize inputs, gradients and
weights of each expert by themselves, and keep the quantized weights from the first micro-batch to the last.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_megatron_parallelisms as parallelisms
import torch
from megatron_jobs import EXPERTS, attached, batches_of, differing, forget_state, forward_step, whole
from ranks import run_ranks
from test_megatron import GroupedLinear
from test_megatron_parallelisms import LAYERS, STEPS, SmallJob
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
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
    parallelisms.prepare()
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


class QuantizedJob(SmallJob):
    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Tensor]:
        from megatron.core import parallel_state

        leaves = [leaf for leaf in self.optimizer.chained_optimizers if not leaf.is_stub_optimizer]
        first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // 2
        found: dict[Any, Tensor] = {}
        for row, module in enumerate(part for part in self.models[0].modules() if type(part).__name__ == "MoELayer"):
            for name, parameter in module.experts.named_parameters():
                what, slot = re.fullmatch(r"(\D+\d\.weight)(\d+)", name).groups()  # type: ignore[union-attr]
                slot = first + int(slot)
                number = slot if placement is None else int(placement.physical_to_logical[row, slot])
                found[(row, number, what, "weight")] = parameter
                leaf = next(leaf for leaf in leaves if parameter in leaf.model_param_group_index_map)
                state = leaf._get_main_param_and_optimizer_states(parameter)
                found.update({(row, number, what, key): value for key, value in state.items()})
        found |= self.dense()
        return {key: tensor.detach().clone() for key, tensor in found.items() if torch.is_tensor(tensor)}


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    """What came of a training; ``by hand``: the loss of a forward that no schedule has begun, after it."""
    job = QuantizedJob(fp8="e4m3", fp8_recipe=case, **CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    seen = job.train(range(STEPS))
    tensors = job.tensors(balancer.placement)
    with torch.no_grad():
        output, loss_of = forward_step(batches_of(STEPS), job.models[0])
    result = {
        "seen": seen,
        "by hand": loss_of(output)[0].item(),
        "tensors": tensors,
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
    }
    balancer.close()
    return result


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


def keep_caches(_: eplb.Balancer) -> None:
    from eplb_runtime.hosts.megatron.layer import WeightCaches

    WeightCaches.follow = lambda caches: None  # type: ignore[method-assign]


def refused() -> dict[str, str]:
    said = {}
    for what, change in {
        "fp8_recipe=delayed": lambda job: setattr(job.config, "fp8_recipe", "delayed"),
        "fp8_param_gather=True": lambda job: setattr(job.models[0].ddp_config, "fp8_param_gather", True),
        "has no is_first_microbatch": lambda job: [
            vars(part).pop("is_first_microbatch", None) for part in job.models[0].modules()
        ],
        "FP8 themselves": lambda job: setattr(
            next(p for name, p in job.models[0].named_parameters() if ".experts." in name), "_quantizer", None
        ),
    }.items():
        job = QuantizedJob(fp8="e4m3", fp8_recipe="blockwise")
        change(job)
        with pytest.raises(AttachError) as error:
            attached(job, move=False)
        said[what] = str(error.value)
    return said


def everything(rank: int) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {
        case: {"static": trained(case, move=False, spoil=quantize_before), "moving": trained(case, move=True)}
        for case in CASES
    }
    results["state stays"] = trained("tensorwise", move=True, spoil=forget_state)
    results["refused"] = refused()
    results["caches stay"] = trained("tensorwise", move=True, spoil=keep_caches)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_experts_that_compute_in_fp8_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static, moving = ([of_rank[case][which] for of_rank in results] for which in ("static", "moving"))
    assert [one["seen"] for one in static] == [one["seen"] for one in moving]
    assert static[0]["moved"] == 0 < moving[0]["moved"]
    all_static = whole(static)
    experts = [key for key in all_static if key[0] != "dense"]
    print(f"{case}: {len(experts)} tensors of experts, {moving[0]['moved']} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert {key[3] for key in experts} >= {"weight", "param", "exp_avg", "exp_avg_sq"}
    assert differing(all_static, whole(moving)) == []


@pytest.mark.parametrize("case", CASES)
def test_a_forward_by_hand_after_a_move_has_the_weights_of_now(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        assert of_rank[case]["moving"]["by hand"] == of_rank[case]["static"]["by hand"]


def test_control_what_stays_behind_shows(results: list[dict[str, Any]]) -> None:
    static = [of_rank["tensorwise"]["static"] for of_rank in results]
    assert differing(whole(static), whole([of_rank["state stays"] for of_rank in results])) != []
    assert static[0]["by hand"] != results[0]["caches stay"]["by hand"]


def test_what_keeps_scales_or_weights_in_fp8_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        for what, said in of_rank["refused"].items():
            assert what in said
