"""Settings of a Megatron job that the balancer cannot follow, by Megatron's own names, and why."""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

from ..attaching.description import EXACT_BY_ITSELF, EXACT_IN_ONE_SUM, Exact, Refusal

VERSION = "Megatron-Core 0.16.1 to 0.19.2"
"""Versions whose defaults these are; settings that an older one lacks are off there."""
WHOLE_LAYER = "full"  # Megatron's word for a CUDA graph of all that a layer does
WITHOUT_EXPERTS = frozenset(("attn", "mamba", "mlp", "moe_router"))
"""Parts of a model that Megatron captures as CUDA graphs and that hold no expert; ``mlp`` is that of dense layers."""
SCALED_NOW = ("tensorwise", "blockwise", "mxfp8")
"""FP8 recipes whose scales come from the numbers of each expert by itself; nothing is kept between steps."""
FLEX_BACKENDS = ("deepep", "hybridep")
DTYPES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Settings of a precision-aware optimizer; what it keeps as float16 has one scale for each tensor, and fp8 is uint8."""
LAYER_WISE = "dist_muon"
"""Muon with whole tensors assigned to ranks (``use_layer_wise_distributed_optimizer``, by its old name)."""
MUON = ("muon", LAYER_WISE)
MUST_BE_DEFAULT: Mapping[str, tuple[Any, str]] = {
    "expert_tensor_parallel_size": (1, "an expert that is cut over tensor-parallel ranks is not supported"),
    "use_megatron_fsdp": (False, "experts that Megatron's FSDP cuts are not supported"),
    "moe_pad_expert_input_to_capacity": (False, "every expert gets equally many rows: nothing to balance"),
    "moe_expert_rank_capacity_factor": (None, "which tokens a rank drops would depend on where experts are"),
    "moe_single_grouped_weight": (False, "experts must be one tensor of each kind for each expert"),
    "moe_use_legacy_grouped_gemm": (False, "its experts are one tensor of each kind for all experts of a rank"),
    "mtp_detach_heads": (False, "experts of MTP layers are clipped by a norm that would depend on where they are"),
    "optimizer_cuda_graph": (False, "CUDA graphs are not supported yet"),
    "fp4": (None, "FP4 is not supported yet"),
    "overlap_dispatch_backward_with_experts_wgrad": (False, "gradients of experts would come late"),
    "num_distributed_optimizer_instances": (1, "several instances of the distributed optimizer are not supported"),
    "overlap_param_gather_with_optimizer_step": (False, "an optimizer for each model chunk is not supported"),
}
_OFF = (
    *("moe_permute_fusion", "overlap_moe_expert_parallel_comm", "bf16", "fp16", "fp8_param", "fp8_param_gather"),
    *("optimizer_cpu_offload", "use_precision_aware_optimizer", "use_distributed_optimizer"),
)
DEFAULTS: Mapping[str, Any] = {
    **{name: default for name, (default, _) in MUST_BE_DEFAULT.items()},
    **dict.fromkeys(_OFF, False),
    "num_moe_experts": None,
    "moe_router_topk": 2,
    **dict.fromkeys((f"{of}_model_parallel_size" for of in ("tensor", "pipeline", "expert")), 1),
    "tensor_parallel_num_weight_shards": None,
    "expert_tensor_parallel_num_weight_shards": None,
    "moe_token_dispatcher_type": "allgather",
    "moe_flex_dispatcher_backend": "deepep",
    "cuda_graph_impl": "none",
    "cuda_graph_modules": WHOLE_LAYER,  # cuda_graph_scope before 0.19
    "fp8": None,
    "fp8_recipe": "delayed",
    "optimizer": "adam",
    "optimizer_offload_fraction": 0.0,
    **dict.fromkeys(DTYPES, "float32"),
}
OF_RECIPES: Mapping[str, Any] = {
    "expert_data_parallel_size": 1,
    "saves_by_place": False,
    "lora": False,
    "lora_target_modules": "linear_qkv,linear_proj,linear_fc1,linear_fc2",
}
"""No fields of Megatron's configs: ranks that hold the same experts; saves that keep the distributed optimizer's state
by its place in buffers, as Megatron-LM's flags have it by default; adapters, with Megatron-Bridge's layers."""


class Unknown(str):
    """A setting whose value is not known: the value as written, or where it comes from."""


class JobSettings:
    """Settings of a job, by Megatron's names. An `Unknown` one reads as its default, and is put into ``undecided``."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.values = {**defaults, **{name: given[name] for name in defaults if given.get(name) is not None}}
        self.undecided: dict[str, None] = {}
        self._defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "values" or name not in self.values:
            raise AttributeError(name)
        if not isinstance(self.values[name], Unknown):
            return self.values[name]
        self.undecided[name] = None
        return self._defaults[name]


