"""Weight updates of verl's engines and of slime, and exports of Megatron-Bridge and of the package `mbridge`, with
experts under their logical ids.

Copy this file into your project. ``follow_verl`` is for verl's Megatron engine, ``follow_verl_fsdp`` for its FSDP2
engine, ``follow_bridge`` and ``follow_mbridge`` for a bridge that you use yourself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import ExportError
from eplb_runtime.distributed.consensus import first_problem
from eplb_runtime.migration.overlapped import sampled
from eplb_runtime.moe.experts.registry import MARK
from eplb_runtime.moe.experts.slices import is_sliced, rearranged

Key = TypeVar("Key")


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


# -- an export by a walk over the modules of each rank -----------------------------------------------------------------


class Walk:
    """One walk over the expert parameters of this rank. Collective over the job when it begins, between steps; from
    then on over each EP group, whose ranks walk the same parameters in the same order."""

    def __init__(self, balancer: eplb.Balancer, what: str) -> None:
        balancer.begin_export(what, None)
        self._balancer = balancer
        self._epoch = balancer.rebalancer.epoch_on_this_rank
        self._kinds: list[tuple[int, tuple[Tensor, ...]]] = []
        self._place_of: dict[int, tuple[int, int]] = {}
        self._arrived: dict[tuple[int, int], Tensor] = {}
        problem = balancer.tensors.memory.why_freed() or self._list()
        if found := balancer.rebalancer.run(lambda group, _: first_problem(problem, group)):
            raise ExportError(f"{what}: {found}")

    def _list(self) -> str:
        """List expert parameters; returns what is wrong with them."""
        registry = self._balancer.runtime.registry
        for layer in registry.layers:
            for rows in registry.by_expert(layer):
                if not isinstance(rows, tuple) or any(map(is_sliced, rows)):
                    return (
                        f"experts of MoE layer {layer} are stacked or sliced, and a walk is followed where each is a "
                        "tensor of its own, as in Megatron: take balancer.named_logical_tensors()"
                    )
                for row, parameter in enumerate(rows):
                    self._place_of[id(parameter)] = len(self._kinds), row
                self._kinds.append((layer, rows))
        return ""

    def pairs(
        self, walked: Iterable[tuple[Key, Tensor]], name_of: Callable[[Key], str]
    ) -> Iterator[tuple[Key, Tensor]]:
        """Yield what is walked, with copies of the experts that were there at launch, which must not be written to."""
        for key, tensor in walked:
            here = self._at_launch(name_of(key), tensor)
            if here is tensor:
                yield key, tensor
                continue
            before = _as_handed_out(here)
            yield key, here
            now = _as_handed_out(here)
            if before[:2] != now[:2] or not torch.equal(before[2], now[2]):
                raise RuntimeError(
                    f"{name_of(key)} was written to, and it is a copy of an expert of another rank: load weights "
                    "(another model's, a backup) inside balancer.logical_order()"
                )

    def without_data(self, value: Any) -> Any:
        """Return an expert's parameter on the meta device, anything else detached."""
        if not isinstance(value, Tensor):
            return value
        return value.detach().to("meta") if id(value) in self._place_of else value.detach()

    def _at_launch(self, name: str, tensor: Tensor) -> Tensor:
        """The weights of the expert that was in this place at launch; what is no expert, as it is."""
        place = self._place_of.get(id(tensor))
        if place is None:
            if ".experts." in name and any(
                self._has_moved(layer) for layer, _ in self._kinds
            ):  # as all of Megatron's are named
                raise ExportError(
                    f"{name} is no parameter of the attached model (a copy, or made from several), so the expert that "
                    "it should be is not known: export inside balancer.logical_order()"
                )
            return tensor
        if self._epoch != self._balancer.rebalancer.epoch_on_this_rank:
            raise RuntimeError("experts have moved since this export began, so its tensors are mixed: repeat it")
        kind, _ = place
        if not self._has_moved(self._kinds[kind][0]):
            return tensor
        if place not in self._arrived:
            self._bring(kind)
        return _like(tensor, self._arrived.pop(place))

    def _has_moved(self, layer: int) -> bool:
        """Return whether experts of a layer have moved since launch; equal on all ranks."""
        return not np.array_equal(*self._experts_of_rows(layer))

    def _experts_of_rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The logical expert of each row over all ranks, now and at launch."""
        now = self._balancer.placement
        launch = eplb.Placement.initial(now.num_layers, now.num_experts, now.num_ranks, now.replica_slots)
        return now.homes_LRH[layer].ravel(), launch.homes_LRH[layer].ravel()

    @torch.no_grad()
    def _bring(self, kind: int) -> None:
        """Bring one kind of tensor of a layer's experts to where they were at launch. Collective over the EP group."""
        layer, parameters = self._kinds[kind]
        with torch.inference_mode(False):
            rows = torch.stack([parameter.detach() for parameter in parameters])
            rows = rearranged(rows, *self._experts_of_rows(layer), self._balancer.runtime.groups)
        for row, expert in enumerate(rows):
            self._arrived[kind, row] = expert


def _as_handed_out(copy: Tensor) -> tuple[int, int, Tensor]:
    """Return what shows that a copy was written to, also through ``.data``, or is in other memory."""
    return 0 if copy.is_inference() else copy._version, copy.data_ptr(), sampled(copy)


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    """The values with what Megatron notes on a parameter (how tensor parallelism cuts it)."""
    for name, noted in vars(parameter).items():
        if noted is None or isinstance(noted, bool | int | float | str):
            setattr(values, name, noted)
    return values
