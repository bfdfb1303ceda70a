"""LoRA of PEFT on expert matrices: which tensors it is, how they are split by expert, and what PEFT may do with them.

PEFT wraps the experts module, once for each matrix that it adapts (``ParamWrapper``), and keeps r rows for each expert
in one pair of matrices: ``lora_A [E*r, in]`` and ``lora_B [out, r*E]``. Here they are ``[E, r, in]`` and
``[E, out, r]``, and move as the experts do; PEFT's folders keep PEFT's layout. Without PEFT nothing here is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...checkpoint.state import JointAccess, LogicalView, TensorSpec
from ...checkpoint.stream import TensorList, as_named, brought
from ..attaching.description import AttachError, MoELayer, refusing, spread_of

MERGE = (
    "experts are spread over ranks: to get a whole model, save_pretrained (on every rank) and merge_and_unload in a "
    "process of its own"
)
_DELETE = (
    "experts compute with their adapters: switch one off (disable_adapter()), or delete it in a model that was not "
    "attached"
)


@dataclass(frozen=True, eq=False)
class LowRank:
    """LoRA on one matrix: PEFT's wrapper, its path within the outermost one, and the adapter's name."""

    wrapper: Any
    path: str
    adapter: str

    @property
    def matrix(self) -> str:
        """What it adapts: a parameter of the experts module."""
        return str(self.wrapper.parameter_name)

    @property
    def names(self) -> tuple[str, str]:
        """Of its two tensors, within the outermost wrapper."""
        return f"{self.path}lora_A.{self.adapter}.weight", f"{self.path}lora_B.{self.adapter}.weight"

    @property
    def linears(self) -> tuple[nn.Module, nn.Module]:
        """The modules that hold them."""
        return self.wrapper.lora_A[self.adapter], self.wrapper.lora_B[self.adapter]

    @property
    def scaling(self) -> float:
        """PEFT's factor, also rank-stabilised."""
        return float(self.wrapper.scaling[self.adapter])

    @property
    def is_on(self) -> bool:
        """Return whether it is added to the matrix now."""
        return not self.wrapper.disable_adapters and self.adapter in self.wrapper.active_adapters


