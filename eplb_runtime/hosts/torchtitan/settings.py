"""Settings of a torchtitan job that decide whether it can be balanced, by torchtitan's own names, and the rules over
them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..settings import Emulated, Exact, HostRules, Rule, Unresolved, copies_of_experts, given_or_default

VERSION = "torchtitan 0.3.0"
BACKENDS = {"spmd_types": "2.14", "partial_dtensor": "2.11"}
"""``spmd_backend`` -> the torch that it needs."""
EXACT_IN_ONE_SUM = 2
"""Ranks whose gradients FSDP adds up: the sum of two does not depend on their order."""
EXACT_BY_ITSELF = 2
"""Experts a token whose results DeepEP and HybridEP add up by place, likewise."""
STANDARD = "standard"
OWN_BACKENDS = {
    "deepep": "DeepEPTokenDispatcher",
    "hybridep": "HybridEPTokenDispatcher",
    "minimal_async_ep": "MinimalAsyncEPTokenDispatcher",
}
"""``moe_comm_backend`` -> the dispatcher, where torchtitan's own stays and is given slots in the place of experts."""
NEEDED_TORCH = {"hybridep": "2.14"}
"""``moe_comm_backend`` -> the torch that torchtitan's part for it is imported with."""
_STANDARD_DISPATCHERS = ("AllToAllTokenDispatcher", "TorchAOTokenDispatcher", "LocalTokenDispatcher")


@dataclass(frozen=True)
class TorchtitanJobSettings:
    """Settings of a job, by the names of torchtitan's configs, with their defaults. Any may be `Unresolved`.

    Args:
        expert_data_parallel_size: ranks that hold the same experts, of the world's size.
        top_k: experts a token; of the model, torchtitan has no default.
        moe_comm_backend: the token dispatcher of the model: "standard", one of `OWN_BACKENDS`, or another one's class.
        non_blocking_capacity_factor: of HybridEP; below 1 it drops tokens.
        deterministic: of ``debug``; DeepEP receives tokens in a fixed order.
        compiled: components of the model that are compiled.
        optimizers: names of those that step the model.
        assumed: fields that have their default, which nobody has given.
    """

    num_experts: int | Unresolved | None = None
    top_k: int | Unresolved = field(default_factory=lambda: Unresolved("of the model's own config"))
    expert_parallel_degree: int | Unresolved = 1
    tensor_parallel_degree: int | Unresolved = 1
    pipeline_parallel_degree: int | Unresolved = 1
    context_parallel_degree: int | Unresolved = 1
    data_parallel_replicate_degree: int | Unresolved = 1
    expert_data_parallel_size: int | Unresolved = field(default_factory=lambda: Unresolved("ranks of the job"))
    spmd_backend: str | Unresolved = "spmd_types"
    moe_comm_backend: str | Unresolved = STANDARD
    non_blocking_capacity_factor: float | Unresolved | None = None
    disable_cuda_graphs: bool | Unresolved = False
    deterministic: bool | Unresolved = False
    compiled: Sequence[str] | Unresolved = ()
    optimizers: Sequence[str] | Unresolved = ("AdamW",)
    lora: bool | Unresolved = False
    assumed: tuple[str, ...] = field(default=(), compare=False)


def settings_of(options: Mapping[str, Any]) -> TorchtitanJobSettings:
    """Settings of options by torchtitan's names; absent ones and None have torchtitan's default.

    Args:
        options: also ``world_size``, the ranks of the job, where it is known.
    """
    given, assumed = given_or_default(TorchtitanJobSettings, options)
    settings = TorchtitanJobSettings(**given, assumed=assumed)
    if "expert_data_parallel_size" in given:
        return settings
    known = tuple(name for name in assumed if name != "expert_data_parallel_size")
    copies = copies_of_experts(
        options.get("world_size"), settings.pipeline_parallel_degree, settings.expert_parallel_degree
    )
    return replace(settings, expert_data_parallel_size=copies, assumed=known)


def backend_of(dispatchers: Iterable[Any]) -> str:
    """``moe_comm_backend`` of a model whose layers have these configs of dispatchers; other names where one is not
    known, or several are mixed."""
    names = {type(one).__qualname__.removesuffix(".Config").rpartition(".")[2] for one in dispatchers}
    found = {STANDARD if name in _STANDARD_DISPATCHERS else name for name in names}
    named = {name: backend for backend, name in OWN_BACKENDS.items()}
    return " and ".join(sorted(named.get(name, name) for name in found)) or STANDARD


def _captures(settings: Any) -> bool:
    """Whether torchtitan makes CUDA graphs of forward and backward; with other dispatchers it refuses that itself."""
    backend = settings.moe_comm_backend
    without_waits = backend == "minimal_async_ep" or (
        backend == "hybridep" and settings.non_blocking_capacity_factor is not None
    )
    return without_waits and not settings.disable_cuda_graphs


