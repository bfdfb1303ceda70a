"""Settings of Megatron-Core, a row for each that differs in kind: trained with every home moved after each step,
against the same job whose experts stay, tensor by tensor. `support.megatron_jobs` has the job,
`support.megatron_standins` what stands in for packages of a GPU.
"""

from typing import Any

import pytest
import torch
from support import megatron_standins as standins
from support.megatron_jobs import (
    OFFLOADED,
    MegatronLoop,
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
from support.ranks import rows_of, run_ranks

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
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
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
}
"""Whose loss scale overflows and makes Megatron skip steps."""


def offloaded(fraction: float, **stepped: Any) -> dict[str, Any]:
    """Options of Megatron's HybridDeviceOptimizer."""
    own = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction, "pin_cpu_grads": False}
    return {**TOP_3, "stepped": {**own, **stepped}}


def aware(dtype: torch.dtype, **stepped: Any) -> dict[str, Any]:
    """Options of Megatron's precision-aware optimizer on the device, with moments of this dtype."""
    own = {"use_precision_aware_optimizer": True, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    return {**TOP_3, "stepped": {**own, **stepped}}


SLIME = {
    **STAGES,
    **FULL,
    **offloaded(1.0, overlap_cpu_optimizer_d2h_h2d=True, use_precision_aware_optimizer=True),
    "num_moe_experts": 16,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 40,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_dtype": "fp32",
    "grad_reduce_in_fp32": True,
}
"""As `scripts/run-*.sh` of slime have it, without its fused permutation; moments are float32 by default."""


# -- what a row looks at besides, and what is refused of the live objects of a job -------------------------------------


def by_hand(job: MegatronLoop, balancer: eplb.Balancer) -> float:
    """The loss of a forward that no schedule has begun. Without moves weights are quantized for it here."""
    for part in job.models[0].modules():
        if hasattr(part, "is_first_microbatch") and not moved_by(balancer):
            part.is_first_microbatch = True
    with torch.no_grad():
        output, loss_of = forward_step(batches_of(9), job.models[0])
    return float(loss_of(output)[0])


def pop_caches(job: MegatronLoop) -> None:
    for part in job.models[0].modules():
        vars(part).pop("is_first_microbatch", None)


def mark_as_quantized(job: MegatronLoop) -> None:
    next(p for name, p in job.models[0].named_parameters() if ".experts." in name)._quantizer = None


def forget_stage(job: MegatronLoop) -> None:
    for model in job.models:
        for part in model.modules():
            vars(part).pop("vp_stage", None)


def pop_scales(job: MegatronLoop) -> None:
    for leaf in job.optimizer.chained_optimizers:
        vars(leaf.optimizer).pop("_scales", None)


def not_distributed(job: MegatronLoop) -> None:
    options = {**offloaded(1.0), **PLAIN}
    job.__init__(**options)  # type: ignore[misc]


CPU, STREAMS = ("cpu",), ("cpu", "streams")
GROUPED, FP8 = (*STREAMS, "grouped", "adamw_steps"), (*STREAMS, "caching_experts")
OFFLOAD, AWARENESS = ("cpu", "device"), ("cpu", "fused_adam")
KEPT = frozenset({"weight", "exp_avg", "exp_avg_sq", "master_param"})
SCALES = {f"scale of {key}" for key in ("exp_avg", "exp_avg_sq")}
ROWS: dict[str, Row] = {
    # four ways to train, in CI; two ranks if a row does not say otherwise
    "distributed optimizer, all-gather": Row(
        {"moe_token_dispatcher_type": "allgather", **BESIDE, **LOSSES, **BIAS}, CPU, short=True
    ),
    "optimizer of float16, shared experts": Row({**PLAIN, **SHARED, **TOP_3}, CPU, saves=True, short=True),
    "grouped experts": Row({}, GROUPED, saves=True, short=True),
    "divided, an expert cut": Row(CUT, ("cpu", "adamw_steps"), ranks=4, saves=True, short=True),
    "no wrapper, torch's optimizer, three experts a token": Row({"plain": True, "bf16": False, **TOP_3}, CPU),
    # ranks that hold the same experts
    "divided, buckets, gathers beside": Row(LATE, CPU, ranks=4),
    "slime's shape": Row(SLIME, OFFLOAD, ranks=8, steps=3, saves=True, kinds=OFFLOADED),
    # pipeline stages
    "1F1B": Row({**STAGES, "clip_grad": 0.0}, CPU, ranks=4, alone=0.0),
    "interleaved": Row(
        {**INTERLEAVED, **BESIDE, "align": True, **TOP_3}, CPU, ranks=4, refused={forget_stage: "virtual stages"}
    ),
    "a stage without an MoE layer": Row({**STAGES, "moe_layer_freq": [0, 1], "share": True}, CPU, ranks=4),
    # other parallelisms, recompute, precision
    "context parallelism": Row({"context_parallel_size": 2, **TOP_3}, CPU, alone=1e-5),
    "tensor and sequence parallelism": Row(
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1, **TOP_3},
        CPU,
        alone=1e-5,
    ),
    "full recompute, expert bias": Row({**FULL, **BIAS, **TOP_3}, CPU),
    "float16, selective recompute": Row(
        {**FLOAT16, **PLAIN, **TOP_3, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]},
        CPU,
        steps=4,
        alone=1e-5,
    ),
    "frozen experts": Row({"adapts": True, **BESIDE, **TOP_3}, CPU, ranks=4, kinds=frozenset({"weight"})),
    # memory that is freed and loaded between steps, as verl does it around its rollouts
    "phases": Row({"frees": True, **TOP_3}, CPU),
    # optimizers with state in host memory, or in dtypes of its own
    "masters in host memory": Row(
        offloaded(1.0), OFFLOAD, kinds=OFFLOADED, refused={not_distributed: "set use_distributed_optimizer=True"}
    ),
    "divided remainders of masters, moments in bfloat16": Row(
        {**aware(torch.bfloat16), "num_moe_experts": 6, "moe_ffn_hidden_size": 40},
        AWARENESS,
        ranks=4,
        kinds=KEPT | SCALES,
        refused={pop_scales: "in another way than TransformerEngine's FusedAdam"},
    ),
    "masters and moments in float16": Row(
        {**aware(torch.float16, main_params_dtype=torch.float16), **BESIDE},
        AWARENESS,
        kinds=KEPT | SCALES | {"scale of master_param"},
    ),
    # capacity, dispatchers
    "tokens over the capacity dropped": Row({"moe_expert_capacity_factor": 1.0, **FULL, **PLAIN, **TOP_3}, CPU),
    "overlapped shared experts": Row({**SHARED, "moe_shared_expert_overlap": True, **TOP_3}, STREAMS),
    "flex, deepep": Row(
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep", "moe_router_dtype": "fp32"},
        (*STREAMS, "flex"),
    ),
    "all-gather, three experts a token": Row(
        {"moe_token_dispatcher_type": "allgather", "bf16": False, **PLAIN, **TOP_3, "stepped": {"optimizer": "sgd"}},
        CPU,
        kinds=frozenset({"weight", "param", "momentum_buffer"}),
        close=1e-4,  # it adds up by slot
    ),
    # one micro-batch forward beside another backward
    "overlap": Row({**OVERLAP, **BESIDE, **TOP_3}, STREAMS),
    "overlap, interleaved": Row({**OVERLAP, **INTERLEAVED, **TOP_3}, STREAMS, ranks=4),
    # weights of bfloat16 that are kept quantized
    "fp8, blockwise": Row(
        {"fp8": "e4m3", "fp8_recipe": "blockwise"},
        FP8,
        more=by_hand,
        refused={pop_caches: "has no is_first_microbatch", mark_as_quantized: "FP8 themselves"},
    ),
}


