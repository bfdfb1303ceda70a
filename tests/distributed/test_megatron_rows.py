"""Settings of Megatron-Core, a row for each that differs in kind: trained with every home moved after each step,
against the same job whose experts stay, tensor by tensor. `support.megatron_jobs` has the job,
`support.megatron_standins` what stands in for packages of a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import rows_of, run_ranks
from support import megatron_standins as standins
from support.megatron_jobs import (
    OFFLOADED,
    STEPS,
    Job,
    Row,
    assert_moved_without_a_change,
    attached,
    batches_of,
    forward_step,
    moved_by,
    needs_megatron,
    traces,
    whole,
)

import eplb_runtime as eplb

pytestmark = needs_megatron
TOP_3 = {"moe_router_topk": 3}
PLAIN = {"distributed": False}
BESIDE = {"overlap_grad_reduce": True, "overlap_param_gather": True}
STAGES = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {**STAGES, "chunks": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
SHARED = {"moe_shared_expert_intermediate_size": 32}
DIVIDED = {"num_layers": 1, "moe_ffn_hidden_size": 40, **TOP_3}
CUT = {**DIVIDED, "num_moe_experts": 6}
LATE = {**DIVIDED, "num_layers": 2, "bucket_size": 10_000, **BESIDE}
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
UPDATE = 1 / 16
BIAS = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": UPDATE,
}
FLOAT16 = {
    "bf16": False,
    "fp16": True,
    "params_dtype": torch.float16,
    "stepped": {"initial_loss_scale": 2.0**18, "loss_scale_window": 2, "hysteresis": 1},
    **TOP_3,
}
"""Whose loss scale overflows and makes Megatron skip steps."""
FLOAT64 = {"bf16": False, "params_dtype": torch.float64, **PLAIN, **TOP_3}
"""For settings that add up by slot: equal to rounding. Megatron's distributed optimizer takes no float64."""


def offloaded(fraction: float, **stepped: Any) -> dict[str, Any]:
    """Options of Megatron's HybridDeviceOptimizer."""
    own = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, "pin_cpu_grads": False}
    return {**TOP_3, "stepped": {**own, **stepped}}


def aware(**stepped: Any) -> dict[str, Any]:
    """Options of Megatron's precision-aware optimizer on the device."""
    return {**TOP_3, "stepped": {"use_precision_aware_optimizer": True, **stepped}}


OVERLAPPED = {"overlap_cpu_optimizer_d2h_h2d": True}
AWARE = {"use_precision_aware_optimizer": True}
HALF = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
SLIME = {
    **STAGES,
    **FULL,
    **offloaded(1.0, **OVERLAPPED, **AWARE),
    "num_moe_experts": 16,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 40,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp32",
    "moe_permute_fusion": True,
    "grad_reduce_in_fp32": True,
}
"""As `scripts/run-*.sh` of slime have it; moments are float32 by default."""


# -- what rows look at besides, and what is refused --------------------------------------------------------------------


def by_hand(job: Job, balancer: eplb.Balancer) -> float:
    """The loss of a forward that no schedule has begun. Without moves weights are quantized for it here."""
    for part in job.models[0].modules():
        if hasattr(part, "is_first_microbatch") and not moved_by(balancer):
            part.is_first_microbatch = True
    with torch.no_grad():
        output, loss_of = forward_step(batches_of(STEPS), job.models[0])
    return float(loss_of(output)[0])


def set_config(name: str, value: Any) -> Any:
    return lambda job: setattr(job.config, name, value)


def set_fp8_gather(job: Job) -> None:
    job.models[0].ddp_config.fp8_param_gather = True


def pop_caches(job: Job) -> None:
    for part in job.models[0].modules():
        vars(part).pop("is_first_microbatch", None)


def mark_as_quantized(job: Job) -> None:
    next(p for name, p in job.models[0].named_parameters() if ".experts." in name)._quantizer = None


def forget_stage(job: Job) -> None:
    for model in job.models:
        for part in model.modules():
            vars(part).pop("vp_stage", None)


