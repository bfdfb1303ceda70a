"""Recipes as JSON: one object for each, with fields that all projects share (`tp`, `pp`, `ep`, `optimizer`, ...)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from ...hosts.megatron.settings import SCALED_NOW
from ...hosts.settings import Unresolved
from ...hosts.torchtitan.settings import OWN_BACKENDS, STANDARD
from .base import Recipe, RecipeError, value_of
from .command_lines import BY_FLAGS, FIELDS, SLIME, SWITCHED_OFF, VERL

MEGATRON = {
    "num_experts": "num_moe_experts",
    "top_k": "moe_router_topk",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "edp_at_reference": "expert_data_parallel_size",
    "gpus": "world_size",
    "dispatcher": "moe_token_dispatcher_type",
    "flex_backend": "moe_flex_dispatcher_backend",
    "overlap_moe_comm": "overlap_moe_expert_parallel_comm",
    "fp8": "fp8",
    "optimizer": "optimizer",
    "optimizer_cpu_offload": "optimizer_cpu_offload",
    "offload_fraction": "optimizer_offload_fraction",
    "precision_aware_optimizer": "use_precision_aware_optimizer",
    "distributed_optimizer": "use_distributed_optimizer",
    "fsdp": "use_megatron_fsdp",
    "phase_offload": "phase_offload",
    "lora": "lora",
}
"""A recipe's fields, and Megatron's names for them."""
NOT_AS_WRITTEN = (
    *("bf16", "fp16", "fp4", "lora_target_modules", "saves_by_place"),
    *("cuda_graph_impl", "cuda_graph_modules"),  # may be those of generation alone
)
"""Settings that fields and notes say in words of their own."""
MEGATRON_AS_WRITTEN = (
    "optimizer",  # the field has Muon's name alone
    "moe_router_padding_for_fp8",
    *sorted(FIELDS - {*MEGATRON.values(), *NOT_AS_WRITTEN}),
)
"""Options that have no field; `source_lines` has them where the recipe sets them."""
TORCHTITAN = {
    "num_experts": "num_experts",
    "top_k": "top_k",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
    "gpus": "world_size",
    "lora": "lora",
}
TORCHTITAN_AS_WRITTEN = (
    "spmd_backend",
    "data_parallel_replicate_degree",
    "non_blocking_capacity_factor",
    "disable_cuda_graphs",
    "deterministic",
)
UNKNOWN_SIZES = ("num_experts", "num_moe_experts", "moe_router_topk", "top_k")
"""Belong to the model; a framework's default says nothing of them."""
BY_PROJECT: Mapping[str, Mapping[str, Any]] = {
    "slime": {**BY_FLAGS, **SLIME},
    "Megatron-LM": BY_FLAGS,
    "verl": VERL,
    "Megatron-Bridge": {
        "moe_permute_fusion": Unresolved("set by the model's provider"),
        "gradient_accumulation_fusion": True,  # its default where TransformerEngine is there
    },
}


def read_json(path: Path) -> list[Recipe]:
    """The recipes of a file: an object or a list of them.

    Raises:
        RecipeError: it is no JSON of recipes, or one of them has no experts.
    """
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not JSON: {error}") from None
    entries = content if isinstance(content, list) else [content]
    if not entries:
        raise RecipeError(f"{path}: no recipe in it")
    return [_recipe(path, number, entry) for number, entry in enumerate(entries)]


def _recipe(path: Path, number: int, entry: Any) -> Recipe:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("host"), str):
        raise RecipeError(f"{path}: entry {number} is no recipe: it has no field 'host'")
    name = str(entry.get("name", f"{path.stem}[{number}]"))
    if not any(isinstance(entry.get(size), int) and entry[size] > 1 for size in ("num_experts", "ep")):
        raise RecipeError(f"{path}: {name} has no experts (num_experts, ep)")
    if not isinstance(entry.get("source_lines") or {}, Mapping):
        raise RecipeError(f"{path}: {name}: source_lines is no object")
    source, host = str(entry.get("project", "")), entry["host"]
    if host == "megatron":
        options = _named(entry, MEGATRON, MEGATRON_AS_WRITTEN)
        if entry.get("cuda_graph"):
            implementation, _, modules = str(entry["cuda_graph"]).partition(":")
            options |= {"cuda_graph_impl": implementation, "cuda_graph_modules": modules or None}
        if entry.get("params_dtype") in ("bf16", "fp16"):
            options[entry["params_dtype"]] = True
        if entry.get("fp8") in SCALED_NOW:  # the field has the recipe or the format
            options.setdefault("fp8_recipe", entry["fp8"])
        if "etp" in (entry.get("defaulted") or ()) and _cannot_fit(entry):
            options["expert_tensor_parallel_size"] = None  # Megatron would not start so: nobody has chosen it
        options["lora_target_modules"] = _adapted(entry.get("notes") or ())
        if entry.get("nvfp4"):
            options["fp4"] = "nvfp4"
    elif host == "torchtitan":
        options = _named(entry, TORCHTITAN, TORCHTITAN_AS_WRITTEN)
        options |= _of_torchtitan(entry)
    else:
        options = {
            "expert_parallel_degree": entry.get("ep"),
            "expert_data_parallel_size": entry.get("edp_at_reference"),
        }
    written = {name: field for field, name in (MEGATRON if host == "megatron" else TORCHTITAN).items()}
    return Recipe(name, source, host, options, dict(BY_PROJECT.get(source, {})), written)


def _cannot_fit(entry: Mapping[str, Any]) -> bool:
    """Return whether the ranks that are stated are no multiple of those over which experts are spread."""
    ranks, *spread = entry.get("gpus"), *(entry.get(size) or 1 for size in ("etp", "ep", "pp"))
    return isinstance(ranks, int) and all(isinstance(size, int) for size in spread) and ranks % prod(spread) != 0


def _adapted(notes: Iterable[Any]) -> Any:
    """The layers that adapters are given to, of a note ``lora.NAME {options}``; None: it does not say."""
    for note in notes:
        kind, _, options = str(note).partition(" ")
        if kind.startswith("lora.") and options.startswith("{"):
            with suppress(json.JSONDecodeError):
                return json.loads(options).get("target_modules")
    return None


def _named(entry: Mapping[str, Any], names: Mapping[str, str], as_written: tuple[str, ...]) -> dict[str, Any]:
    options = {name: entry.get(field) for field, name in names.items()}
    for size in UNKNOWN_SIZES:
        if size in options and options[size] is None:
            options[size] = Unresolved("of the model's own config")
    written = entry.get("source_lines") or {}
    lines = {key.rpartition(".")[2].replace("-", "_"): value for key, value in written.items()}
    for name in as_written:
        if name in lines:
            options[name] = value_of(lines[name]) if isinstance(lines[name], str) else lines[name]
    for switch, name in SWITCHED_OFF.items():
        if lines.get(switch) not in (None, False) and name in as_written:
            options[name] = False
    return options


def _of_torchtitan(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Options that torchtitan has otherwise than the fields."""
    options: dict[str, Any] = {}
    if entry.get("compile") is not None:
        options["compiled"] = (str(entry["compile"]),) if entry["compile"] else ()
    if entry.get("optimizer") is not None:
        options["optimizers"] = (str(entry["optimizer"]),)
    dispatcher = entry.get("dispatcher")
    if dispatcher is not None:
        by_name = dispatcher if dispatcher in OWN_BACKENDS else Unresolved("flex_backend is not given")
        options["moe_comm_backend"] = STANDARD if dispatcher == "alltoall" else entry.get("flex_backend") or by_name
    return options
