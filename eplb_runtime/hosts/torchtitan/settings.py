"""Settings of a torchtitan job that the balancer cannot follow, by torchtitan's own names, and why."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..attaching.description import EXACT_BY_ITSELF, Refusal, sums_of_gradients, sums_of_results

BACKENDS = {"spmd_types": "2.14", "partial_dtensor": "2.11"}
"""``spmd_backend`` -> the torch that it needs."""
STANDARD = "standard"
OWN_BACKENDS = {"deepep": "DeepEPTokenDispatcher"}
"""``moe_comm_backend`` -> the dispatcher, where torchtitan's own stays and is given slots in the place of experts."""
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
    deterministic: bool = False  # of debug: DeepEP receives tokens in a fixed order
    compiled: bool = False  # blocks with experts
    optimizers: tuple[str, ...] = ("AdamW",)
    replica_slots: int = 0  # of the balancer's own settings


def backend_of(dispatchers: Iterable[Any]) -> str:
    """Return the ``moe_comm_backend`` of these dispatchers' configs; none: "standard". Unknown dispatchers are named by
    class, several joined by "and"."""
    names = {type(one).__qualname__.removesuffix(".Config").rpartition(".")[2] for one in dispatchers}
    found = {STANDARD if name in _STANDARD_DISPATCHERS else name for name in names}
    named = {name: backend for backend, name in OWN_BACKENDS.items()}
    return " and ".join(sorted(named.get(name, name) for name in found)) or STANDARD


def notes(job: TitanSettings) -> Iterator[str]:
    """Yield a line on each reason for which results are equal to rounding, or not repeatable at all."""
    backend, replicated = job.moe_comm_backend, job.data_parallel_replicate_degree
    if backend == "deepep" and job.top_k > EXACT_BY_ITSELF:
        yield sums_of_results(f"moe_comm_backend='{backend}'", job.top_k)
    if backend == "deepep" and not job.deterministic:
        yield (
            "DeepEP receives tokens in any order unless debug.deterministic is set: no two trainings are equal to the "
            "bit, with experts moved or not"
        )
    yield from sums_of_gradients(max(job.expert_data_parallel_size // replicated, replicated))


def refusals(job: TitanSettings) -> Iterator[Refusal]:
    """Yield a `Refusal` for each setting of the job that cannot be balanced."""
    for setting, why, instead in _refused(job):
        yield Refusal(setting, getattr(job, setting), why, instead)


def _refused(job: TitanSettings) -> Iterator[tuple[str, str, str]]:
    backend = job.moe_comm_backend
    if job.expert_parallel_degree == 1:
        why = "every rank has all experts, nothing to balance"
        yield "expert_parallel_degree", why, "set parallelism.expert_parallel_degree"
    if job.compiled:
        why = "a block is compiled as one graph, and a batch meets other ranks in the middle of it"
        yield "compiled", why, "leave 'model' out of compile.components, or set compile.enable=False"
    if backend not in (STANDARD, *OWN_BACKENDS):
        instead = "choose the model with moe_comm_backend='standard' or 'deepep'"
        yield "moe_comm_backend", "nothing has been run with it", instead
    if any("muon" in name.lower() for name in job.optimizers):
        why = "it multiplies a rank's experts as one batch on a GPU, and no test shows an update's bits at other places"
        yield "optimizers", why, "use AdamW"
    if job.replica_slots and backend in OWN_BACKENDS:
        instead = "set replica_slots=0, or choose the model with moe_comm_backend='standard'"
        yield "moe_comm_backend", "its dispatcher knows one place for an expert", instead
    for degree in ("pipeline_parallel_degree", "tensor_parallel_degree"):
        if job.replica_slots and getattr(job, degree) > 1:
            yield degree, "copies of experts are not there for it yet", "set replica_slots=0"