def pop_scales(job: Job) -> None:
    for leaf in job.optimizer.chained_optimizers:
        vars(leaf.optimizer).pop("_scales", None)


def not_distributed(job: Job) -> None:
    options = {**offloaded(1.0), **PLAIN}
    job.__init__(**options)  # type: ignore[misc]


def preprocessed(job: Job) -> None:
    options = {**GRAPHS, "cuda_graph_scope": ["moe_router", "moe_preprocess"]}
    job.__init__(**options)  # type: ignore[misc]


def half(job: Job) -> None:
    options = offloaded(0.5)
    job.__init__(**options)  # type: ignore[misc]


CPU = ("cpu",)
FUSED, GROUPED, FP8 = ("cpu", "permutation"), ("cpu", "streams", "grouped"), ("cpu", "streams", "quantized_experts")
OFFLOAD, AWARENESS = ("cpu", "device"), ("cpu", "fused_adam")
KEPT = frozenset({"weight", "exp_avg", "exp_avg_sq", "master_param"})
SCALES = {f"scale of {key}" for key in ("exp_avg", "exp_avg_sq")}
ROWS: dict[str, Row] = {
    # four ways to train, in CI; two ranks if a row does not say otherwise
    "no wrapper, torch's optimizer, three experts a token": Row(
        {"plain": True, "bf16": False, **TOP_3}, CPU, short=True
    ),
    "distributed optimizer, all-gather": Row(
        {"moe_token_dispatcher_type": "allgather", **BESIDE, **LOSSES, **BIAS}, CPU, short=True
    ),
    "optimizer of float16, shared experts": Row({**PLAIN, **SHARED, **TOP_3}, CPU, saves=True, short=True),
    "grouped experts": Row({}, GROUPED, short=True),
    "divided, an expert cut": Row(CUT, ("cpu", "adamw_steps"), ranks=4, saves=True, short=True),
    # ranks that hold the same experts
    "divided, buckets, gathers beside": Row(LATE, CPU, ranks=4),
    "slime's shape": Row(SLIME, ("cpu", "device", "permutation"), ranks=8, steps=3, saves=True, kinds=OFFLOADED),
    # pipeline stages
    "1F1B": Row({**STAGES, "clip_grad": 0.0}, CPU, ranks=4, alone=0.0),
    "interleaved": Row(
        {**INTERLEAVED, **TOP_3},
        CPU,
        ranks=4,
        refused={forget_stage: "virtual stages", set_config("fp4", "nvfp4"): "not supported yet"},
    ),
    "a stage without an MoE layer": Row({**STAGES, "moe_layer_freq": [0, 1], "share": True}, CPU, ranks=4),
    "a chunk without an MoE layer": Row(
        {**INTERLEAVED, **PLAIN, "moe_layer_freq": [0, 1, 1, 1]}, CPU, ranks=4, saves=True
    ),
    "gradients and weights travel beside": Row({**INTERLEAVED, **BESIDE, "align": True}, CPU, ranks=4),
    # other parallelisms, recompute, precision
    "context parallelism": Row({"context_parallel_size": 2, **TOP_3}, CPU, alone=1e-5),
    "tensor and sequence parallelism": Row(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1, **TOP_3},
        CPU,
        alone=1e-5,
    ),
    "full recompute": Row({**FULL, **TOP_3}, CPU),
    "selective recompute": Row(
        {**PLAIN, **TOP_3, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}, CPU
    ),
    "expert bias": Row({**BIAS, **TOP_3}, CPU),
    "float16": Row({**FLOAT16, **PLAIN}, CPU, steps=4, alone=1e-5),
    "frozen experts": Row({"adapts": True, **BESIDE, **TOP_3}, CPU, ranks=4, kinds=frozenset({"weight"})),
    # memory that is freed and loaded between steps, as verl does it around its rollouts
    "phases": Row({"frees": True, **TOP_3}, CPU),
    "phases, optimizer of float16": Row({"frees": True, **PLAIN, **TOP_3}, CPU),
    # optimizers with state in host memory, or in dtypes of its own
    "masters in host memory": Row(
        offloaded(1.0),
        OFFLOAD,
        kinds=OFFLOADED,
        refused={not_distributed: "set use_distributed_optimizer=True", half: "optimizer_offload_fraction=0.5"},
    ),
    "precision-aware, in host memory": Row(
        offloaded(1.0, **OVERLAPPED, **AWARE), OFFLOAD, kinds=OFFLOADED, saves=True, alone=1e-2
    ),
    "float32, in host memory": Row({**offloaded(1.0, **OVERLAPPED), "bf16": False, **PLAIN}, OFFLOAD, kinds=OFFLOADED),
    "remainders of masters, moments in bfloat16": Row(
        aware(**HALF),
        AWARENESS,
        kinds=KEPT | SCALES,
        refused={pop_scales: "in another way than TransformerEngine's FusedAdam"},
        alone=1e-2,  # without TransformerEngine Megatron adds up squares in bfloat16
    ),
    "masters in float16": Row(
        {**aware(**HALF, main_params_dtype=torch.float16), **BESIDE},
        AWARENESS,
        kinds=KEPT | SCALES | {"scale of master_param"},
    ),
    "moments in float16": Row(
        aware(exp_avg_dtype=torch.float16, exp_avg_sq_dtype=torch.float16, store_param_remainders=False),
        AWARENESS,
        kinds=KEPT | SCALES,
    ),
    "moments in float32": Row(aware(store_param_remainders=False), AWARENESS, kinds=KEPT, saves=True),
    "divided remainders of masters": Row(
        {**aware(**HALF), "num_moe_experts": 6, "moe_ffn_hidden_size": 40}, AWARENESS, ranks=4, kinds=KEPT | SCALES
    ),
    # permutations, capacity, dispatchers
    "fused permutation": Row({"bf16": False, "moe_permute_fusion": True, **TOP_3}, FUSED, alone=1e-5),
    "tokens over the capacity dropped": Row(
        {"moe_expert_capacity_factor": 1.0, "moe_permute_fusion": True, **FULL, **PLAIN, **TOP_3}, FUSED
    ),
    "overlapped shared experts": Row(
        {**SHARED, "moe_shared_expert_overlap": True, "moe_permute_fusion": True, **TOP_3}, FUSED
    ),
    "latent experts": Row({"moe_latent_size": 16, **TOP_3}, FUSED),
    "flex, deepep": Row(
        {**FLEX, "moe_flex_dispatcher_backend": "deepep"},
        ("cpu", "streams", "flex"),
        refused={
            set_config("moe_flex_dispatcher_backend", "ncclep"): "moe_flex_dispatcher_backend=ncclep: nothing has been"
        },
    ),
    "flex, hybridep": Row({**FLEX, **PLAIN, "moe_flex_dispatcher_backend": "hybridep"}, ("cpu", "streams", "flex")),
    # one micro-batch forward beside another backward
    "overlap, flex, deepep": Row(
        {**FLEX, **OVERLAP, "moe_flex_dispatcher_backend": "deepep"}, ("cpu", "streams", "flex")
    ),
    "overlap": Row({**OVERLAP, **BESIDE, **TOP_3}, ("cpu", "streams")),
    "overlap, delayed": Row(
        {**OVERLAP, **TOP_3, "delay_wgrad_compute": True, "overlap_grad_reduce": True},
        ("cpu", "streams", "delayed_experts"),
    ),
    "overlap, interleaved": Row({**OVERLAP, **INTERLEAVED, **TOP_3}, ("cpu", "streams", "permutation"), ranks=4),
    # graphs are captured after the first step, and replayed before a move and after it
    "graphs of attention, router": Row(
        {**GRAPHS, "cuda_graph_scope": ["attn", "moe_router"], **LOSSES, **BESIDE, **TOP_3},
        ("cpu", "streams", "graphs"),
        steps=3,
        refused={preprocessed: "moe_preprocess"},
    ),
    # FP8 compute from weights in bfloat16
    "fp8, blockwise": Row(
        {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        FP8,
        more=by_hand,
        refused={
            set_config("fp8_recipe", "delayed"): "fp8_recipe=delayed",
            set_fp8_gather: "fp8_param_gather=True",
            pop_caches: "has no is_first_microbatch",
            mark_as_quantized: "FP8 themselves",
        },
    ),
    "fp8, mxfp8": Row(
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "moe_router_padding_for_quantization": True, **TOP_3}, FP8, more=by_hand
    ),
    # equal to rounding, three experts a token
    **{
        f"float64, {name}": Row({**FLOAT64, **options}, ("cpu", "streams", "flex", "float64"), close=1e-10)
        for name, options in {
            "flex, deepep": {**FLEX, "moe_flex_dispatcher_backend": "deepep"},
            "flex, hybridep": {**FLEX, "moe_flex_dispatcher_backend": "hybridep"},
            "all-gather": {"moe_token_dispatcher_type": "allgather"},
        }.items()
    },
}


