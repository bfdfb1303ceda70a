"""LoRA of PEFT on expert matrices: which tensors it is, how they are split by expert, and what PEFT may do with them.

PEFT wraps the experts module, once for each matrix that it adapts (``ParamWrapper``), and keeps r rows for each expert
in one pair of matrices: ``lora_A [E*r, in]`` and ``lora_B [out, r*E]``. Here they are ``[E, r, in]`` and
``[E, out, r]``, and move as the experts do; PEFT's folders keep PEFT's layout. Without PEFT nothing here is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...checkpoint.state import JointAccess, LogicalView
from ...checkpoint.stream import brought, weights_of
from ..attaching.description import AttachError, MoELayer, refusing, spread_of

MERGE = (
    "experts are spread over ranks: to get a whole model, save_pretrained (on every rank) and merge_and_unload in a "
    "process of its own"
)
DELETE = (
    "experts compute with their adapters: switch one off (disable_adapter()), or delete it in a model that was not "
    "attached"
)
BY_EXPERT: Mapping[str, Callable[[int, Tensor], Tensor]] = {
    "lora_A": lambda experts, matrix: matrix.view(experts, -1, matrix.shape[1]),
    "lora_B": lambda experts, matrix: matrix.view(matrix.shape[0], -1, experts).permute(2, 0, 1),
}
"""PEFT's ``[E*r, in]`` as ``[E, r, in]``, and its ``[out, r*E]`` as ``[E, out, r]``: views."""
OF_PEFT: Mapping[str, Callable[[Tensor], Tensor]] = {  # the way back
    "lora_A": lambda stack: stack.flatten(0, 1),
    "lora_B": lambda stack: stack.permute(1, 2, 0).flatten(1),
}


@dataclass(frozen=True, eq=False)
class LowRank:
    """LoRA on one matrix: PEFT's wrapper, its path within the outermost one, and the adapter's name."""

    wrapper: Any
    path: str
    adapter: str

    @property
    def tensors(self) -> dict[str, tuple[str, Any]]:
        """Return, by tensor name within the outermost wrapper, the kind (``lora_A``, ``lora_B``) and the module."""
        own, name = self.wrapper, self.adapter
        return {f"{self.path}{kind}.{name}.weight": (kind, getattr(own, kind)[name]) for kind in BY_EXPERT}


@dataclass(frozen=True, eq=False)
class AdaptedExperts:
    """An experts module and LoRA around it: the module, its path within the outermost wrapper, and LoRA of each matrix,
    the innermost first, as PEFT adds them; none: it is not adapted."""

    experts: nn.Module
    path: str
    low_rank: tuple[LowRank, ...]

    @property
    def by_expert(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return, by tensor name, a function that views PEFT's ``lora_A`` or ``lora_B`` as ``[E, ...]``."""
        experts: Any = self.experts.num_experts
        kinds = {name: kind for one in self.low_rank for name, (kind, _) in one.tensors.items()}
        return {name: partial(BY_EXPERT[kind], experts) for name, kind in kinds.items()}


def follows_experts_interface(experts: nn.Module) -> bool:
    """Return whether a module has what the library's ``use_experts_implementation`` decorator gives to experts."""
    return all(hasattr(experts, name) for name in ("num_experts", "has_gate", "is_transposed", "_is_expert_parallel"))


def experts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, AdaptedExperts]]:
    """Yield name, outermost wrapper (or the module itself) and adapters of every experts module, in model order.
    AttachError: its adapters cannot be split by expert, or no PeftModel would save them."""
    seen, saver = set[int](), peft_model(model)
    for name, outer in model.named_modules():
        wrappers, experts, path = [], outer, ""
        while isinstance(inner := getattr(experts, "base_layer", None), nn.Module):
            wrappers.append((path, experts))
            experts, path = inner, f"{path}base_layer."
        if id(experts) in seen or not follows_experts_interface(experts):
            continue
        seen.add(id(experts))  # the wrappers inside come later
        if wrappers and spread_of(experts) is not None:
            raise AttachError(
                f"{name} ({type(outer).__name__}) was put around experts that shard_experts had cut: get_peft_model "
                "first, then shard_experts"
            )
        low_rank = tuple(_low_rank(name, at, wrapper, experts) for at, wrapper in reversed(wrappers))
        if wrappers and (saver is None or not name.startswith(saver[0])):
            raise AttachError(
                f"{name} is adapted and no PeftModel is around it, which would save the adapters: make them with "
                "get_peft_model and attach what it gives"
            )
        yield name, outer, AdaptedExperts(experts, path, low_rank)


