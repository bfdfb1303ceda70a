"""Weight updates of verl's engines and exports of Megatron-Bridge and of the package `mbridge`, with experts under
their logical ids.

Copy this file into your project. ``follow_verl`` is for verl's Megatron engine, ``follow_verl_fsdp`` for its FSDP2
engine, ``follow_bridge`` and ``follow_mbridge`` for a bridge that you use yourself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import numpy as np
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.checkpoint import ExportError
from eplb_runtime.hosts.walks import modules_in_logical_order, tasks_in_logical_order


def follow_mbridge(balancer: eplb.Balancer, bridge: Any) -> None:
    """Let ``export_weights`` (and ``save_weights``) of this bridge of the package ``mbridge`` export experts under
    their logical ids from now on.

    Args:
        bridge: an ``mbridge.AutoBridge``.
    """
    export = bridge.export_weights

    def export_weights(models: Any, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield from export(modules_in_logical_order(balancer, models), *arguments, **options)

    bridge.export_weights = export_weights


def follow_verl(balancer: eplb.Balancer, engine: Any) -> None:
    """Let the weight update of this Megatron engine of verl (``get_per_tensor_param``) export experts under their
    logical ids from now on, by Megatron-Bridge or ``mbridge``. Exports of single shards raise while experts are
    elsewhere than at launch.

    Args:
        engine: a ``MegatronEngine`` after ``initialize()``.
    """
    if getattr(engine, "bridge", None) is None:
        raise ValueError("follow_verl: the engine has no bridge: set use_mbridge, and call it after initialize()")
    # Tasks are kept by the engine and cut anew in each export, so they may have been made already.
    follow = follow_mbridge if getattr(engine, "vanilla_bridge", False) else follow_bridge
    follow(balancer, engine.bridge)
    for other in ("get_per_tensor_param_shard", "get_per_tensor_param_delta_shard"):
        refuse_where_moved(balancer, engine, other)


def follow_verl_fsdp(balancer: eplb.Balancer, engine: Any) -> None:
    """Let the weight update of this FSDP2 engine of verl (``get_per_tensor_param``) export experts under their logical
    ids from now on, whole and by the names of the Hugging Face folder. Its own takes the experts of a rank for all of
    them and counts from 0 on, also before any has moved. Exports of single shards raise.

    Args:
        engine: an ``FSDPEngine`` whose ``module`` is attached.

    Raises:
        ValueError: it exports adapters, or quantizes on the way.
    """
    for name, what in {"_is_lora": "LoRA adapters", "_qat_enabled": "quantized weights"}.items():
        if getattr(engine, name, False):
            raise ValueError(
                f"follow_verl_fsdp: {what} are exported by verl alone: train without, or keep experts whole"
            )

    def named() -> Iterator[tuple[str, Tensor]]:
        with balancer.named_logical_tensors() as tensors:
            yield from tensors

    def by_shards(*_: Any, **__: Any) -> Any:
        raise ExportError(
            "get_per_tensor_param_shard() of an engine whose experts are spread over ranks: each has its own, under "
            "the same names; update whole weights (get_per_tensor_param)"
        )

    engine.get_per_tensor_param = lambda **_: (named(), None)
    engine.get_per_tensor_param_shard = engine.get_per_tensor_param_delta_shard = by_shards


def follow_bridge(balancer: eplb.Balancer, bridge: Any) -> None:
    """Let ``export_hf_weights`` of this Megatron-Bridge export experts under their logical ids from now on. Its other
    exports raise while experts are elsewhere than at launch.

    Args:
        bridge: an ``AutoBridge``.
    """
    export = bridge.export_hf_weights

    def export_hf_weights(model: Any, *arguments: Any, conversion_tasks: Any = None, **options: Any) -> Iterator[Any]:
        if conversion_tasks is None and getattr(bridge, "export_weight_dtype", None) == "fp8":
            _refuse_moved(balancer, "an export to FP8 by Megatron-Bridge")
            return export(model, *arguments, **options)
        if conversion_tasks is None:
            conversion_tasks = bridge.get_conversion_tasks(model)
        tasks = tasks_in_logical_order(balancer, conversion_tasks)
        return export(model, *arguments, conversion_tasks=tasks, **options)

    bridge.export_hf_weights = export_hf_weights
    for other in ("save_hf_weights", "export_hf_weights_modelopt", "export_hf_weights_quant"):
        refuse_where_moved(balancer, bridge, other)


def refuse_where_moved(balancer: eplb.Balancer, owner: Any, name: str) -> None:
    """Let a method of ``owner``, which names experts by their place, raise once they have moved."""
    own = getattr(owner, name, None)
    if own is None:
        return

    @wraps(own)
    def refused(*arguments: Any, **options: Any) -> Any:
        _refuse_moved(balancer, f"{name}()")
        return own(*arguments, **options)

    setattr(owner, name, refused)


def _refuse_moved(balancer: eplb.Balancer, what: str) -> None:
    placement = balancer.placement
    sizes = placement.num_layers, placement.num_experts, placement.num_ranks, placement.replica_slots
    if not np.array_equal(placement.homes_LRH, eplb.Placement.initial(*sizes).homes_LRH):
        raise ExportError(
            f"{what} names experts by the rank they were on at launch, and they have moved: call it inside "
            "balancer.logical_order()"
        )