@pytest.mark.parametrize("name", rows_of(ROWS, *(name for name, row in ROWS.items() if row.short)))
def test_experts_move_and_no_bit_changes(name: str) -> None:
    assert_moved_without_a_change(ROWS[name], traces(__name__, name))


def test_expert_work_is_measured_between_megatrons_own_dispatch_and_combine() -> None:
    for name in ("distributed optimizer, all-gather", "grouped experts"):
        assert all("measured" in found["moving"].sources for found in traces(__name__, name))


@pytest.mark.long
def test_the_bias_of_experts_follows_the_load_of_all_steps() -> None:
    moving = [found["moving"] for found in traces(__name__, "expert bias")]
    load_SLE = torch.tensor(moving[0].load)
    wanted_LE = UPDATE * (load_SLE.float().mean(dim=-1, keepdim=True) - load_SLE).sign().sum(dim=0)
    biases = {key[2]: tensor for key, tensor in whole(moving).items() if key[0] == "dense" and "expert_bias" in key[2]}
    assert len(biases) == 2 and wanted_LE.count_nonzero() > 0
    for name, wanted in zip(sorted(biases), wanted_LE, strict=True):
        assert torch.equal(biases[name], wanted), name


# -- once moved, three ranks hold the same; memory is freed ------------------------------------------------------------