@pytest.mark.parametrize("name", rows_of(ROWS, *(name for name, row in ROWS.items() if row.short)))
def test_experts_move_and_no_bit_changes(name: str) -> None:
    assert_moved_without_a_change(ROWS[name], traces(__name__, name))


def test_expert_work_is_measured_between_megatrons_own_dispatch_and_combine() -> None:
    for name in ("distributed optimizer, all-gather", "grouped experts"):
        assert all("measured" in found["moving"].sources for found in traces(__name__, name))


@pytest.mark.long
def test_the_bias_of_experts_follows_the_load_of_all_steps() -> None:
    moving = [found["moving"] for found in traces(__name__, "full recompute, expert bias")]
    load_SLE = torch.tensor(moving[0].load)
    wanted_LE = UPDATE * (load_SLE.float().mean(dim=-1, keepdim=True) - load_SLE).sign().sum(dim=0)
    biases = {key[2]: tensor for key, tensor in whole(moving).items() if key[0] == "dense" and "expert_bias" in key[2]}
    assert len(biases) == 2 and wanted_LE.count_nonzero() > 0
    for name, wanted in zip(sorted(biases), wanted_LE, strict=True):
        assert torch.equal(biases[name], wanted), name


def decided_without_memory(rank: int) -> dict[str, Any]:
    """What a decision says while weights have no memory on one rank, and whether experts move later."""
    standins.cpu()
    job = MegatronLoop(**TOP_3)
    balancer = attached(job, move=True, interval=2)
    memory = standins.Memory(job.models[0], job.optimizer)
    job.train(range(1))
    before, events = moved_by(balancer), len(list(balancer.events))
    if rank == 1:
        memory.free()
    has_moved = balancer.rebalance()
    if rank == 1:
        memory.load()
    said = [repr(event) for event in list(balancer.events)[events:]]
    stayed = not has_moved and moved_by(balancer) == before
    job.train(range(1, 4))
    later = moved_by(balancer) - before
    balancer.close()
    return {"stayed": stayed, "said": said, "later": later}


@pytest.mark.long
def test_a_decision_while_weights_have_no_memory_moves_nothing_and_says_so() -> None:
    for found in run_ranks(2, decided_without_memory):
        assert found["stayed"] and found["later"] > 0, "once they are loaded, experts move"
        assert any("its memory is freed or of another size" in event for event in found["said"]), found["said"]


def reduced_without_a_wrapper(rank: int) -> float:
    standins.cpu()
    job, first = MegatronLoop(plain=True, bf16=False), rank // 2 * 2
    ranks = eplb.hosts.Ranks(ep=(first, first + 1), gradient_divisor=1)
    config = eplb.BalancerConfig(policy="static", dense_gradients="allreduce")
    balancer = eplb.attach(job.models[0], job.optimizer, ranks=ranks, config=config)
    output, loss_of = forward_step(batches_of(0), job.models[0])
    loss_of(output)[0].backward()
    balancer.reduce_gradients()
    balancer.close()
    return sum(p.grad.norm().item() for p in job.models[0].parameters() if p.grad is not None)


@pytest.mark.long
def test_nobody_else_sums_gradients_of_a_model_without_megatrons_wrapper() -> None:
    first, second, *others = run_ranks(4, reduced_without_a_wrapper)
    assert others == [first, second]
