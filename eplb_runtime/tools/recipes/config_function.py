"""Recipes that are torchtitan's config functions, by import path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ...hosts.torchtitan.settings import backend_of
from ...utils.errors import one_line
from .base import Recipe, RecipeError

PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
PARALLELISM = (
    "expert_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "data_parallel_replicate_degree",
    "spmd_backend",
)


def read_config_function(path: str) -> Recipe:
    """The recipe that a function ``package.module.function`` (or ``package.module:function``) returns. Runs it.

    Raises:
        RecipeError: it cannot be imported or called, or its config has no experts.
    """
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        config = getattr(import_module(module), name)()
    except Exception as error:
        raise RecipeError(f"{path}: {one_line(error)}") from None
    config = getattr(config, "trainer", config) if not hasattr(config, "parallelism") else config
    if not hasattr(config, "parallelism"):
        raise RecipeError(f"{path}: gives a {type(config).__name__}, which has no parallelism: no config of a Trainer")
    routed = list(_routed_experts(config))
    if not routed:
        raise RecipeError(f"{path}: its model has no routed experts")
    return Recipe(name, "torchtitan", "torchtitan", _options(config, routed))


def _routed_experts(config: Any) -> Iterator[Any]:
    """Configs of the model's routed experts, layer by layer."""
    layers = getattr(getattr(getattr(config, "model_spec", None), "model", None), "layers", None) or ()
    for layer in layers:
        routed = getattr(getattr(layer, "moe", None), "routed_experts", None)
        if routed is not None:
            yield routed


def _options(config: Any, routed: list[Any]) -> dict[str, Any]:
    dispatcher = routed[0].token_dispatcher
    options: dict[str, Any] = {name: getattr(config.parallelism, name, None) for name in PARALLELISM}
    groups = getattr(config.optimizer, "param_groups", ())
    return {
        **options,
        "num_experts": getattr(dispatcher, "num_experts", None),
        "top_k": getattr(dispatcher, "top_k", None),
        "moe_comm_backend": backend_of(one.token_dispatcher for one in routed),
        "non_blocking_capacity_factor": getattr(dispatcher, "non_blocking_capacity_factor", None),
        "disable_cuda_graphs": getattr(getattr(config, "training", None), "disable_cuda_graphs", None),
        "deterministic": getattr(getattr(config, "debug", None), "deterministic", None),
        "compiled": tuple(config.compile.components) if config.compile.enable else (),
        "optimizers": tuple(dict.fromkeys(group.optimizer_name for group in groups)) or None,
    }
