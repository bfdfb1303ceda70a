"""Settings of Transformers and Accelerate that the balancer cannot follow, and why. Transformers is not imported."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..attaching.description import EXACT_IN_ONE_SUM, Exact, Refusal

VERSION = "Transformers 5.23 or newer"
LOAD = 'load the model with DistributedConfig(fsdp_size=..., ep_size=..., ep_implementation="eplb")'
SIZES = ("ep_size", "fsdp_size", "tp_size", "pp_size", "dp_replicate_size")
_WRAPPERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "TP")


def options_of(content: Any) -> dict[str, Any]:
    """Return a DistributedConfig's settings from JSON (perhaps in a model's) or Accelerate's from YAML; {}: neither."""
    if not isinstance(content, Mapping):
        return {}
    found = content.get("distributed_config", content)
    names = (*SIZES, "ep_implementation", "distributed_type", "parallelism_config")
    return dict(found) if isinstance(found, Mapping) and any(name in found for name in names) else {}


def refusals(given: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a `Refusal` for each setting that cannot be balanced."""
    if "distributed_type" in given:
        for name in ("distributed_type", "parallelism_config"):
            value, why = given.get(name), "Accelerate would spread the model, and not by expert"
            if value in _WRAPPERS if name == "distributed_type" else value:
                yield Refusal(name, value, why, f"leave it out; {LOAD}")
        return
    if _size(given, "ep_size") == 1:
        why = "every rank has all experts, which attach would spread itself"
        yield Refusal("ep_size", 1, why, f"{LOAD}, or without a DistributedConfig")
    if (name := given.get("ep_implementation") or "auto") != "eplb":
        yield Refusal("ep_implementation", name, "its exchange needs experts in logical order", f"{LOAD}")
    if given.get("fsdp_cpu_offload"):
        yield Refusal("fsdp_cpu_offload", True, "nothing has been run with it", "leave it out")
    if (stages := _size(given, "pp_size")) > 1:
        yield Refusal("pp_size", stages, "Transformers has no expert parallelism in pipelines", "leave it out")


def replicas_of(given: Mapping[str, Any]) -> int:
    """Return the number of replicas of the whole model over which FSDP adds up gradients."""
    return _size(given, "dp_replicate_size")


def exact(given: Mapping[str, Any]) -> Exact:
    """Return "bit" if training gives the same bits with other placements, else "rounding"."""
    return "bit" if replicas_of(given) <= EXACT_IN_ONE_SUM else "rounding"


def _size(given: Mapping[str, Any], name: str) -> int:
    return int(given.get(name) or 1)