def decided_without_memory(rank: int) -> list[dict[str, Any]]:
    """What a decision says while weights have no memory on some ranks, and whether training goes on."""
    standins.cpu()
    return [_decided(guard, ranks) for guard in ("on", "off") for ranks in ((0, 1), (1,))]


def _decided(guard: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    job = Job(**TOP_3)
    balancer = attached(job, move=True, interval=2)
    if guard == "off":
        balancer.guard._mode = "off"
    memory = standins.Memory(job.models[0], job.optimizer)
    job.train(range(1))
    before, epoch, events = moved_by(balancer), balancer.placement.epoch, len(list(balancer.events))
    if dist.get_rank() in ranks:
        memory.free()
    has_moved = balancer.rebalance()
    if dist.get_rank() in ranks:
        memory.load()
    said = [repr(event) for event in list(balancer.events)[events:]]
    stayed = not has_moved and balancer.placement.epoch == epoch and moved_by(balancer) == before
    job.train(range(1, 4))
    later = moved_by(balancer)
    balancer.close()
    line = "load weights ahead of decisions" if guard == "on" else "its memory is freed"
    return {"line": line, "stayed": stayed, "said": said, "later": later - before}


@pytest.mark.long
def test_a_decision_while_weights_have_no_memory_moves_nothing_and_says_so() -> None:
    for results in run_ranks(2, decided_without_memory):
        for found in results:
            assert found["stayed"] and found["later"] > 0, "once they are loaded, experts move"
            assert any(found["line"] in event for event in found["said"]), found["said"]
            assert "setStorage" not in str(found["said"])
