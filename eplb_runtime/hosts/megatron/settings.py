"""Settings of a Megatron job that decide whether it can be balanced, by Megatron's own names, and the rules on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..settings import Emulated, Exact, HostRules, Rule, Unresolved, copies_of_experts, given_or_default

VERSION = "Megatron-Core 0.16.1 to 0.19.2"
"""Versions whose defaults these are; settings that an older one lacks are off there."""
EXACT_BY_ITSELF = 2
"""Experts a token: the sum of two does not depend on their order."""
WHOLE_LAYER = "full"
"""Megatron's word for a CUDA graph of all that a layer does."""
WITHOUT_EXPERTS = frozenset(("attn", "mamba", "mlp", "moe_router", "moe_preprocess"))
"""Parts of a model that Megatron captures as CUDA graphs and that hold no expert; ``mlp`` is that of dense layers."""
NO_EXPERTS_LAYERS = frozenset(
    (
        *("linear_qkv", "linear_proj", "linear_q", "linear_k", "linear_v", "linear_q_proj", "linear_q_down_proj"),
        *("linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "in_proj", "out_proj"),
    )
)
"""Linear layers of Megatron's attention and Mamba, by the names that adapters are given to."""
SCALED_NOW = ("tensorwise", "blockwise", "mxfp8")
"""FP8 recipes whose scales come from the numbers of each expert by itself; nothing is kept between steps."""
FLEX_BACKENDS = ("deepep", "hybridep")
DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Settings of a precision-aware optimizer; what it keeps as float16 has one scale for each tensor, and fp8 is uint8."""
LAYER_WISE = "dist_muon"
"""Muon with whole tensors assigned to ranks (``use_layer_wise_distributed_optimizer``, by its old name)."""
MUON = ("muon", LAYER_WISE)
EXACT_IN_ONE_SUM = 2
"""Ranks that hold the same experts: the sum of two gradients does not depend on their order."""


@dataclass(frozen=True)
class MegatronJobSettings:
    """Settings of a job, by the names of Megatron's configs, with their defaults. Any may be `Unresolved`.

    Args:
        expert_tensor_parallel_size: ranks that share an expert; Megatron's default is the tensor-parallel size.
        expert_data_parallel_size: ranks that hold the same experts (EDP), of the world's size.
        cuda_graph_modules: names with commas between them, or "full"; ``cuda_graph_scope`` before 0.19.
        saves_by_place: checkpoints keep the distributed optimizer's state by its place in buffers, as Megatron-LM's
            flags have it by default; only a command line says so.
        phase_offload: the job frees weights or optimizer state between phases; verl does, Megatron has no such setting.
        lora: adapters are trained; likewise.
        lora_target_modules: names of the layers that have them, with commas; Megatron-Bridge's default.
        assumed: fields that have their default, which nobody has given.
    """

    num_moe_experts: int | Unresolved | None = None
    moe_router_topk: int | Unresolved = 2
    tensor_model_parallel_size: int | Unresolved = 1
    pipeline_model_parallel_size: int | Unresolved = 1
    context_parallel_size: int | Unresolved = 1
    expert_model_parallel_size: int | Unresolved = 1
    expert_tensor_parallel_size: int | Unresolved = 1
    tensor_parallel_num_weight_shards: int | Unresolved | None = None
    expert_tensor_parallel_num_weight_shards: int | Unresolved | None = None
    expert_data_parallel_size: int | Unresolved = field(default_factory=lambda: Unresolved("ranks of the job"))
    moe_token_dispatcher_type: str | Unresolved = "allgather"
    moe_flex_dispatcher_backend: str | Unresolved = "deepep"
    moe_permute_fusion: bool | Unresolved = False
    moe_pad_expert_input_to_capacity: bool | Unresolved = False
    moe_expert_rank_capacity_factor: float | Unresolved | None = None
    moe_single_grouped_weight: bool | Unresolved = False
    moe_use_legacy_grouped_gemm: bool | Unresolved = False
    overlap_dispatch_backward_with_experts_wgrad: bool | Unresolved = False
    gradient_accumulation_fusion: bool | Unresolved = False
    overlap_grad_reduce: bool | Unresolved = False
    mtp_detach_heads: bool | Unresolved = False
    optimizer_cuda_graph: bool | Unresolved = False
    overlap_moe_expert_parallel_comm: bool | Unresolved = False
    cuda_graph_impl: str | Unresolved = "none"
    cuda_graph_modules: str | Unresolved = WHOLE_LAYER
    bf16: bool | Unresolved = False
    fp16: bool | Unresolved = False
    fp8: str | Unresolved | None = None
    fp8_recipe: str | Unresolved = "delayed"
    fp8_param: bool | Unresolved = False
    fp8_param_gather: bool | Unresolved = False
    moe_router_padding_for_quantization: bool | Unresolved = False
    fp4: str | Unresolved | None = None
    optimizer: str | Unresolved = "adam"
    optimizer_cpu_offload: bool | Unresolved = False
    optimizer_offload_fraction: float | Unresolved = 0.0
    use_precision_aware_optimizer: bool | Unresolved = False
    main_params_dtype: str | Unresolved = "float32"
    exp_avg_dtype: str | Unresolved = "float32"
    exp_avg_sq_dtype: str | Unresolved = "float32"
    use_distributed_optimizer: bool | Unresolved = False
    num_distributed_optimizer_instances: int | Unresolved = 1
    overlap_param_gather_with_optimizer_step: bool | Unresolved = False
    use_megatron_fsdp: bool | Unresolved = False
    saves_by_place: bool | Unresolved = field(default=False, compare=False)
    phase_offload: bool | Unresolved = False
    lora: bool | Unresolved = False
    lora_target_modules: str | Unresolved = "linear_qkv,linear_proj,linear_fc1,linear_fc2"
    assumed: tuple[str, ...] = field(default=(), compare=False)


def settings_of(options: Mapping[str, Any]) -> MegatronJobSettings:
    """Settings of options by Megatron's names; absent ones and None have Megatron's default.

    Args:
        options: also ``world_size``, the ranks of the job, where it is known.
    """
    by_old_names = options.get("enable_cuda_graph") or options.get("external_cuda_graph")
    if by_old_names and options.get("cuda_graph_impl", "none") == "none":
        implementation = "transformer_engine" if options.get("external_cuda_graph") else "local"
        options = {**options, "cuda_graph_impl": implementation}
    options = {**options, "cuda_graph_modules": _graph_modules(options)}
    recipe = options.get("fp8_recipe")
    if recipe is not None and not isinstance(recipe, Unresolved):
        options["fp8_recipe"] = str(getattr(recipe, "value", recipe))
    if options.get("moe_router_padding_for_fp8"):  # its name before
        options["moe_router_padding_for_quantization"] = options["moe_router_padding_for_fp8"]
    targets = options.get("lora_target_modules")
    if targets is not None and not isinstance(targets, Unresolved):
        options["lora_target_modules"] = _names(targets)
    if options.get("optimizer") == "muon" and options.get("use_layer_wise_distributed_optimizer"):
        options["optimizer"] = LAYER_WISE
    options |= {name: _dtype(options[name]) for name in DTYPES if options.get(name) is not None}
    given, assumed = given_or_default(MegatronJobSettings, options)
    settings = MegatronJobSettings(**given, assumed=assumed)
    ranks = options.get("world_size")
    if "expert_tensor_parallel_size" not in given:
        settings = replace(settings, expert_tensor_parallel_size=_expert_tensor_ranks(settings, ranks))
    if "expert_data_parallel_size" not in given:
        known = tuple(name for name in assumed if name != "expert_data_parallel_size")
        settings = replace(settings, expert_data_parallel_size=_expert_data_ranks(settings, ranks), assumed=known)
    return settings


def _graph_modules(options: Mapping[str, Any]) -> str | Unresolved | None:
    """Of either name, and in any of the forms that Megatron takes; None: not given."""
    given = options.get("cuda_graph_modules")
    if given is None or _names(given) == WHOLE_LAYER:
        given = options.get("cuda_graph_scope", given)
    return given if given is None or isinstance(given, Unresolved) else _names(given)


def _names(modules: Any) -> str:
    """Return names out of a text with commas, or of texts or enumerators in a list; an empty list is a whole layer."""
    if isinstance(modules, Unresolved):
        return str(modules)
    each = modules.strip("[]").split(",") if isinstance(modules, str) else modules
    each = each if isinstance(each, list | tuple) else [each]
    return ",".join(sorted(str(getattr(one, "name", one)).strip(" '\"") for one in each)) or WHOLE_LAYER


def _dtype(given: Any) -> str | Unresolved:
    """A dtype's name in torch, of the dtype, of that name or of Megatron's flag."""
    if isinstance(given, Unresolved):
        return given
    name = str(given).removeprefix("torch.")
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}.get(name, name)


def graphs_preprocessing(config: Any) -> bool:
    """Return whether a CUDA graph holds the preprocessing ahead of the experts: ``config`` has Megatron's names."""
    if getattr(config, "cuda_graph_impl", "none") != "transformer_engine":
        return False
    given = {name: getattr(config, name, None) for name in ("cuda_graph_modules", "cuda_graph_scope")}
    return "moe_preprocess" in str(_graph_modules(given)).split(",")


def live_settings(
    config: Mapping[str, Any], ddp_config: Mapping[str, Any], optimizer_config: Mapping[str, Any], *, world_size: int
) -> MegatronJobSettings:
    """Settings of a live job.

    Args:
        config: fields of Megatron's TransformerConfig.
        ddp_config, optimizer_config: of its DistributedDataParallelConfig and OptimizerConfig; empty: there is none.
    """
    options: dict[str, Any] = {}
    for one in (ddp_config, optimizer_config, config):
        options |= {name: value for name, value in one.items() if value is not None}
    return settings_of({**options, "world_size": world_size, "phase_offload": Unresolved("seen in a recipe alone")})


def _expert_tensor_ranks(settings: MegatronJobSettings, ranks: Any) -> int | Unresolved:
    """The tensor-parallel size, or 1 where experts cut so do not fit the ranks of the job."""
    sizes = (
        settings.tensor_model_parallel_size,
        settings.expert_model_parallel_size,
        settings.pipeline_model_parallel_size,
    )
    tensor, expert, stages = sizes
    if isinstance(tensor, Unresolved):
        return tensor
    if isinstance(expert, Unresolved) or isinstance(stages, Unresolved) or not isinstance(ranks, int):
        return tensor
    return tensor if ranks % (tensor * expert * stages) == 0 else 1


def _expert_data_ranks(settings: MegatronJobSettings, ranks: Any) -> int | Unresolved:
    return copies_of_experts(
        ranks,
        settings.expert_tensor_parallel_size,
        settings.expert_model_parallel_size,
        settings.pipeline_model_parallel_size,
    )


def _can_reorder(config: Any) -> bool:
    return config.moe_token_dispatcher_type == "alltoall" and not graphs_preprocessing(config)


def reorders(config: Any) -> bool:
    """Return whether rows are permuted and added in logical order, and travel in that of slots: ``config`` has
    Megatron's names."""
    return config.moe_router_topk > EXACT_BY_ITSELF and _can_reorder(config)


def sums_in_order(config: Any) -> bool:
    """Return whether a token's results are added in an order that no placement changes."""
    return config.moe_router_topk <= EXACT_BY_ITSELF or _can_reorder(config)


def _exact(settings: Any) -> Exact:
    if not sums_in_order(settings):
        return "rounding"
    if settings.optimizer_cpu_offload and 0 < settings.optimizer_offload_fraction < 1:
        return "rounding"  # an expert is stepped on the device in one slot, in host memory in another
    return "bit" if settings.expert_data_parallel_size <= EXACT_IN_ONE_SUM else "rounding"


def _is_aware_on_device(job: Any) -> bool:
    return bool(job.use_precision_aware_optimizer and not job.optimizer_cpu_offload)


def _fp8_moments(dtype: str) -> Rule:
    return Rule(
        dtype,
        lambda job: _is_aware_on_device(job) and getattr(job, dtype) == "uint8",
        "moments in FP8 are objects of TransformerEngine's, which cannot be moved yet",
        f"set {dtype} to bf16, fp16 or fp32",
    )


def _scale_of_a_range(dtype: str) -> Rule:
    return Rule(
        dtype,
        lambda job: (
            _is_aware_on_device(job)
            and getattr(job, dtype) == "float16"
            and job.use_distributed_optimizer
            and job.expert_data_parallel_size > 1
        ),
        "float16 has one scale for what a rank keeps of an expert, and other ranks would keep other parts of it",
        f"set {dtype} to bf16 or fp32, or optimizer_cpu_offload=True",
    )


def _weight_shards(setting: str, of_tensors: str) -> Rule:
    return Rule(
        setting,
        lambda job: getattr(job, setting) is not None and getattr(job, setting) > getattr(job, of_tensors),
        "weights that are cut over ranks and gathered to compute have not been run",
        f"leave {setting} out",
    )


RULES = (
    Rule(
        "expert_tensor_parallel_size",
        lambda job: job.expert_tensor_parallel_size > 1,
        "an expert that is cut over tensor-parallel ranks is not supported",
        "set expert_tensor_parallel_size=1",
    ),
    _weight_shards("tensor_parallel_num_weight_shards", "tensor_model_parallel_size"),
    _weight_shards("expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"),
    Rule(
        "expert_model_parallel_size",
        lambda job: job.expert_model_parallel_size == 1 and job.pipeline_model_parallel_size > 1,
        "each rank holds all experts of its stage: none can move",
        "spread the experts over ranks, or train without the balancer",
    ),
    Rule(
        "moe_flex_dispatcher_backend",
        lambda job: job.moe_token_dispatcher_type == "flex" and job.moe_flex_dispatcher_backend not in FLEX_BACKENDS,
        "nothing has been run with it",
        f"set moe_flex_dispatcher_backend to {' or '.join(FLEX_BACKENDS)}",
    ),
    Rule(
        "cuda_graph_impl",
        lambda job: job.cuda_graph_impl not in ("none", "transformer_engine"),
        "its CUDA graphs may hold experts, which move, or the end of their layer",
        "set cuda_graph_impl='transformer_engine', with cuda_graph_modules of parts without experts",
    ),
    Rule(
        "cuda_graph_modules",
        lambda job: (
            job.cuda_graph_impl == "transformer_engine"
            and not WITHOUT_EXPERTS.issuperset(job.cuda_graph_modules.split(","))
        ),
        "a CUDA graph of whole MoE layers holds experts, which move",
        f"name parts without experts ({', '.join(sorted(WITHOUT_EXPERTS))})",
    ),
    Rule(
        "optimizer_cuda_graph",
        lambda job: job.optimizer_cuda_graph,
        "CUDA graphs are not supported yet",
        "set optimizer_cuda_graph=False",
    ),
    Rule(
        "fp8_recipe",
        lambda job: job.fp8 is not None and job.fp8_recipe not in SCALED_NOW,
        "its scales come from the largest numbers of earlier steps, taken over ranks that hold other experts",
        f"set fp8_recipe to {', '.join(SCALED_NOW)}",
    ),
    Rule(
        "fp8_param_gather",
        lambda job: job.fp8 is not None and (job.fp8_param_gather or job.fp8_param),
        "weights that are FP8 themselves cannot be moved yet",
        "set fp8_param_gather=False",
    ),
    Rule("fp4", lambda job: job.fp4 is not None, "FP4 is not supported yet", "leave fp4 out"),
    Rule(
        "moe_pad_expert_input_to_capacity",
        lambda job: job.moe_pad_expert_input_to_capacity,
        "every expert gets equally many rows: nothing to balance",
        "set moe_pad_expert_input_to_capacity=False",
    ),
    Rule(
        "moe_expert_rank_capacity_factor",
        lambda job: job.moe_expert_rank_capacity_factor is not None,
        "a rank drops the tokens that are too many for it: which ones would depend on where experts are",
        "leave moe_expert_rank_capacity_factor out",
    ),
    Rule(
        "moe_single_grouped_weight",
        lambda job: job.moe_single_grouped_weight,
        "experts must be one tensor of each kind for each expert",
        "set moe_single_grouped_weight=False",
    ),
    Rule(
        "moe_use_legacy_grouped_gemm",
        lambda job: job.moe_use_legacy_grouped_gemm,
        "its experts are one tensor of each kind for all experts of a rank",
        "set moe_use_legacy_grouped_gemm=False",
    ),
    Rule(
        "gradient_accumulation_fusion",
        lambda job: job.overlap_dispatch_backward_with_experts_wgrad and not job.gradient_accumulation_fusion,
        "with overlap_dispatch_backward_with_experts_wgrad Megatron's DistributedDataParallel would add up gradients "
        "of experts that are not computed yet",
        "set gradient_accumulation_fusion=True, or overlap_dispatch_backward_with_experts_wgrad=False",
    ),
    Rule(
        "overlap_grad_reduce",
        lambda job: job.overlap_dispatch_backward_with_experts_wgrad and job.overlap_grad_reduce,
        "with overlap_dispatch_backward_with_experts_wgrad Megatron's DistributedDataParallel would scale and reduce "
        "gradients of experts before they are computed",
        "set overlap_grad_reduce=False, or overlap_dispatch_backward_with_experts_wgrad=False",
    ),
    Rule(
        "mtp_detach_heads",
        lambda job: job.mtp_detach_heads,
        "experts of MTP layers are clipped by a norm of their own, which would depend on where they are",
        "leave mtp_detach_heads out",
    ),
    Rule(
        "optimizer",
        lambda job: job.optimizer not in ("adam", "sgd", *MUON),
        "its state of an expert cannot be moved yet",
        "set optimizer='adam', 'sgd' or 'muon'",
    ),
    Rule(
        "optimizer",
        lambda job: job.optimizer == LAYER_WISE and job.expert_data_parallel_size > 1,
        "what steps an expert is one of the ranks that hold it, which depends on where it is",
        "set optimizer='muon', without use_layer_wise_distributed_optimizer (without --use-distributed-optimizer)",
    ),
    Rule(
        "bf16",
        lambda job: job.optimizer == LAYER_WISE and not job.bf16,
        "Megatron's layer-wise optimizer itself steps bf16 alone",
        "set bf16=True, or optimizer='muon' without use_layer_wise_distributed_optimizer (without "
        "--use-distributed-optimizer)",
    ),
    Rule(
        "use_distributed_optimizer",
        lambda job: job.use_distributed_optimizer and job.optimizer in MUON,
        "Muon on Megatron's shards of buffers has not been run",
        "set use_distributed_optimizer=False",
    ),
    Rule(
        "optimizer_cpu_offload",
        lambda job: job.optimizer_cpu_offload and not job.use_distributed_optimizer and (job.bf16 or job.fp16),
        "Megatron itself cannot step bf16 or fp16 so without the distributed optimizer",
        "set use_distributed_optimizer=True, or optimizer_cpu_offload=False",
    ),
    *map(_fp8_moments, DTYPES[1:]),
    *map(_scale_of_a_range, DTYPES),
    Rule(
        "num_distributed_optimizer_instances",
        lambda job: job.num_distributed_optimizer_instances > 1,
        "several instances of the distributed optimizer are not supported",
        "set num_distributed_optimizer_instances=1",
    ),
    Rule(
        "overlap_param_gather_with_optimizer_step",
        lambda job: job.overlap_param_gather_with_optimizer_step,
        "an optimizer for each model chunk is not supported",
        "set overlap_param_gather_with_optimizer_step=False",
    ),
    Rule(
        "saves_by_place",
        lambda job: job.saves_by_place and job.use_distributed_optimizer,
        "--save keeps the optimizer's state by its place in buffers, which does not say of which expert it is",
        "give --dist-ckpt-optim-fully-reshardable, and no --ckpt-format torch (or --no-save-optim)",
    ),
    Rule(
        "use_megatron_fsdp",
        lambda job: job.use_megatron_fsdp,
        "experts that Megatron's FSDP cuts are not supported",
        "set use_megatron_fsdp=False",
    ),
    Rule(
        "lora",
        lambda job: job.lora and not NO_EXPERTS_LAYERS.issuperset(job.lora_target_modules.split(",")),
        "one adapter is shared by all experts of a rank: an expert would have another one on another rank",
        f"give adapters to layers without experts alone ({', '.join(sorted(NO_EXPERTS_LAYERS))})",
    ),
    Rule(
        "replica_slots",
        lambda job: True,
        "its dispatchers know one place for an expert",
        "use replica_slots=0",
        replicas_only=True,
    ),
)
"""What Megatron jobs are refused for; one entry for each class of settings."""

EMULATED = (
    Emulated(
        "moe_token_dispatcher_type",
        lambda job: job.moe_token_dispatcher_type == "flex",
        "exchanges of torch.distributed that do what DeepEP's and HybridEP's do",
    ),
    Emulated(
        "overlap_moe_expert_parallel_comm",
        lambda job: job.overlap_moe_expert_parallel_comm,
        "streams and events of CUDA where everything is done when it returns",
    ),
    Emulated(
        "overlap_dispatch_backward_with_experts_wgrad",
        lambda job: job.overlap_dispatch_backward_with_experts_wgrad,
        "grouped layers in torch that leave their weights' gradients for later as TransformerEngine's do",
    ),
    Emulated(
        "moe_permute_fusion",
        lambda job: job.moe_permute_fusion and reorders(job),
        "permutations in torch that do what TransformerEngine's fused ones do",
    ),
    Emulated(
        "cuda_graph_modules",
        lambda job: job.cuda_graph_impl != "none",
        "captured operators that are run again on the captured memory, for CUDA graphs",
    ),
    Emulated(
        "fp8",
        lambda job: job.fp8 is not None,
        "grouped layers in torch that quantize and cache weights as TransformerEngine's do",
    ),
    Emulated(
        "use_precision_aware_optimizer",
        lambda job: _is_aware_on_device(job),
        "an optimizer in torch with the state and accessors of TransformerEngine's FusedAdam",
    ),
)
"""Settings that attach, run on a CPU with something else in the place of what a GPU or TransformerEngine has."""

HOST = HostRules(
    VERSION,
    settings_of,
    RULES,
    _exact,
    (
        "experts are one tensor of each kind for each expert (SequentialMLP, TEGroupedMLP)",
        "the model is wrapped in Megatron's DistributedDataParallel, and the optimizer is Megatron's",
        "the optimizer keeps the whole state of each expert on its rank, or divided over those that hold the same "
        "experts",
        "all MoE layers have one expert-parallel group, with experts in order",
        "virtual pipeline stages say which they are (models made with vp_stage=)",
    ),
    EMULATED,
)
