"""Recipes as they were collected, in the JSON that ``doctor --recipe`` reads: settings by the framework's own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from eplb_runtime.hosts.megatron.settings import DEFAULTS, SCALED_NOW
from eplb_runtime.hosts.torchtitan.settings import DEFAULTS as TORCHTITAN
from eplb_runtime.hosts.torchtitan.settings import OWN_BACKENDS
from eplb_runtime.tools.recipes import value_of

FIELDS = {
    "edp_at_reference": "edp",
    "dispatcher": "moe_token_dispatcher_type",
    "flex_backend": "moe_flex_dispatcher_backend",
    "overlap_moe_comm": "overlap_moe_expert_parallel_comm",
    "offload_fraction": "optimizer_offload_fraction",
    "precision_aware_optimizer": "use_precision_aware_optimizer",
    "distributed_optimizer": "use_distributed_optimizer",
    "fsdp": "use_megatron_fsdp",
}
SAME = (
    *("name", "project", "host", "num_experts", "top_k", "tp", "pp", "ep", "gpus", "fp8"),
    *("optimizer_cpu_offload", "lora"),
)
IN_OTHER_WORDS = ("bf16", "fp16", "fp4", "cuda_graph_impl", "cuda_graph_modules")


def recorded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A collected recipe's settings."""
    lines = {key.rpartition(".")[2].replace("-", "_"): value for key, value in (entry["source_lines"] or {}).items()}
    lines = {key: value_of(value) if isinstance(value, str) else value for key, value in lines.items()}
    found = {name: entry.get(name) for name in SAME}
    if entry["host"] == "torchtitan":
        flex, dispatcher = entry.get("flex_backend"), entry.get("dispatcher")
        return {
            **found,
            **{name: lines[name] for name in TORCHTITAN if name in lines},
            "compiled": [str(entry["compile"])] if entry.get("compile") else [],
            "optimizers": [str(entry["optimizer"])] if entry.get("optimizer") else None,
            "moe_comm_backend": dispatcher if dispatcher in OWN_BACKENDS else flex or "standard",
        }
    if entry["host"] != "megatron":
        return {**found, "edp": entry.get("edp_at_reference")}
    implementation, _, modules = (entry.get("cuda_graph") or "none").partition(":")
    return {
        **{name: lines[name] for name in DEFAULTS if name in lines and name not in IN_OTHER_WORDS},
        **found,
        **{name: entry[field] for field, name in FIELDS.items() if entry.get(field) is not None},
        "optimizer": lines.get("optimizer") or entry.get("optimizer"),
        "etp": None if "etp" in (entry.get("defaulted") or ()) and not _fits(entry) else entry.get("etp"),
        "gradient_accumulation_fusion": False if lines.get("no_gradient_accumulation_fusion") else None,
        "cuda_graph_impl": implementation,
        "cuda_graph_modules": modules or None,
        "bf16": entry.get("params_dtype") == "bf16",
        "fp16": entry.get("params_dtype") == "fp16",
        "fp8_recipe": lines.get("fp8_recipe") or (entry["fp8"] if entry.get("fp8") in SCALED_NOW else None),
        "fp4": "nvfp4" if entry.get("nvfp4") else None,
        "lora_target_modules": _adapted(entry.get("notes") or ()),
    }


def _fits(entry: Mapping[str, Any]) -> bool:
    """Whether ranks fill the dimensions over which experts are spread."""
    ranks, *spread = entry.get("gpus"), *(entry.get(size) or 1 for size in ("etp", "ep", "pp"))
    return ranks is None or ranks % prod(spread) == 0


def _adapted(notes: Any) -> Any:
    found = [note.partition(" ")[2] for note in notes if str(note).startswith("lora.")]
    return json.loads(found[0]).get("target_modules") if found and found[0].startswith("{") else None
