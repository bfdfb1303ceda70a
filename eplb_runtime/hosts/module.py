"""Any module: MoE layers of the user's own, named one by one.

A layer keeps its experts in tensors ``[E, ...]`` and computes them by a function of the user's, or in an
``nn.ModuleList`` of equal modules. `stack_experts` makes tensors ``[E, ...]`` of such a list, and one of its modules
then computes every expert, with that expert's weights in the place of its own.
"""

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ..balancer.gradients.reduction import foreign_hooks
from ..load.clock import ExpertClock
from ..moe.experts.compute import Compute, SlotCounts
from ..moe.layer import ExpertParallelLayer
from .attaching.checks import SEED, rows_like, same_to_rounding, untouched, width_of_rows
from .attaching.description import AttachError, HostModel, MoELayer, spread_of
from .attaching.expert_spans import watch_calls

logger = logging.getLogger("eplb_runtime")
RowsThroughSlots = Callable[[Tensor, SlotCounts, Mapping[str, Tensor]], Tensor]

_LEVEL = "__"
"""Replaces the dot in the names of stacked tensors, which may have none."""
_of_lists: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[Tensor]]] = weakref.WeakKeyDictionary()
"""Parameters of the lists that `StackedExperts` were made of."""


@dataclass(frozen=True)
class MoE:
    """Where one MoE layer of a model has its experts, and how they run.

    The router and all else of the layer stay as they are: the method named by ``run`` is replaced, nothing more. It is
    given hidden states ``[..., D]``, expert ids ``[..., K]`` (integers from 0 to E - 1) and router weights
    ``[..., K]``, and gives ``[..., D]``: for each token the sum over its choices of weight times expert.

    Args:
        experts: name, within the model, of the module that holds the experts.
        run: name of the method that runs them: of that module itself, or, if it has none of this name (as an
            ``nn.ModuleList``), of the module that it is a part of.
        compute: ``(rows, counts, parameters) -> rows``, for experts in tensors ``[E, ...]``: rows ``[M, D]`` of the
            experts of this rank, one after the other; how many each has (`moe.experts.compute.SlotCounts`: ``known()``
            are numbers, ``offsets_S`` is what grouped GEMMs take); tensors ``[slots, ...]`` by name. Router weights are
            not its business, and each row's result must depend on that row alone. None: the experts are an
            ``nn.ModuleList`` that `stack_experts` has stacked.
        alignment: ``compute`` wants each expert's rows to begin at a multiple of so many, as grouped products of float8
            do (16, 32, 128): rows of zeros fill up, what comes of them is dropped, and ``counts`` counts them, too.
        real_tokens: ``(ids, weights) -> bool [tokens]``, of a call's ``[tokens, K]`` alone: false for padding, which is
            computed and not counted. Ids of -1, which are no choice, are allowed then, and weigh nothing.
            ``lambda ids, weights: (weights != 0).any(1)``: no weight is padding. None: every token counts.
    """

    experts: str
    run: str
    compute: RowsThroughSlots | None = None
    alignment: int = 1
    real_tokens: Callable[[Tensor, Tensor], Tensor] | None = None


class _RealTokens(threading.local):
    """The mask of the call that a thread is in."""

    real_T: Tensor | None = None