def peft_model(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the prefix of names, and the module, of PEFT's model in this one; None: there is none."""
    for name, module in model.named_modules():
        of_library = isinstance(module, PreTrainedModel) or not hasattr(type(module), "save_pretrained")
        if not of_library and hasattr(module, "peft_config"):
            return f"{name}." if name else "", module
    return None


def _low_rank(name: str, path: str, wrapper: Any, experts: nn.Module) -> LowRank:
    """One wrapper, if its adapter can be split by expert and gives what PEFT gives."""
    of_peft: Any = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())
    if not isinstance(wrapper, of_peft):
        raise AttachError(
            f"{name} has a {type(wrapper).__name__} around the experts, and of adapters on expert matrices only PEFT's "
            "LoRA (LoraConfig(target_parameters=...)) is known here by expert: use that, target other modules, or keep "
            "adapters [E, ...] as parameters of the experts module"
        )
    where = f"{name}: LoRA on {wrapper.parameter_name}"
    if len(wrapper.lora_A) != 1:
        raise AttachError(
            f"{where} has {len(wrapper.lora_A)} adapters ({', '.join(wrapper.lora_A)}), and one moves with an expert: "
            "delete_adapter the others, or merge them first"
        )
    (adapter,) = wrapper.lora_A
    one, matrix = LowRank(wrapper, path, adapter), getattr(experts, wrapper.parameter_name)
    is_variant = bool(wrapper.lora_variant) or bool(wrapper.use_dora.get(adapter))
    left_out = ", which this release cannot split by expert: leave it out"
    for problem, is_so in {
        "is merged into the experts: unmerge_adapter() before attach": wrapper.merged,
        f"has DoRA or another variant{left_out}": is_variant,
        f"has dropout{left_out}": not isinstance(wrapper.lora_dropout[adapter], nn.Identity),
        f"has a bias{left_out}": getattr(wrapper.lora_B[adapter], "bias", None) is not None,
        f"of shape {tuple(matrix.shape)} is one pair of matrices for all experts, which cannot be split: target the "
        "experts' matrices alone": matrix.ndim != 3,
        "is sliced by fully_shard: leave experts with adapters out of it (ignored_params)": any(
            isinstance(linear.weight, DTensor) for _, linear in one.tensors.values()
        ),
    }.items():
        if is_so:
            raise AttachError(f"{where} {problem}")
    return one


def patch_adapters(model: nn.Module, layers: Sequence[tuple[MoELayer, AdaptedExperts]]) -> None:
    """Replace PEFT's ``save_pretrained`` and ``load_adapter`` by ones for spread experts. What would merge, delete or
    add their adapters raises AttachError from now on."""
    kinds: dict[str, str] = {}
    for layer, adapted in layers:
        late = f"an adapter on the experts of {layer.name} was added after attach: add it before, and attach then"
        for one in adapted.low_rank:
            object.__setattr__(one.wrapper, "update_layer", refusing(late))
            for name, (kind, linear) in one.tensors.items():
                full = f"{layer.name}.{name}"
                kinds[full] = kind
                linear._register_load_state_dict_pre_hook(partial(_take_own, model, full, kind))
    for module in model.modules():
        if hasattr(type(module), "_unload_and_optionally_merge"):
            for name in ("_unload_and_optionally_merge", "merge_adapter", "delete_adapter"):
                object.__setattr__(module, name, refusing(DELETE if name == "delete_adapter" else MERGE))
    _save_together(model, kinds)


def _take_own(model: nn.Module, name: str, kind: str, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this rank's experts of an adapter's tensor where it is loaded in PEFT's layout."""
    view, whole = LogicalView(model), state.get(f"{prefix}weight")
    index = view.layer_of(name)
    if index is None or not isinstance(whole, Tensor) or whole.ndim != 2:
        return
    if whole.numel() == view.num_experts * view.parameters[name][0].numel():  # else torch says that shapes differ
        here = torch.tensor(view.experts_here(index), device=whole.device)
        state[f"{prefix}weight"] = BY_EXPERT[kind](view.num_experts, whole)[here].contiguous()


def _save_together(model: nn.Module, kinds: Mapping[str, str]) -> None:
    found = peft_model(model)
    assert found is not None
    prefix, saver = found
    own: Any = saver.save_pretrained
    load: Any = saver.load_adapter

    def save_pretrained(save_directory: str | Path, *arguments: Any, **options: Any) -> None:
        """Save adapters of all ranks' experts in PEFT's layout. Collective; the first rank writes."""
        if options.pop("state_dict", None) is not None:
            raise AttachError("save_pretrained of an attached model takes no state_dict: adapters are gathered here")
        options.pop("is_main_process", None)
        view = LogicalView(model)
        view.refuse_freed("save_pretrained of an attached model", merged_too=False)
        joint = JointAccess.of(view)
        live = saver.state_dict(keep_vars=True)
        state = {key: value.detach() if isinstance(value, Tensor) else value for key, value in live.items()}
        assert view.balancer is not None
        weights, failed = weights_of(model, 0), f"{save_directory} was not written"
        weights = [weight for weight in weights if kinds.keys() & weight.sources.keys()]
        for name, stack in brought(view.balancer, weights, joint, failed):
            state[name.removeprefix(prefix)] = OF_PEFT[kinds[name]](stack.cpu())
        write = partial(own, save_directory, *arguments, is_main_process=True, state_dict=state, **options)
        joint.on_first(failed, write)

    def load_adapter(*arguments: Any, **options: Any) -> Any:
        """Load as the library does, into the attached parameters, and let replicas follow."""
        if options.get("low_cpu_mem_usage"):
            raise AttachError(
                "load_adapter(low_cpu_mem_usage=True) makes other parameters than those that are attached: leave it out"
            )
        loaded = load(*arguments, **options)
        LogicalView(model).weights_changed()  # replica slots follow
        return loaded

    object.__setattr__(saver, "save_pretrained", save_pretrained)
    object.__setattr__(saver, "load_adapter", load_adapter)


def is_saved_with_adapters(model: nn.Module) -> bool:
    """Return whether ``save_pretrained`` of this model writes adapters and nothing else."""
    is_plain = isinstance(model, PreTrainedModel)
    return bool(getattr(model, "_hf_peft_config_loaded", False)) if is_plain else hasattr(model, "peft_config")
