"""Megatron's optimizers: where they keep what belongs to an expert, and how a step begins, clips and ends.

A distributed optimizer divides each bucket of a flat buffer evenly over the ranks that hold the same experts, wherever
these begin and end; each rank steps what it has of an expert, whole or cut. HybridDeviceOptimizer steps an inner tensor
in the place of each parameter, in host memory; loading makes new inner tensors, so none is remembered.
TransformerEngine's FusedAdam keeps dtypes of its own, some with a scale; its accessors would round once more, so raw
memory moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from torch import Tensor

from ...moe.experts.optimizer_state import PARAMETER, Ranges
from ..attaching.description import AnyOptimizer, AttachError, MoELayer
from .saved_state import refuse_places, say_experts

Square = Callable[[Callable[[Tensor], Tensor | None]], Tensor]
MAIN = "param"
"""Key of the float32 master, as in Megatron's own accessor."""
_MASTER = "master_param"
"""Key under which offloaded state has the inner tensor a second time; TransformerEngine's of the master, or of the 16
bits of it that a weight in bfloat16 lacks."""
_SCALED = (torch.float16,)
"""Dtypes whose numbers are to be multiplied by a scale. bfloat16 has one, too, which is always 1."""


def adapt(wrapped: bool, layers: Sequence[MoELayer], optimizer: Any) -> AnyOptimizer:
    """Return torch's optimizers as they are, Megatron's as a `StepByMegatron`. ``wrapped``: whether the model is inside
    of Megatron's DistributedDataParallel. AttachError: that and the optimizer do not fit."""
    experts = {
        f"{layer.name}.{name}": (layer.name, layer.parameter(name)) for layer in layers for name in layer.parameters
    }
    if isinstance(optimizer, torch.optim.Optimizer):
        if wrapped and experts:
            raise AttachError(
                f"a {type(optimizer).__name__} of torch's sees no gradients of Megatron's DistributedDataParallel, "
                "which keeps them in buffers: make the optimizer by get_megatron_optimizer"
            )
        return optimizer
    if not isinstance(optimizer, MegatronOptimizer):
        raise AttachError(f"a {type(optimizer).__name__} is neither an optimizer of torch's nor of Megatron's")
    if not wrapped and experts:
        raise AttachError("Megatron's optimizers need its DistributedDataParallel around the model: wrap it first")
    return StepByMegatron(optimizer, experts)


def options_of(optimizer: Any) -> dict[str, Any]:
    """Return fields of Megatron's OptimizerConfig, with the optimizer that really steps; {}: it is one of torch's."""
    if not isinstance(optimizer, MegatronOptimizer):
        return {}
    leaves = _leaves(optimizer)
    config = getattr(leaves[0], "config", None) if leaves else None  # layer-wise float32 has torch's own in its chain
    options = dict(vars(config)) if config is not None else {}
    for leaf in leaves:
        kind = type(getattr(leaf, "optimizer", leaf)).__name__
        if "muon" in kind.lower():  # 0.16.1 writes 'adam' into the config while it makes one
            options["optimizer"] = "muon" if kind == "TensorParallelMuon" else kind
    if _layer_wise(optimizer):
        options["use_layer_wise_distributed_optimizer"] = True
    return options