def settings_of(options: Mapping[str, Any]) -> JobSettings:
    """Return `JobSettings` of options as Megatron's configs or flags have them; ``world_size`` tells the EDP size."""
    options = {name: value for name, value in options.items() if value is not None}
    options["cuda_graph_modules"] = _graph_modules(options)
    if "fp8_recipe" in options:
        options["fp8_recipe"] = getattr(options["fp8_recipe"], "value", options["fp8_recipe"])
    if options.get("optimizer") == "muon" and options.get("use_layer_wise_distributed_optimizer"):
        options["optimizer"] = LAYER_WISE
    for name in options.keys() & DTYPES:
        if not isinstance(options[name], Unknown):  # a dtype of torch, its name, or Megatron's flag
            dtype = str(options[name]).removeprefix("torch.")
            options[name] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}.get(dtype, dtype)
    cut = options.setdefault("expert_tensor_parallel_size", options.get("tensor_model_parallel_size", 1))
    each = [options.get(f"{name}_model_parallel_size", 1) for name in ("expert", "pipeline")]
    is_known = all(isinstance(size, int) for size in (options.get("world_size"), cut, *each))
    ranks = options["world_size"] // prod((cut, *each)) if is_known else Unknown("ranks of the job")
    return JobSettings({"expert_data_parallel_size": ranks, **options}, {**DEFAULTS, **OF_RECIPES})


def _graph_modules(options: Mapping[str, Any]) -> str:
    """Return the parts in CUDA graphs with commas, of a text or of texts or enumerators under either name."""
    for name in ("cuda_graph_modules", "cuda_graph_scope"):
        given = options.get(name, "")
        if isinstance(given, Unknown):
            return given
        each = given.strip("[]").split(",") if isinstance(given, str) else given
        each = each if isinstance(each, list | tuple) else [each]
        names = ",".join(sorted(str(getattr(one, "name", one)).strip(" '\"") for one in each))
        if names not in ("", WHOLE_LAYER):
            return names
    return WHOLE_LAYER  # an empty list, too


def reorders(config: Any) -> bool:
    """Return whether rows are permuted and added in logical order, and sent in slot order: all-to-all, top-k > 2."""
    return bool(config.moe_token_dispatcher_type == "alltoall" and config.moe_router_topk > EXACT_BY_ITSELF)


def sums_in_order(config: Any) -> bool:
    """Return whether a token's results are added in an order that no placement changes."""
    return config.moe_router_topk <= EXACT_BY_ITSELF or reorders(config)


def refusals(job: JobSettings) -> Iterator[Refusal]:
    """Yield a `Refusal` for each setting of the job that cannot be balanced."""
    for setting, (default, why) in MUST_BE_DEFAULT.items():
        if getattr(job, setting) != default:
            instead = f"leave {setting} out" if default is None else f"set {setting}={default}"
            yield Refusal(setting, job.values[setting], why, instead)
    for setting, why, instead in (*_of_model(job), *_of_optimizer(job)):
        yield Refusal("--save" if setting == "saves_by_place" else setting, job.values[setting], why, instead)


def _of_model(job: JobSettings) -> Iterator[tuple[str, str, str]]:
    """Yield a setting, the reason, and what to write."""
    if job.expert_model_parallel_size == 1:
        why = "each rank holds all experts of its stage (and before 2026-07-21 Megatron lets them drift apart, #5916)"
        yield "expert_model_parallel_size", why, "spread the experts over ranks, or train without the balancer"
    for kind, cut in (("tensor", job.tensor_model_parallel_size), ("expert_tensor", job.expert_tensor_parallel_size)):
        if (getattr(job, name := f"{kind}_parallel_num_weight_shards") or 0) not in range(cut + 1):
            yield name, "weights that are cut over ranks and gathered to compute have not been run", f"leave {name} out"
    if job.moe_token_dispatcher_type == "flex" and job.moe_flex_dispatcher_backend not in FLEX_BACKENDS:
        yield "moe_flex_dispatcher_backend", "nothing has been run with it", f"set it to {' or '.join(FLEX_BACKENDS)}"
    if job.cuda_graph_impl not in ("none", "transformer_engine"):
        instead = "set cuda_graph_impl='transformer_engine', with cuda_graph_modules of parts without experts"
        yield "cuda_graph_impl", "its CUDA graphs may hold experts, which move, or the end of their layer", instead
    elif job.cuda_graph_impl != "none" and not WITHOUT_EXPERTS.issuperset(job.cuda_graph_modules.split(",")):
        why = "a CUDA graph of moe_preprocess or of whole MoE layers holds where experts are"
        yield "cuda_graph_modules", why, f"name parts without experts ({', '.join(sorted(WITHOUT_EXPERTS))})"
    if job.fp8 is not None and (job.fp8_param_gather or job.fp8_param):
        yield "fp8_param_gather", "weights that are FP8 themselves cannot be moved yet", "set fp8_param_gather=False"
    if job.fp8 is not None and job.fp8_recipe not in SCALED_NOW:
        why = "its scales come from the largest numbers of earlier steps, taken over ranks that hold other experts"
        yield "fp8_recipe", why, f"set fp8_recipe to {', '.join(SCALED_NOW)}"
    if job.lora and any(part in str(job.lora_target_modules) for part in ("fc", "all", "*")):
        why = "one adapter is shared by all experts of a rank: an expert would have another one on another rank"
        yield "lora", why, "give adapters to layers of attention alone, as linear_qkv and linear_proj"


