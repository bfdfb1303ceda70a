"""Settings of a torchtitan job that the balancer cannot follow, by torchtitan's own names, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..settings import Exact, JobSettings, Refusal, Unknown, ranks_of_an_expert, refuse

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
DEFAULTS: Mapping[str, Any] = {
    "num_experts": None,
    "top_k": Unknown("of the model's own config"),  # torchtitan has no default
    "expert_parallel_degree": 1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "data_parallel_replicate_degree": 1,
    "expert_data_parallel_size": Unknown("ranks of the job"),  # ranks that hold the same experts
    "spmd_backend": "spmd_types",
    "moe_comm_backend": STANDARD,
    "non_blocking_capacity_factor": None,  # of HybridEP; below 1 it drops tokens
    "disable_cuda_graphs": False,
    "deterministic": False,  # of debug; DeepEP receives tokens in a fixed order
    "compiled": (),  # components of the model
    "optimizers": ("AdamW",),
    "lora": False,
}
"""torchtitan's own, of the settings that are read here."""


def settings_of(options: Mapping[str, Any]) -> JobSettings:
    """Return settings of options by torchtitan's names; ``world_size`` too, if known."""
    sizes = (options.get(name) or 1 for name in ("pipeline_parallel_degree", "expert_parallel_degree"))
    ranks = ranks_of_an_expert(options.get("world_size"), *sizes)
    return JobSettings({"expert_data_parallel_size": ranks, **options}, DEFAULTS)


def backend_of(dispatchers: Iterable[Any]) -> str:
    """Return ``moe_comm_backend`` of these configs of dispatchers; other names where it is not known."""
    names = {type(one).__qualname__.removesuffix(".Config").rpartition(".")[2] for one in dispatchers}
    found = {STANDARD if name in _STANDARD_DISPATCHERS else name for name in names}
    named = {name: backend for backend, name in OWN_BACKENDS.items()}
    return " and ".join(sorted(named.get(name, name) for name in found)) or STANDARD


def notes(job: Any) -> Iterator[str]:
    """Yield lines that say what makes bits depend on where experts are."""
    backend = job.moe_comm_backend
    if backend in ("deepep", "hybridep") and job.top_k > EXACT_BY_ITSELF:
        yield (
            f"moe_comm_backend='{backend}' adds up the results of a token's {job.top_k} experts in an order that "
            "depends on where they are: with experts moved, training is equal to rounding, not to the bit"
        )
    if backend == "deepep" and not job.deterministic:
        yield (
            "DeepEP receives tokens in any order unless debug.deterministic is set: no two trainings are equal to the "
            "bit, with experts moved or not"
        )
    replicated = job.data_parallel_replicate_degree
    if (added_up := max(job.expert_data_parallel_size // replicated, replicated)) > EXACT_IN_ONE_SUM:
        yield (
            f"FSDP adds up gradients of experts over {added_up} ranks, perhaps in an order that follows a row's place: "
            "results with other placements are equal to rounding; with at most 2 they are to the bit"
        )


def exact(job: Any) -> Exact:
    """Return how equal training with and without moves is."""
    return "rounding" if any(notes(job)) else "bit"


def check_spmd_backend(job: Any) -> Iterator[Refusal]:
    """Needed before torchtitan parallelizes a model, too."""
    if job.spmd_backend not in BACKENDS:
        why = f"tried with {' and '.join(BACKENDS)} alone"
        yield refuse(job, "spmd_backend", why, "set parallelism.spmd_backend='spmd_types', torchtitan's default")


def _parallelism(job: Any) -> Iterator[Refusal]:
    if job.expert_parallel_degree == 1:
        why = "every rank has all experts, nothing to balance"
        yield refuse(job, "expert_parallel_degree", why, "set parallelism.expert_parallel_degree")
    if any(part != "loss" for part in job.compiled):
        why = "a block is compiled as one graph, and a batch meets other ranks in the middle of it"
        yield refuse(job, "compiled", why, "leave 'model' out of compile.components, or set compile.enable=False")


def _dispatcher(job: Any) -> Iterator[Refusal]:
    backend = job.moe_comm_backend
    if backend not in (STANDARD, *OWN_BACKENDS):
        instead = f"choose the model with moe_comm_backend='standard', or one of {', '.join(OWN_BACKENDS)}"
        yield refuse(job, "moe_comm_backend", "nothing has been run with it", instead)
    capacity = job.non_blocking_capacity_factor if backend == "hybridep" else None
    if capacity is not None and capacity < 1:
        why = "HybridEP drops tokens of a rank that receives many, so which ones would follow the placement"
        yield refuse(job, "non_blocking_capacity_factor", why, "set it to 1.0, or to None")
    # torchtitan captures forward and backward with these; with others it refuses that itself.
    if (backend == "minimal_async_ep" or capacity is not None) and not job.disable_cuda_graphs:
        why = (
            "a CUDA graph of forward and backward would begin no forward when it is replayed, and nothing would be "
            "counted"
        )
        yield refuse(job, "disable_cuda_graphs", why, "set training.disable_cuda_graphs")


def _trained(job: Any) -> Iterator[Refusal]:
    if any("muon" in name.lower() for name in job.optimizers):
        why = (
            "it multiplies the experts of a rank as one batch on a GPU, and no test shows that an expert's update has "
            "the same bits at another place in the batch"
        )
        yield refuse(job, "optimizers", why, "use AdamW")
    if job.lora:
        yield refuse(job, "lora", "adapters of experts are not supported", "train the experts themselves")


CHECKS = (_parallelism, check_spmd_backend, _dispatcher, _trained)


def without_replicas(job: Any) -> Iterator[Refusal]:
    """Yield what is refused for replica slots alone."""
    if job.moe_comm_backend in OWN_BACKENDS:
        instead = "set replica_slots=0, or choose the model with moe_comm_backend='standard'"
        yield refuse(job, "moe_comm_backend", "its dispatcher knows one place for an expert", instead)
    for degree in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        if getattr(job, degree) > 1:
            yield refuse(job, degree, "copies of experts are not there for it yet", "set replica_slots=0")


RANKS, EXPERTS = "expert_parallel_degree", "num_experts"
"""Settings of the ranks and experts of a layer."""