def _exact(settings: Any) -> Exact:
    backend = settings.moe_comm_backend
    if backend in ("deepep", "hybridep") and settings.top_k > EXACT_BY_ITSELF:
        return "rounding"
    if backend == "deepep" and not settings.deterministic:
        return "rounding"
    replicated = settings.data_parallel_replicate_degree
    sharded = settings.expert_data_parallel_size // replicated
    return "bit" if max(sharded, replicated) <= EXACT_IN_ONE_SUM else "rounding"


SPMD_RULES = (
    Rule(
        "spmd_backend",
        lambda job: job.spmd_backend not in BACKENDS,
        f"tried with {' and '.join(BACKENDS)} alone",
        "set parallelism.spmd_backend='spmd_types', torchtitan's default",
    ),
)
"""Applied before torchtitan parallelizes a model, too."""

RULES = (
    Rule(
        "expert_parallel_degree",
        lambda job: job.expert_parallel_degree == 1,
        "every rank has all experts, nothing to balance",
        "set parallelism.expert_parallel_degree",
    ),
    *SPMD_RULES,
    Rule(
        "compiled",
        lambda job: any(part != "loss" for part in job.compiled),
        "a block is compiled as one graph, and a batch meets other ranks in the middle of it",
        "leave 'model' out of compile.components, or set compile.enable=False",
    ),
    Rule(
        "moe_comm_backend",
        lambda job: job.moe_comm_backend not in (STANDARD, *OWN_BACKENDS),
        "nothing has been run with it",
        f"choose the model with moe_comm_backend='standard', or one of {', '.join(OWN_BACKENDS)}",
    ),
    Rule(
        "non_blocking_capacity_factor",
        lambda job: (
            job.moe_comm_backend == "hybridep"
            and job.non_blocking_capacity_factor is not None
            and job.non_blocking_capacity_factor < 1
        ),
        "HybridEP drops tokens of a rank that receives many, so which ones would follow the placement",
        "set it to 1.0, or to None",
    ),
    Rule(
        "disable_cuda_graphs",
        _captures,
        "a CUDA graph of forward and backward would begin no forward when it is replayed, and nothing would be counted",
        "set training.disable_cuda_graphs",
    ),
    Rule(
        "optimizers",
        lambda job: any("muon" in name.lower() for name in job.optimizers),
        "it multiplies the experts of a rank as one batch on a GPU, and no test shows that an expert's update has the "
        "same bits at another place in the batch",
        "use AdamW",
    ),
    Rule("lora", lambda job: job.lora, "adapters of experts are not supported", "train the experts themselves"),
    Rule(
        "moe_comm_backend",
        lambda job: job.moe_comm_backend in OWN_BACKENDS,
        "its dispatcher knows one place for an expert",
        "set replica_slots=0, or choose the model with moe_comm_backend='standard'",
        replicas_only=True,
    ),
    Rule(
        "pipeline_parallel_degree",
        lambda job: job.pipeline_parallel_degree > 1,
        "copies of experts are not there for it yet",
        "set replica_slots=0",
        replicas_only=True,
    ),
    Rule(
        "tensor_parallel_degree",
        lambda job: job.tensor_parallel_degree > 1,
        "copies of experts are not there for it yet",
        "set replica_slots=0",
        replicas_only=True,
    ),
)
"""What torchtitan jobs are refused for; one entry for each class of settings."""

EMULATED = (
    Emulated(
        "moe_comm_backend",
        lambda job: job.moe_comm_backend in ("deepep", "hybridep"),
        "buffers over torch.distributed that do what deep_ep's ElasticBuffer and HybridEPBuffer do",
    ),
    Emulated(
        "moe_comm_backend",
        lambda job: job.moe_comm_backend == "minimal_async_ep",
        "its own operators, with memory that processes share and kernels in torch in the place of a GPU's",
    ),
)
"""Settings that attach, run on a CPU with something else in the place of what a GPU or deep_ep has."""

HOST = HostRules(
    VERSION,
    settings_of,
    RULES,
    _exact,
    (
        "spmd_backend='spmd_types', torchtitan's default, and moe_comm_backend='hybridep' have torch 2.14 or newer",
        "the overrides, pipelining_fn and post_optimizer_build_fn that balance() sets are in the config",
        "each rank holds whole experts, equally many",
        "with replica slots: the ranks that hold the same experts divide dimension 1 of their tensors",
        "deepep, hybridep, minimal_async_ep: a batch sent through the dispatcher comes to its slots and back",
    ),
    EMULATED,
)