@dataclass(frozen=True, eq=False)
class AdaptedExperts:
    """An experts module with LoRA around it: the outermost wrapper, the module, its path, and LoRA of each matrix."""

    outer: nn.Module
    experts: nn.Module
    path: str
    low_rank: tuple[LowRank, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the adapters' tensors within ``outer``: each pair, in the order of ``low_rank``."""
        return tuple(name for one in self.low_rank for name in one.names)

    def by_expert(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """How PEFT's tensors are seen as ``[E, ...]``."""
        experts = int(self.experts.num_experts)  # type: ignore[arg-type]
        views: dict[str, Callable[[Tensor], Tensor]] = {}
        for one in self.low_rank:
            a, b = one.names
            views[a], views[b] = partial(a_by_expert, experts), partial(b_by_expert, experts)
        return views


def a_by_expert(experts: int, matrix: Tensor) -> Tensor:
    """``[E*r, in] -> [E, r, in]``, a view."""
    return matrix.view(experts, -1, matrix.shape[1])


def b_by_expert(experts: int, matrix: Tensor) -> Tensor:
    """``[out, r*E] -> [E, out, r]``, a view."""
    return matrix.view(matrix.shape[0], -1, experts).permute(2, 0, 1)


def a_of_peft(stack: Tensor) -> Tensor:
    """``[E, r, in] -> [E*r, in]``."""
    return stack.reshape(-1, stack.shape[2])


def b_of_peft(stack: Tensor) -> Tensor:
    """``[E, out, r] -> [out, r*E]``."""
    return stack.permute(1, 2, 0).reshape(stack.shape[1], -1)


# -- finding them ------------------------------------------------------------------------------------------------------


def adapted_experts(model: nn.Module, is_experts: Callable[[nn.Module], bool]) -> Iterator[tuple[str, AdaptedExperts]]:
    """Yield name and adapters of every wrapped experts module; AttachError: they have no form by expert."""
    inside: set[int] = set()
    saver = peft_model(model)
    for name, module in model.named_modules():
        if id(module) in inside or not isinstance(getattr(module, "base_layer", None), nn.Module):
            continue
        wrappers, innermost, path = _wrappers(module)
        inside.update(id(wrapper) for _, wrapper in wrappers)
        if is_experts(innermost):
            described = _described(name, wrappers, innermost, path)
            if saver is None or not name.startswith(saver[0]):
                raise AttachError(
                    f"{name} is adapted and no PeftModel is around it, which would save the adapters: make them with "
                    "get_peft_model and attach what it gives"
                )
            yield name, described


def peft_model(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return ``(prefix of its names, it)`` of PEFT's model in this one, which saves adapters; None: there is none."""
    for name, module in model.named_modules():
        of_library = isinstance(module, PreTrainedModel) or not hasattr(type(module), "save_pretrained")
        if not of_library and hasattr(module, "peft_config"):
            return f"{name}." if name else "", module
    return None


def _wrappers(outer: nn.Module) -> tuple[list[tuple[str, nn.Module]], nn.Module, str]:
    """The wrappers from the outermost on, each with its path within that; what is wrapped, and its path."""
    wrappers, module, path = [], outer, ""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        wrappers.append((path, module))
        module, path = inner, f"{path}base_layer."
    return wrappers, module, path


def _described(name: str, wrappers: Sequence[tuple[str, nn.Module]], experts: nn.Module, path: str) -> AdaptedExperts:
    library = sys.modules.get("peft.tuners.lora.layer")
    of_peft = () if library is None else getattr(library, "ParamWrapper", ())
    outer = wrappers[0][1]
    if spread_of(experts) is not None:
        raise AttachError(
            f"{name} ({type(outer).__name__}) was put around experts that shard_experts had cut: get_peft_model first, "
            "then shard_experts"
        )
    low_rank = []
    for inner_path, wrapper in wrappers:
        if not isinstance(wrapper, of_peft):
            raise AttachError(
                f"{name} has a {type(wrapper).__name__} around the experts, and of adapters on expert matrices only "
                "PEFT's LoRA (LoraConfig(target_parameters=...)) is known here by expert: use that, target other "
                "modules, or keep adapters [E, ...] as parameters of the experts module"
            )
        low_rank.append(_low_rank(name, inner_path, wrapper, experts))
    # The innermost wrapper first, as PEFT adds them.
    return AdaptedExperts(outer, experts, path, tuple(reversed(low_rank)))


def _low_rank(name: str, path: str, wrapper: Any, experts: nn.Module) -> LowRank:
    """One wrapper, if its adapter can be split by expert and gives what PEFT gives."""
    where = f"{name}: LoRA on {wrapper.parameter_name}"
    if len(wrapper.lora_A) != 1:
        raise AttachError(
            f"{where} has {len(wrapper.lora_A)} adapters ({', '.join(wrapper.lora_A)}), and one moves with an expert: "
            "delete_adapter the others, or merge them first"
        )
    (adapter,) = wrapper.lora_A
    if wrapper.merged:
        raise AttachError(f"{where} is merged into the experts: unmerge_adapter() before attach")
    odd = {
        "DoRA or another variant": bool(wrapper.lora_variant) or bool(wrapper.use_dora.get(adapter)),
        "dropout": not isinstance(wrapper.lora_dropout[adapter], nn.Identity),
        "a bias": getattr(wrapper.lora_B[adapter], "bias", None) is not None,
    }
    if wrong := [what for what, is_so in odd.items() if is_so]:
        raise AttachError(f"{where} has {' and '.join(wrong)}, which this release cannot split by expert: leave it out")
    one = LowRank(wrapper, path, adapter)
    matrix = getattr(experts, one.matrix)
    if matrix.ndim != 3:
        raise AttachError(
            f"{where} of shape {tuple(matrix.shape)} is one pair of matrices for all experts, which cannot be split: "
            "target the experts' matrices alone"
        )
    if any(isinstance(linear.weight, DTensor) for linear in one.linears):
        raise AttachError(f"{where} is sliced by fully_shard: leave experts with adapters out of it (ignored_params)")
    return one


# -- what PEFT may do with them ----------------------------------------------------------------------------------------


def follow(model: nn.Module, layers: Sequence[tuple[MoELayer, AdaptedExperts]]) -> None:
    """Let PEFT save and load adapters of experts that are spread; refuse what would be wrong without a word."""
    for layer, adapted in layers:
        for one in adapted.low_rank:
            _load_by_expert(model, layer, adapted, one)
            late = f"an adapter on the experts of {layer.name} was added after attach: add it before, and attach then"
            object.__setattr__(one.wrapper, "update_layer", refusing(late))
    for module in model.modules():
        if hasattr(type(module), "_unload_and_optionally_merge"):
            for name in ("_unload_and_optionally_merge", "merge_adapter"):
                object.__setattr__(module, name, refusing(MERGE))
            object.__setattr__(module, "delete_adapter", refusing(_DELETE))
    _save_together(model, layers)


def _load_by_expert(model: nn.Module, layer: MoELayer, adapted: AdaptedExperts, one: LowRank) -> None:
    """Take PEFT's layout where its tensors are loaded: this rank's experts of them."""
    views = adapted.by_expert()
    for name, linear in zip(one.names, one.linears, strict=True):
        rank = one.wrapper.r[one.adapter]

        def loading(state: dict[str, Any], prefix: str, *_: Any, name: str = name, rank: int = rank) -> None:
            whole = state.get(f"{prefix}weight")
            if not isinstance(whole, Tensor) or whole.ndim != 2:
                return
            view = LogicalView(model)
            index = view.layer_of(f"{layer.name}.{name}")
            rows = whole.shape[1 if name == one.names[1] else 0]
            if index is None or rows != layer.num_experts * rank:
                return  # torch says that shapes differ
            here = torch.tensor(view.experts_here(index), device=whole.device)
            state[f"{prefix}weight"] = views[name](whole)[here].contiguous()

        linear._register_load_state_dict_pre_hook(loading)


def _save_together(model: nn.Module, layers: Sequence[tuple[MoELayer, AdaptedExperts]]) -> None:
    found = peft_model(model)
    assert found is not None
    prefix, saver = found
    load: Any = saver.load_adapter
    own: Any = saver.save_pretrained
    of_peft = {
        f"{layer.name}.{name}": back
        for layer, adapted in layers
        for one in adapted.low_rank
        for name, back in zip(one.names, (a_of_peft, b_of_peft), strict=True)
    }

    def save_pretrained(save_directory: str | Path, *arguments: Any, **options: Any) -> None:
        """As the library's, adapters in PEFT's layout. Collective; the first rank writes."""
        if options.pop("state_dict", None) is not None:
            raise AttachError("save_pretrained of an attached model takes no state_dict: adapters are gathered here")
        options.pop("is_main_process", None)
        view = LogicalView(model)
        view.refuse_freed("save_pretrained of an attached model", merged_too=False)
        joint = JointAccess.of(view)
        state = detached_state(saver.state_dict)
        for name, stack in _brought(view, list(of_peft), joint.ranks[0]).items():
            state[name.removeprefix(prefix)] = of_peft[name](stack)
        write = partial(own, save_directory, *arguments, is_main_process=True, state_dict=state, **options)
        joint.on_first(f"{save_directory} was not written", write)

    def load_adapter(*arguments: Any, **options: Any) -> Any:
        """Load as the library does, into the parameters that are there."""
        if options.get("low_cpu_mem_usage"):
            raise AttachError(
                "load_adapter(low_cpu_mem_usage=True) makes other parameters than those that are attached: leave it out"
            )
        loaded = load(*arguments, **options)
        LogicalView(model).weights_changed()  # replica slots follow
        return loaded

    object.__setattr__(saver, "save_pretrained", save_pretrained)
    object.__setattr__(saver, "load_adapter", load_adapter)


def _brought(view: LogicalView, names: Sequence[str], rank: int) -> dict[str, Tensor]:
    """``[E, ...]`` in logical order on the CPU of one rank; on the others nothing. Collective."""
    assert view.balancer is not None
    weights = []
    for name in names:
        rows = view.parameters[name]
        spec = TensorSpec((view.num_experts, *rows.shape[1:]), rows.dtype)
        weights.append(as_named(name, rows, view.layer_of(name), spec))
    tensors = TensorList(view.balancer, {view.balancer.runtime.job.stages[0]: weights})
    return dict(brought(tensors, [rank] * len(tensors.pieces)))


def detached_state(state_dict: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What ``state_dict`` gives, read as live memory: it is no checkpoint of the user's, and there is no warning that
    it is in part."""
    state = state_dict(keep_vars=True)
    return {key: value.detach() if isinstance(value, Tensor) else value for key, value in state.items()}


def is_saved_with_adapters(model: nn.Module) -> bool:
    """Return whether ``save_pretrained`` of this model writes adapters and nothing else."""
    if isinstance(model, PreTrainedModel):
        return bool(getattr(model, "_hf_peft_config_loaded", False))
    return hasattr(model, "peft_config")
