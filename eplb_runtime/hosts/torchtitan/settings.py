"""Settings of a torchtitan job that decide whether it can be balanced, by torchtitan's own names, and the rules over
them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..settings import Exact, HostRules, Rule, Unresolved, copies_of_experts, given_or_default

VERSION = "torchtitan 0.3.0"
BACKENDS = {"spmd_types": "2.14", "partial_dtensor": "2.11"}
"""``spmd_backend`` -> the torch that it needs."""
EXACT_IN_ONE_SUM = 2
"""Ranks whose gradients FSDP adds up: the sum of two does not depend on their order."""


@dataclass(frozen=True)
class TorchtitanJobSettings:
    """Settings of a job, by the names of torchtitan's configs, with their defaults. Any may be `Unresolved`.

    Args:
        expert_data_parallel_size: ranks that hold the same experts, of the world's size.
        moe_comm_backend: the token dispatcher of the model: "standard", or another.
        compiled: components of the model that are compiled.
        optimizers: names of those that step the model.
        assumed: fields that have their default, which nobody has given.
    """

    num_experts: int | Unresolved | None = None
    expert_parallel_degree: int | Unresolved = 1
    tensor_parallel_degree: int | Unresolved = 1
    pipeline_parallel_degree: int | Unresolved = 1
    context_parallel_degree: int | Unresolved = 1
    data_parallel_replicate_degree: int | Unresolved = 1
    expert_data_parallel_size: int | Unresolved = field(default_factory=lambda: Unresolved("ranks of the job"))
    spmd_backend: str | Unresolved = "spmd_types"
    moe_comm_backend: str | Unresolved = "standard"
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


def _exact(settings: Any) -> Exact:
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
        lambda job: job.moe_comm_backend != "standard",
        "it carries tokens itself, and so does the balancer",
        "choose the model with moe_comm_backend='standard', and BalancerConfig(dispatch=...)",
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

HOST = HostRules(
    VERSION,
    settings_of,
    RULES,
    _exact,
    (
        "spmd_backend='spmd_types', torchtitan's default, has torch 2.14 or newer",
        "the overrides, pipelining_fn and post_optimizer_build_fn that balance() sets are in the config",
        "each rank holds whole experts, equally many",
        "with replica slots: the ranks that hold the same experts divide dimension 1 of their tensors",
    ),
)