class StepByMegatron:
    """A `HostOptimizer`; AttachError where it keeps state that cannot be reached in place."""

    def __init__(self, optimizer: Any, experts: Mapping[str, tuple[str, torch.nn.Parameter]]) -> None:
        self._optimizer = optimizer
        self.patched: Sequence[Any] = (optimizer,)
        self._experts = {name: parameter for name, (_, parameter) in experts.items()}
        self._layer_of = {name: layer for name, (layer, _) in experts.items()}
        self._leaf_of: dict[int, Any] = {}
        for leaf in _leaves(optimizer):
            held = _held(leaf)
            mine = {name: parameter for name, parameter in self._experts.items() if id(parameter) in held}
            if mine:
                _check_leaf(leaf, mine)
            if mine and is_precision_aware(leaf) and not hasattr(leaf.optimizer, "_scales"):
                raise AttachError(
                    f"{type(leaf.optimizer).__name__} has no _scales, so it keeps its state in another way than "
                    "TransformerEngine's FusedAdam: set use_precision_aware_optimizer=False"
                )
            self._leaf_of.update({id(parameter): leaf for parameter in mine.values()})
        for name, parameter in self._experts.items():
            if parameter.requires_grad and id(parameter) not in self._leaf_of:
                raise AttachError(_elsewhere(name, 0, parameter))
        together = [leaf for leaf in self._leaves_of_experts() if not _is_for_experts(leaf)]
        if not _layer_wise(optimizer) and (together or not isinstance(optimizer, ChainedOptimizer)):
            # Experts cannot be taken out of its own norm, which follows the order of slots.
            raise AttachError(
                f"Megatron's {type(together[0] if together else optimizer).__name__} would clip by a norm that depends "
                "on where experts are: it is no chain with an optimizer of its own for experts; give attach what "
                "get_megatron_optimizer gives"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": [p for p in self._experts.values() if id(p) in self._leaf_of]}]

    @property
    def inside(self) -> list[torch.optim.Optimizer]:
        found: list[torch.optim.Optimizer] = []
        for leaf in self._leaves_of_experts():
            if is_precision_aware(leaf):  # one scale a tensor, which is one expert here and would be several on trial
                continue
            inner = leaf.optimizer.sub_optimizers if is_offloaded(leaf.optimizer) else [leaf.optimizer]
            found += {type(one): one for one in inner}.values()
        return found

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return live state by key, with ``param``, the float32 master, unless the parameter is that; {}: none."""
        leaf = self._leaf_of.get(id(parameter))
        if leaf is None or not _is_here(leaf, parameter):
            return {}
        if is_offloaded(leaf.optimizer):
            return _offloaded(leaf, parameter)[0]
        if is_precision_aware(leaf):
            given = _given(leaf, parameter)
            kept = raw_state(leaf.optimizer, given)
            kept.setdefault("param", given)
        elif isinstance(leaf, DistributedOptimizer):
            kept = dict(leaf._get_main_param_and_optimizer_states(parameter))
        else:
            main = _given(leaf, parameter)
            kept = {"param": main, **leaf.optimizer.state.get(main, {})}
        if kept["param"].data_ptr() == parameter.data_ptr() + _first(leaf, parameter) * parameter.itemsize:
            del kept["param"]
        return kept

    def copies_of(self, parameter: Tensor) -> Mapping[str, tuple[Tensor, ...]]:
        leaf = self._leaf_of.get(id(parameter))
        if leaf is None or not is_offloaded(leaf.optimizer) or not _is_here(leaf, parameter):
            return {}
        return _offloaded(leaf, parameter)[1]

    def ranges_of(self, parameter: Tensor) -> Ranges:
        leaf = self._leaf_of.get(id(parameter))
        return ranges_of(leaf, parameter) if leaf is not None and _is_divided(leaf) else ()

    @property
    def divides_over(self) -> tuple[int, ...]:
        return next((ranks_of(leaf) for leaf in self._leaves_of_experts() if _is_divided(leaf)), ())

    def join(
        self,
        before: Callable[[], None],
        after: Callable[[], None],
        square_of_experts: Square,
        has_moved: Callable[[], bool],
        experts_here: Callable[[Tensor], list[int]],
    ) -> Any:
        optimizer = self._optimizer
        step, leaves = optimizer.step, _leaves(optimizer)

        def stepped(*args: Any, **kwargs: Any) -> Any:
            before()
            result = step(*args, **kwargs)
            after()
            return result

        undo = ExitStack()

        def put(thing: Any, name: str, method: Callable[..., Any], for_state: bool = False) -> None:
            """Replace a method until ``remove()``; with ``for_state`` it stays replaced if experts have moved."""
            setattr(thing, name, method)
            undo.callback(lambda: None if for_state and has_moved() else vars(thing).pop(name, None))

        optimizer.step = stepped  # for good: its steps are counted
        layer_wise = _layer_wise(optimizer)
        for one in layer_wise:  # it steps experts and others together: also on a stage where experts are none
            put(one, "get_grad_norm", partial(self._norm_of_all, one.get_grad_norm, square_of_experts))
        # Megatron-LM chains a layer-wise one with a distributed optimizer of what is no matrix.
        parts = optimizer.chained_optimizers if layer_wise else [leaf for leaf in leaves if not _is_for_experts(leaf)]

        def norm() -> float:
            squares = (float(one.get_grad_norm() or 0.0) ** 2 for one in parts)
            return math.sqrt((0.0 if layer_wise else float(square_of_experts(self._gradient_of))) + sum(squares))

        if optimizer not in layer_wise:
            put(optimizer, "get_grad_norm", norm)
        put_for_state = partial(put, for_state=True)
        for leaf in self._leaves_of_experts():
            if isinstance(leaf, DistributedOptimizer):
                refuse_places(optimizer, leaf, has_moved, put_for_state)
            else:
                own = self._layer_of
                held = {own[name]: one for name, one in self._experts.items() if self._leaf_of.get(id(one)) is leaf}
                here = lambda held=held: {layer: experts_here(one) for layer, one in held.items()}  # noqa: E731
                say_experts(leaf, here, put_for_state)
        return SimpleNamespace(remove=undo.close)

    def _norm_of_all(self, own_norm: Callable[[], float], square_of_experts: Square) -> float:
        """The gradient norm, with Megatron's own of all that is no expert; one optimizer steps both."""
        leaves = self._leaves_of_experts()
        mains = {id(_given(leaf, p)) for leaf in leaves for p in self._experts.values() if self._leaf_of[id(p)] is leaf}
        for leaf in leaves:
            others = [parameter for parameter in leaf.get_parameters() if id(parameter) not in mains]
            leaf.get_parameters = lambda others=others: others
        try:
            rest = own_norm()
        finally:
            for leaf in leaves:
                del leaf.get_parameters
        return math.sqrt(float(square_of_experts(self._gradient_of)) + float(rest) ** 2)

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        leaf = self._leaf_of.get(id(parameter))
        if leaf is None or not _is_here(leaf, parameter):
            return None
        given = _given(leaf, parameter)
        # With a precision-aware optimizer it has a dtype of its own, which torch lets no `grad` have.
        gradient: Tensor | None = getattr(given, "decoupled_grad", given.grad)
        return gradient

    def _leaves_of_experts(self) -> list[Any]:
        return list({id(leaf): leaf for leaf in self._leaf_of.values()}.values())


def _all(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and all that it chains."""
    yield optimizer
    for one in optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else ():
        yield from _all(one)


def _layer_wise(optimizer: Any) -> list[ChainedOptimizer]:
    return [one for one in _all(optimizer) if isinstance(one, LayerWiseDistributedOptimizer)]


def _leaves(optimizer: Any) -> list[Any]:
    every = (one for one in _all(optimizer) if not isinstance(one, ChainedOptimizer))
    return [one for one in every if not getattr(one, "is_stub_optimizer", False)]


def _is_for_experts(leaf: Any) -> bool:
    """Return whether Megatron has made it for experts: also on a rank where it holds none, as other ranks of it do."""
    return all(group["is_expert_parallel"] for group in leaf.optimizer.param_groups)


def _held(leaf: Any) -> set[int]:
    """Ids of the model's parameters that an optimizer steps, here or on ranks that hold the same."""
    if isinstance(leaf, DistributedOptimizer):
        return {id(parameter) for buffer in leaf.buffers for parameter in buffer.param_index_map}
    if isinstance(leaf, Float16OptimizerWithFloat16Params):
        groups = [*leaf.float16_groups, *leaf.fp32_from_fp32_groups]
        return {id(parameter) for group in groups for parameter in group}
    if isinstance(leaf, FP32Optimizer):
        return {id(parameter) for group in leaf.optimizer.param_groups for parameter in group["params"]}
    raise AttachError(
        f"Megatron's {type(leaf).__name__} is not supported: what it keeps for an expert cannot be reached; use "
        "optimizer='adam' or 'sgd', distributed or not"
    )


def _is_divided(leaf: Any) -> bool:
    return isinstance(leaf, DistributedOptimizer) and len(ranks_of(leaf)) > 1


def _is_here(leaf: Any, parameter: Tensor) -> bool:
    """Return whether this rank steps any of a parameter."""
    return not isinstance(leaf, DistributedOptimizer) or parameter in leaf.model_param_group_index_map


def _given(leaf: Any, parameter: Tensor) -> Tensor:
    """What a leaf's optimizer was given in the place of a parameter."""
    if isinstance(leaf, DistributedOptimizer):
        group, place = leaf.model_param_group_index_map[parameter]
        given: Tensor = leaf.optimizer.param_groups[group]["params"][place]
        return given
    main: Tensor = getattr(parameter, "main_param", parameter)
    return main if isinstance(leaf, Float16OptimizerWithFloat16Params) else parameter


def _first(leaf: Any, parameter: Tensor) -> int:
    """The element of a flat parameter with which what this rank steps of it begins."""
    if not _is_divided(leaf):
        return 0
    first: int = leaf._get_model_param_range_map(parameter)["param"].start
    return first


def _check_leaf(leaf: Any, experts: Mapping[str, Tensor]) -> None:
    for name, parameter in experts.items():
        if _is_divided(leaf):
            ranges_of(leaf, parameter)
        if not _is_here(leaf, parameter):
            continue
        given = _given(leaf, parameter)
        if given.numel() != parameter.numel() and not _is_divided(leaf):
            raise AttachError(_elsewhere(name, given.numel(), parameter))
        if is_offloaded(leaf.optimizer) and given not in leaf.optimizer.param_to_inner_param:
            raise AttachError(
                f"the optimizer would not find the master of {name} in host memory: optimizer_cpu_offload of "
                "Megatron-Core cannot step bf16 or fp16 without the distributed optimizer; set "
                "use_distributed_optimizer=True"
            )


def _elsewhere(name: str, here: int, parameter: Tensor) -> str:
    return (
        f"the optimizer keeps {here} of the {parameter.numel()} numbers of {name} on this rank: leave the model's "
        "parameters as Megatron's DistributedDataParallel has them, and give attach the optimizer that steps them"
    )


def ranks_of(leaf: Any) -> tuple[int, ...]:
    """Return the ranks over which a distributed optimizer divides its state, in their order."""
    return tuple(dist.get_process_group_ranks(leaf.data_parallel_group))


def ranges_of(leaf: Any, parameter: Tensor) -> Ranges:
    """Return for each of `ranks_of` the range of elements of a flat parameter that it steps; ``(0, 0)``: none.
    AttachError: Megatron's own range of this rank is another."""
    buffer = next(buffer for buffer in leaf.buffers if parameter in buffer.param_index_map)
    begin, end, number = buffer.param_index_map[parameter]
    bucket, ranks = buffer.buckets[number], len(ranks_of(leaf))
    size = bucket.grad_data.numel() // ranks
    found = []
    for place in range(ranks):
        first, last = bucket.offset + place * size, bucket.offset + (place + 1) * size
        kept = max(first, begin) - begin, min(last, end) - begin
        found.append(kept if kept[0] < kept[1] else (0, 0))
    here, said = found[leaf.data_parallel_group.rank()], (0, 0)
    if parameter in leaf.model_param_gbuf_map:
        own = leaf._get_model_param_range_map(parameter)["param"]
        said = own.start, own.end
    if here != said or sum(last - first for first, last in found) != end - begin:
        raise AttachError(
            f"Megatron's distributed optimizer keeps elements {said} of {tuple(parameter.shape)} here, and its buckets "
            f"would have it {here}: this version of it divides them otherwise"
        )
    return tuple(found)


def is_offloaded(optimizer: Any) -> bool:
    return isinstance(optimizer, HybridDeviceOptimizer)


def _offloaded(leaf: Any, parameter: Tensor) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, ...]]]:
    """Return what is kept for a parameter, by key, and other memory with the numbers of `MAIN` or the parameter."""
    optimizer, given = leaf.optimizer, _given(leaf, parameter)
    own_place = parameter.data_ptr() + _first(leaf, parameter) * parameter.itemsize
    inner = optimizer.param_to_inner_param[given]
    state = {key: value for key, value in optimizer.state.get(given, {}).items() if key != _MASTER}
    by_place = {tensor.data_ptr(): tensor for tensor in (given, inner) if tensor.data_ptr() != own_place}
    name = PARAMETER  # equal to the inner tensor after each step
    if inner.dtype != parameter.dtype:
        state[MAIN] = inner
        name = MAIN
        by_place.pop(inner.data_ptr(), None)
    return dict(sorted(state.items())), {name: tuple(by_place.values())} if by_place else {}


def is_precision_aware(leaf: Any) -> bool:
    """Return whether a leaf's optimizer has ``use_precision_aware_optimizer`` and keeps its state on the device."""
    return bool(getattr(leaf.config, "use_precision_aware_optimizer", False)) and not is_offloaded(leaf.optimizer)


def raw_state(optimizer: Any, given: Tensor) -> dict[str, Tensor]:
    """Return live state by key, with the scale of a float16 tensor under ``<key>_scale``; {} before the first step."""
    found = {}
    for key, value in optimizer.state.get(given, {}).items():
        name = MAIN if key == _MASTER else key
        found[name] = value
        if value.dtype in _SCALED:
            found[f"{name}_scale"] = optimizer._scales[given][key]
    return found
