"""Weight updates of verl's engines and of slime, and exports of Megatron-Bridge and of the package `mbridge`, with
experts under their logical ids.

Copy this file into your project. ``follow_verl`` is for verl's Megatron engine, ``follow_verl_fsdp`` for its FSDP2
engine, ``follow_bridge`` and ``follow_mbridge`` for a bridge that you use yourself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import ExportError
from eplb_runtime.hosts.walks import Walk
from eplb_runtime.moe.experts.registry import MARK


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


class _WalkedModule:
    """A module whose ``named_parameters`` are in logical order; the rest, but for its state dict, is the module's."""

    def __init__(self, module: nn.Module, walk: Walk) -> None:
        self._module, self._walk = module, walk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """`nn.Module.named_parameters`."""
        return self._walk.pairs(self._module.named_parameters(*arguments, **options), str)

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """`nn.Module.parameters`."""
        return (tensor for _, tensor in self.named_parameters(recurse=recurse))

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """`nn.Module.state_dict`, which walkers read for what is no parameter: experts have no data here."""
        found = self._module.state_dict(*arguments, **{**options, "keep_vars": True})
        own = {name: value for name, value in found.items() if name.rpartition(".")[2] != MARK}
        return {name: self._walk.without_data(value) for name, value in own.items()}


def modules_in_logical_order(balancer: eplb.Balancer, models: Sequence[nn.Module]) -> list[Any]:
    """Give a walker these in the place of the model's chunks: their ``named_parameters()`` are those of a job in which
    no expert has moved. For walkers that read nothing else, such as verl's ``per_tensor_generator``. Collective over
    the job, between steps; each call serves one export.

    Args:
        models: as attached, or what Megatron's wrappers hold.

    Returns:
        A stand-in for each model, without the wrappers around it. Experts are copies, and writing to them raises.

    Raises:
        ExportError: weights have no memory now, or the experts are not a tensor each.
        RuntimeError: a rank did not come, or the balancer is closed.
    """
    walk = Walk(balancer, "modules_in_logical_order()")
    return [_WalkedModule(_unwrapped(model), walk) for model in models]


def _unwrapped(model: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def walk_in_slime(balancer: eplb.Balancer, named_params_and_buffers: Callable[..., Any]) -> Callable[..., Any]:
    """Make of slime's ``named_params_and_buffers`` (``slime/backends/megatron_utils/update_weight/common.py``) one that
    yields experts under their logical ids, wherever they are; put it in its place in that module and in those that
    import it by name (``actor``, ``update_weight_from_distributed``, ``hf_weight_iterator_direct``).

    Buckets and routes that slime makes once stay right, as names stay with ranks. Each call is collective over the job,
    between steps. A backup can be taken of what it yields; restoring one that has an expert which is elsewhere raises.

    Args:
        named_params_and_buffers: slime's own function.
    """

    @wraps(named_params_and_buffers)
    def walk(*arguments: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        in_order = Walk(balancer, "named_params_and_buffers()")
        yield from in_order.pairs(named_params_and_buffers(*arguments, **options), str)

    return walk


class _TasksInLogicalOrder:
    """Tasks of an export, as often as they are run through; weights of experts are brought as they are asked for."""

    def __init__(self, balancer: eplb.Balancer, tasks: Sequence[Any]) -> None:
        self._balancer, self._tasks = balancer, tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Any]:
        walk = Walk(self._balancer, "an export by Megatron-Bridge")
        for task in self._tasks:
            if getattr(task, "param_weight", None) is None:  # of another pipeline stage
                yield task
                continue
            for own, weight in walk.pairs([(task, task.param_weight)], lambda task: str(task.global_param_name)):
                yield own if weight is own.param_weight else replace(own, param_weight=weight)


def tasks_in_logical_order(balancer: eplb.Balancer, tasks: Sequence[Any]) -> Any:
    """Make of Megatron-Bridge's conversion tasks such as export experts under their logical ids:
    ``bridge.export_hf_weights(model, conversion_tasks=tasks_in_logical_order(balancer, tasks))``.

    They may be kept, and serve every later export. Each run through them is collective over the job, between steps.

    Args:
        tasks: of ``bridge.get_conversion_tasks(model)``.

    Returns:
        What has a length and can be iterated over. Not for loading, which writes to the weights of its tasks.
    """
    return tasks if isinstance(tasks, _TasksInLogicalOrder) else _TasksInLogicalOrder(balancer, tasks)
