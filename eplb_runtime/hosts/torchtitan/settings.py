"""Settings of a torchtitan job that the balancer cannot follow, by torchtitan's own names, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..refusals import EXACT_BY_ITSELF, EXACT_IN_ONE_SUM

BACKENDS = {"spmd_types": "2.14", "partial_dtensor": "2.11"}
"""``spmd_backend`` -> the torch that it needs."""
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
class TitanSettings:
    """Settings of a live job, by torchtitan's names; the defaults are those of a job without experts."""

    top_k: int = 0
    expert_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    data_parallel_replicate_degree: int = 1
    expert_data_parallel_size: int = 1  # ranks that hold the same experts
    moe_comm_backend: str = STANDARD
    non_blocking_capacity_factor: float | None = None  # of HybridEP; below 1 it drops tokens
    disable_cuda_graphs: bool = False
    deterministic: bool = False  # of debug: DeepEP receives tokens in a fixed order
    compiled: bool = False  # blocks with experts
    optimizers: tuple[str, ...] = ("AdamW",)


def backend_of(dispatchers: Iterable[Any]) -> str:
    """Return ``moe_comm_backend`` of these configs of dispatchers; other names where it is not known."""
    names = {type(one).__qualname__.removesuffix(".Config").rpartition(".")[2] for one in dispatchers}
    found = {STANDARD if name in _STANDARD_DISPATCHERS else name for name in names}
    named = {name: backend for backend, name in OWN_BACKENDS.items()}
    return " and ".join(sorted(named.get(name, name) for name in found)) or STANDARD


def notes(job: TitanSettings) -> Iterator[str]:
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


def refusals(job: TitanSettings) -> Iterator[str]:
    """Yield what cannot be balanced, why, and what to write."""
    backend, capacity = job.moe_comm_backend, job.non_blocking_capacity_factor
    if job.expert_parallel_degree == 1:
        yield (
            "expert_parallel_degree=1: every rank has all experts, nothing to balance; set "
            "parallelism.expert_parallel_degree"
        )
    if job.compiled:
        yield (
            "compiled: a block is compiled as one graph, and a batch meets other ranks in the middle of it; leave "
            "'model' out of compile.components, or set compile.enable=False"
        )
    if backend not in (STANDARD, *OWN_BACKENDS):
        yield (
            f"moe_comm_backend={backend}: nothing has been run with it; choose the model with "
            f"moe_comm_backend='standard', or one of {', '.join(OWN_BACKENDS)}"
        )
    capacity = capacity if backend == "hybridep" else None
    if capacity is not None and capacity < 1:
        yield (
            f"non_blocking_capacity_factor={capacity}: HybridEP drops tokens of a rank that receives many, so which "
            "ones would follow the placement; set it to 1.0, or to None"
        )
    # torchtitan captures forward and backward with these; with others it refuses that itself.
    if (backend == "minimal_async_ep" or capacity is not None) and not job.disable_cuda_graphs:
        yield (
            "disable_cuda_graphs=False: a CUDA graph of forward and backward would begin no forward when it is "
            "replayed, and nothing would be counted; set training.disable_cuda_graphs"
        )
    if any("muon" in name.lower() for name in job.optimizers):
        yield (
            f"optimizers={job.optimizers}: it multiplies the experts of a rank as one batch on a GPU, and no test "
            "shows that an expert's update has the same bits at another place in the batch; use AdamW"
        )


def without_replicas(job: TitanSettings) -> Iterator[str]:
    """Yield what is refused for replica slots alone."""
    if job.moe_comm_backend in OWN_BACKENDS:
        yield (
            f"moe_comm_backend={job.moe_comm_backend}: its dispatcher knows one place for an expert; set "
            "replica_slots=0, or choose the model with moe_comm_backend='standard'"
        )
    for degree in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        if (size := getattr(job, degree)) > 1:
            yield f"parallelism.{degree}={size}: copies of experts are not there for it yet; set replica_slots=0"