def _of_optimizer(job: JobSettings) -> Iterator[tuple[str, str, str]]:
    if job.optimizer not in ("adam", "sgd", *MUON):
        yield "optimizer", "its state of an expert cannot be moved yet", "set optimizer='adam', 'sgd' or 'muon'"
    if job.optimizer in MUON and job.use_distributed_optimizer:
        why = "Muon on Megatron's shards of buffers has not been run"
        yield "use_distributed_optimizer", why, "set use_distributed_optimizer=False"
    if job.saves_by_place and job.use_distributed_optimizer:
        why = "--save keeps the optimizer's state by its place in buffers, which does not say of which expert it is"
        instead = "give --dist-ckpt-optim-fully-reshardable, and no --ckpt-format torch (or --no-save-optim)"
        yield "saves_by_place", why, instead
    instead = "optimizer='muon', without use_layer_wise_distributed_optimizer (without --use-distributed-optimizer)"
    if job.optimizer == LAYER_WISE and not job.bf16:
        yield "bf16", "Megatron's layer-wise optimizer itself steps bf16 alone", f"set bf16=True, or {instead}"
    if job.optimizer == LAYER_WISE and job.expert_data_parallel_size > 1:
        why = "what steps an expert is one of the ranks that hold it, which depends on where it is"
        yield "optimizer", why, f"set {instead}"
    if job.optimizer_cpu_offload and job.optimizer_offload_fraction not in (0, 1):
        why = "an expert would be stepped on the device in one slot, in host memory in another, which round differently"
        yield "optimizer_offload_fraction", why, "set optimizer_offload_fraction to 1.0 or 0.0"
    for dtype in DTYPES if _is_aware_on_device(job) else ():
        if (kind := getattr(job, dtype)) == "uint8":
            why = "moments in FP8 are objects of TransformerEngine's, which cannot be moved yet"
            yield dtype, why, f"set {dtype} to bf16, fp16 or fp32"
        if kind == "float16" and job.use_distributed_optimizer and job.expert_data_parallel_size > 1:
            why = "float16 has one scale for a rank's part of an expert, and other ranks would keep other parts of it"
            yield dtype, why, f"set {dtype} to bf16 or fp32, or optimizer_cpu_offload=True"


def _is_aware_on_device(job: JobSettings) -> bool:
    return bool(job.use_precision_aware_optimizer and not job.optimizer_cpu_offload)


def exact(job: JobSettings) -> Exact:
    """Return "bit" if training gives the same bits with and without moves, else "rounding"."""
    return "bit" if sums_in_order(job) and job.expert_data_parallel_size <= EXACT_IN_ONE_SUM else "rounding"


NOT_FOR_REAL: Mapping[str, Callable[[JobSettings], bool]] = {
    "moe_token_dispatcher_type": lambda job: job.moe_token_dispatcher_type == "flex",
    "overlap_moe_expert_parallel_comm": lambda job: job.overlap_moe_expert_parallel_comm,
    "cuda_graph_modules": lambda job: job.cuda_graph_impl != "none",
    "fp8": lambda job: job.fp8 is not None,
    "use_precision_aware_optimizer": _is_aware_on_device,
    "moe_permute_fusion": lambda job: job.moe_permute_fusion and reorders(job),
}
"""Settings that were tested with a stand-in alone or not at all, and whether a job uses them."""