@dataclass(frozen=True)
class _Method:
    """The method of a module that runs the experts of a layer, whose calls are seen or taken over."""

    layer: MoE
    owner: nn.Module
    num_experts: int
    padding: _RealTokens

    def watch(self, see: Callable[[Tensor, int, int], None], clock: ExpertClock) -> Callable[[], None]:
        """Let the module's method also show ids ``[T, K]`` to ``see``, timed by ``clock``; return how to undo it."""
        return watch_calls(self.owner, self.layer.run, lambda *given: self.choices(*given)[0], see, clock)

    def install(self, parallel: ExpertParallelLayer) -> None:
        """Replace the module's method by one that checks its arguments and calls ``parallel``."""
        layer, bind = self.layer, inspect.signature(getattr(self.owner, self.layer.run)).bind

        def run(*args: Any, **kwargs: Any) -> Tensor:
            hidden, topk_ids, topk_weights = bind(*args, **kwargs).arguments.values()
            if hidden.shape[:-1] != topk_ids.shape[:-1] or topk_ids.shape != topk_weights.shape:
                raise ValueError(
                    f"{layer.run} of {layer.experts} was given hidden states {list(hidden.shape)}, expert ids "
                    f"{list(topk_ids.shape)}, router weights {list(topk_weights.shape)}: give [..., D], [..., K] twice"
                )
            chosen = self.choices(topk_ids, topk_weights)
            return parallel(hidden.reshape(-1, hidden.shape[-1]), *chosen).reshape(hidden.shape)

        setattr(self.owner, layer.run, run)

    def choices(self, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and weights of a call as ``[T, K]``. With ``real_tokens``, keep its mask for the load count; ids
        of -1 become some expert with weight 0. ValueError: ids are no integers, or the mask is wrong."""
        layer = self.layer
        # Router weights in their place have the same shape, and would be taken for experts 0 and 1 without a word.
        if topk_ids.is_floating_point() or topk_ids.dtype == torch.bool:
            raise ValueError(
                f"{layer.run} of {layer.experts} was given expert ids of {topk_ids.dtype}: it must take hidden states, "
                "expert ids (integers) and router weights, in this order"
            )
        ids_TK, weights_TK = (given.reshape(-1, topk_ids.shape[-1]) for given in (topk_ids.long(), topk_weights))
        self.padding.real_T = None
        if layer.real_tokens is None:
            return ids_TK, weights_TK
        real_T = self.padding.real_T = layer.real_tokens(ids_TK, weights_TK)
        if not isinstance(real_T, Tensor) or real_T.dtype != torch.bool or real_T.shape != ids_TK.shape[:1]:
            raise ValueError(f"real_tokens of {layer.experts} must give a tensor of bool, [{len(ids_TK)}], one a token")
        spread_TK = torch.arange(ids_TK.numel(), device=ids_TK.device).view_as(ids_TK) % self.num_experts
        return torch.where(ids_TK < 0, spread_TK, ids_TK), weights_TK.masked_fill(ids_TK < 0, 0)


def stack_experts(model: nn.Module, layers: Sequence[MoE]) -> None:
    """Replace a model's lists of experts by modules with tensors ``[E, ...]``, before there is an optimizer.

    The tensor of ``up.weight`` in each expert is ``up__weight``, with the same values. A few rows are sent through each
    expert and through the one module that computes all experts from now on, and the results are compared. What is set
    in that module later (a dropout, a temperature) holds for all experts. Layers stacked already are left alone.
    Load checkpoints of the unstacked model before this call. Two things differ, and rank 0 logs a warning: an expert
    without tokens has no gradient in a list, and optimizers pass it over; in a stack its gradient is zero, and momentum
    and weight decay go on. And a tensor has a dimension more. Not collective.

    Args:
        model: whole, not attached.
        layers: as ``attach`` will be given; those with a ``compute`` of their own have nothing to stack.

    Raises:
        AttachError: the experts of a list are not equal modules, compute other results, share tensors, or keep buffers;
            nothing is changed.
    """
    made = []
    for layer in layers:
        experts = _module(model, layer.experts)
        if layer.compute is None and isinstance(experts, nn.ModuleList):
            made.append((layer.experts, _stacked(layer.experts, experts)))
    for name, stacked in made:
        owner, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(owner), own_name, stacked)
    if made and not (dist.is_initialized() and dist.get_rank()):
        flat = next((name for name, parameter in made[0][1].named_parameters() if parameter.ndim == 2), "")
        groups = f"; {flat} has 2 dimensions now: choose by name, not by ndim, which parameters decay" if flat else ""
        logger.warning("experts are stacked: momentum and weight decay change experts without tokens, too%s", groups)


class StackedExperts(nn.Module):
    """The experts of a list, each of their tensors as one ``[E, ...]``; ``template`` computes one expert."""

    def __init__(self, template: nn.Module, tensors: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        for module in template.modules():  # what a loop sets in modules of experts is set here, and tensors are given
            for name, tensor in [*module._parameters.items()]:
                if tensor is not None:
                    del module._parameters[name]
                    setattr(module, name, tensor.detach())
        self._template = template
        self._names = tuple(tensors)
        for name, tensor in tensors.items():
            setattr(self, name.replace(".", _LEVEL), tensor)

    def __len__(self) -> int:
        return int(next(self.parameters()).shape[0])

    def __getitem__(self, number: int) -> Callable[[Tensor], Tensor]:
        """An expert as the list had it: the layer's own way can be run until `attach` replaces it."""
        return MethodType(self._run, [tensor[number] for tensor in self.parameters()])  # refuses attributes

    def _run(self, tensors: Sequence[Tensor], rows: Tensor) -> Any:
        return functional_call(self._template, dict(zip(self._names, tensors, strict=True)), (rows,))

    def compute(self, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
        """Return results ``[M, D]`` of rows sorted by slot: one call of the template for each slot with rows."""
        of_slots = zip(*(parameter.unbind() for parameter in parameters), strict=True)
        parts = zip(of_slots, rows_MD.split(list(counts_S.known())), strict=True)
        return torch.cat([self._run(tensors, rows) for tensors, rows in parts if rows.shape[0]])


def describe(model: nn.Module, layers: Sequence[MoE]) -> HostModel:
    """Return a `HostModel` with the layers that ``layers`` names, and change nothing. AttachError: a name is wrong or
    there twice, a list is not stacked, or a module holds other things than tensors ``[E, ...]``."""
    padding = _RealTokens()
    described = tuple(_describe_layer(model, layer, padding) for layer in layers)
    if len({id(layer.experts) for layer in described}) < len(described):
        raise AttachError("layers= names the same experts twice")
    return HostModel(described, lambda tokens: padding.real_T)


def watched(model: nn.Module, layers: Sequence[MoE]) -> HostModel:
    """Return a `HostModel` with the named layers, whose load can be watched only; lists of experts may be unstacked."""
    padding = _RealTokens()
    return HostModel(tuple(_watched_layer(model, layer, padding) for layer in layers), lambda tokens: padding.real_T)


def _watched_layer(model: nn.Module, layer: MoE, padding: _RealTokens) -> MoELayer:
    experts = _module(model, layer.experts)
    first = next(experts.parameters(recurse=False), None)
    if isinstance(experts, nn.ModuleList):
        num_experts = len(experts)
    elif first is not None and first.ndim:
        num_experts = first.shape[0]
    else:
        raise AttachError(f"{layer.experts} ({type(experts).__name__}) has no tensors with experts as first dimension")
    method = _Method(layer, _owner_of_run(model, layer, experts), num_experts, padding)
    return MoELayer(layer.experts, experts, num_experts, watch=method.watch, experts_here=num_experts)


def _describe_layer(model: nn.Module, layer: MoE, padding: _RealTokens) -> MoELayer:
    experts = _module(model, layer.experts)
    if layer.compute is None and not isinstance(experts, StackedExperts):
        mend = "call eplb.stack_experts(model, layers) before the optimizer is made"
        if not isinstance(experts, nn.ModuleList):
            mend = "say by MoE(..., compute=) how rows run through its tensors"
        raise AttachError(f"{layer.experts} is a {type(experts).__name__}: {mend}")
    named = dict(experts.named_parameters())
    spread = spread_of(experts)
    sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in named.items()}
    if not named or len(set(sizes.values())) > 1 or any("." in name for name in named):
        raise AttachError(
            f"{layer.experts} ({type(experts).__name__}) must hold nothing but tensors of its own with the experts as "
            f"first dimension; it has {', '.join(f'{n} {list(t.shape)}' for n, t in named.items()) or 'none'}"
        )
    if buffers := [name for name, _ in experts.named_buffers()]:
        raise AttachError(f"{layer.experts} keeps buffers ({', '.join(buffers)}), which would not move with experts")
    rows = next(iter(sizes.values()))
    if spread is not None and rows != spread.rows:
        raise AttachError(f"{layer.experts} has {rows} experts here, and shard_experts left {spread.rows}")
    if layer.alignment < 1 or (layer.compute is None and layer.alignment > 1):
        raise AttachError(
            f"{layer.experts}: alignment={layer.alignment} must be 1 or more, and is for a compute= of your own alone"
        )
    owner = _owner_of_run(model, layer, experts)
    if isinstance(experts, FSDPModule) and (owner is not experts or layer.run != "forward"):
        raise AttachError(
            f"fully_shard gathers the weights of {layer.experts} ahead of its forward, and {layer.run} of "
            f"{type(owner).__name__} runs its experts without it: let run= be the forward of that module, or leave its "
            "weights out of fully_shard (ignored_params)"
        )
    method = _Method(layer, owner, rows if spread is None else spread.rows * len(spread.ep_ranks), padding)
    return MoELayer(
        name=layer.experts,
        experts=experts,
        num_experts=method.num_experts,
        parameters=tuple(named),
        compute=experts.compute if isinstance(experts, StackedExperts) else _users(layer, tuple(named)),
        run=getattr(owner, layer.run),
        install=method.install,
        alignment=layer.alignment,
        watch=method.watch,
        replaced=_of_lists.get(experts, {}),
    )


def _users(layer: MoE, names: Sequence[str]) -> Compute:
    """Return a `Compute` around ``MoE.compute``, whose results are checked."""

    def compute(rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
        assert layer.compute is not None
        with StableSort():
            out_MD = layer.compute(rows_MD, counts_S, dict(zip(names, parameters, strict=True)))
        if not isinstance(out_MD, Tensor) or out_MD.shape != rows_MD.shape:
            given = f"{list(out_MD.shape)}" if isinstance(out_MD, Tensor) else type(out_MD).__name__
            raise ValueError(f"compute of {layer.experts} gave {given} for rows {list(rows_MD.shape)}")
        return out_MD

    return compute


class StableSort(TorchFunctionMode):
    """Makes sorting stable: code that sorts rows by expert would sum an expert's rows in an order that depends on its
    neighbours, since torch's sort puts equal keys in any order, and does on CPUs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _SORTS:
            kwargs |= {"stable": True, **dict(zip(("dim", "descending"), args[1:], strict=False))}
            args = args[:1]
        return func(*args, **kwargs)


_SORTS = (torch.sort, torch.argsort, Tensor.sort, Tensor.argsort)


def _owner_of_run(model: nn.Module, layer: MoE, experts: nn.Module) -> nn.Module:
    """The module whose method is replaced; it must take three things."""
    owner = experts
    if not callable(getattr(experts, layer.run, None)) or isinstance(experts, nn.ModuleList | StackedExperts):
        owner = model.get_submodule(layer.experts.rpartition(".")[0])
    own = getattr(owner, layer.run, None)
    if not callable(own):
        raise AttachError(f"neither {layer.experts} nor {type(owner).__name__}, which has it, has a method {layer.run}")
    count = len(inspect.signature(own).parameters)
    if count != 3:
        raise AttachError(
            f"{layer.run} of {type(owner).__name__} takes {count} arguments: it must take hidden states, expert ids "
            "and router weights, and run the experts alone"
        )
    return owner


def _stacked(name: str, experts: nn.ModuleList) -> StackedExperts:
    if not len(experts):
        raise AttachError(f"{name} is empty")
    first = experts[0]
    named = [dict(expert.named_parameters()) for expert in experts]
    for number, expert in enumerate(experts):
        if not named[0] or _kind(expert) != _kind(first):
            wrong = f"is not a module as {name}.0 is, with its settings and hooks: only equal experts can be stacked"
        elif any(True for _ in expert.buffers()):
            wrong = "keeps buffers, which would not move with experts"
        elif any(map(foreign_hooks, named[number].values())):
            wrong = "has gradient hooks on weights, which stacking would lose: register them later"
        else:
            continue
        raise AttachError(f"{name}.{number} {wrong}")
    if len({id(tensor) for own in named for tensor in own.values()}) < len(named) * len(named[0]):
        raise AttachError(f"experts of {name} share tensors: only separate experts can be moved")
    tensors = {
        key: nn.Parameter(torch.stack([own[key].detach() for own in named]), requires_grad=tensor.requires_grad)
        for key, tensor in named[0].items()
    }
    template = deepcopy(first).to("meta")
    if not next(first.parameters()).is_meta:
        _check_same_results(name, experts, template)
    stacked = StackedExperts(template, tensors).train(experts.training)
    _of_lists[stacked] = {f"{name}.{key}": weakref.ref(parameter) for key, parameter in experts.named_parameters()}
    return stacked


def _kind(expert: nn.Module) -> tuple[Any, ...]:
    """Return what equal experts have in common, with hooks on the passes of an expert and of the modules in it."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooks = [[*getattr(module, name).values()] for module in expert.modules() for name in names]
    tensors = [(key, one.shape, one.dtype, one.requires_grad) for key, one in expert.named_parameters()]
    return type(expert), repr(expert), tensors, hooks


def _check_same_results(name: str, experts: nn.ModuleList, template: nn.Module) -> None:
    """Refuse an expert that gives other results, with dropout or without, than ``template`` with its weights."""
    first = next(experts[0].parameters())
    sizes = [size for tensor in experts[0].parameters() for size in reversed(tensor.shape)]
    with untouched([experts, template], template, first.device), torch.no_grad():
        if (width := width_of_rows(experts[0], sizes, first)) is None:
            return
        rows = rows_like(first, 4, width) * torch.tensor([[0.01], [1.0], [30.0], [1000.0]]).to(first)  # limits show
        for number, expert in enumerate(experts):
            for training in (False, True):
                results = []
                for module in (expert, template):
                    torch.manual_seed(SEED)
                    given: dict[str, Tensor] = dict(expert.named_parameters())
                    results.append(functional_call(module.train(training), given, (rows,)))
                if not same_to_rounding(*results):
                    raise AttachError(
                        f"{name}.{number} gives other results than {name}.0 with the same weights and rows, but all "
                        f"stacked experts run the code of {name}.0: make the modules equal, or keep tensors [E, ...] "
                        "and say by MoE(..., compute=) how rows run through them"
                    )


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise AttachError(f"the model has no module {name}, which layers= names") from None
