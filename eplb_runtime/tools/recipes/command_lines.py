"""Recipes that are command lines: Megatron's own flags, also through slime, and verl's overrides ``key=value``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from ...hosts.megatron.settings import LAYER_WISE, MUON, MegatronJobSettings
from ...hosts.settings import Unresolved
from .base import MARK, Recipe, RecipeError, product, value_of
from .shell import Script

FIELDS = frozenset(field.name for field in fields(MegatronJobSettings) if field.name != "assumed")
FLAGS = {
    **{name: name for name in FIELDS},
    "num_experts": "num_moe_experts",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "moe_router_padding_for_fp8": "moe_router_padding_for_quantization",
    "use_custom_fsdp": "use_megatron_fsdp",
    "use_torch_fsdp2": "use_megatron_fsdp",
    "enable_cuda_graph": "enable_cuda_graph",
    "external_cuda_graph": "external_cuda_graph",
    "cuda_graph_scope": "cuda_graph_modules",
}
"""Megatron's flags with ``_`` for ``-``, and the fields of its configs that they set."""
NODES = ("actor_num_nodes", "nnodes")
DISTRIBUTED = "torch_dist"
NOT_BY_PLACE = {
    DISTRIBUTED: ("dist_ckpt_optim_fully_reshardable", "no_save_optim"),
    "torch": ("no_save_optim",),
}
"""Flags with one of which a save in a format does not keep the optimizer's state by its place in buffers."""
RANKS_OF_A_NODE = ("actor_num_gpus_per_node", "nproc_per_node")
OPTIONS_ELSEWHERE = ("yaml_cfg",)
"""Megatron's flags that name a file with options."""
SLIME = {"use_distributed_optimizer": True, "moe_token_dispatcher_type": "alltoall", "bf16": True}
"""Settings that all of slime's jobs have; without --fp16 they are of bf16."""
BY_FLAGS = {"optimizer_offload_fraction": 1.0, "gradient_accumulation_fusion": True}
"""Defaults of Megatron's flags where its configs have others."""
MATTERS_WITH = {
    "optimizer_offload_fraction": "optimizer_cpu_offload",
    "gradient_accumulation_fusion": "overlap_dispatch_backward_with_experts_wgrad",
}
"""The flag without which one of `BY_FLAGS` means nothing."""
SWITCHED_OFF = {"no_gradient_accumulation_fusion": "gradient_accumulation_fusion"}
"""Flags that switch a setting off."""
VERL = {
    "use_distributed_optimizer": True,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
    "num_moe_experts": Unresolved("of the model's own config"),
    "moe_router_topk": Unresolved("of the model's own config"),
    "moe_permute_fusion": Unresolved("set by the model's bridge"),
}
"""verl's defaults where Megatron has others."""
VERL_ROOTS = ("actor_rollout_ref.actor.megatron.", "engine.", "actor_rollout_ref.actor.optim.", "optim.")
VERL_INNER = re.compile(r"override_(?:transformer|ddp|optimizer)_config\.")
PHASES = ("param_offload", "grad_offload", "optimizer_offload")
OF_OTHER_MODELS = ("critic.", "reward")
"""Beginnings of verl's overrides for models that a job trains or asks beside its actor."""
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ARGUMENTS = re.compile(r"\[[@*]\]|ARG|OPT|FLAG|CONFIG|EXTRA|PARAM")
_FEWEST = 3
"""Known options of a command that starts a training."""
_ALIKE = 0.92
"""From this likeness (difflib's ratio) an option is taken for a known one, misspelt; Megatron's are further apart."""


def read_command_lines(path: Path) -> Recipe:
    """The recipe of a script, or of a text that holds flags or overrides.

    Raises:
        RecipeError: it names no experts.
    """
    script = Script(path.parent).read(path.read_text(errors="replace"))
    overrides = _overrides(_most(script, lambda words: len(_overrides(words))))
    if any(key.startswith(VERL_ROOTS) for key in overrides):
        return _of_verl(path, overrides, script)
    return _of_megatron(path, _most(script, lambda words: len(set(_flags(words)[0]) & set(FLAGS))))


def _most(script: Script, known: Any) -> list[str]:
    """The words of the command with the most known options; of all, where they are spread over many."""
    commands = [_split(words) for words in script.commands]
    lines = [words for words in commands if words and (words[0].startswith("--") or _OVERRIDE.fullmatch(words[0]))]
    best = max([*commands, list(chain(*lines))], key=known, default=[])
    if known(best) >= _FEWEST:
        return best
    return _split(chain(*script.commands, *script.variables.values()))


def _split(words: Iterable[str]) -> list[str]:
    """Words one by one, also of a command that is one quoted word."""
    return [one for word in words for one in (word.split() if re.search(r"\s--|^--\S*\s", word) else [word])]


def _flags(words: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Values of each flag, and what stands for arguments that the file does not have."""
    found: dict[str, list[str]] = {}
    missing: list[str] = []
    values: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values = found[name.replace("-", "_")] = [value] if equals else []
        elif word.startswith(MARK) and word.endswith(MARK) and (_ARGUMENTS.search(word) or values is None):
            missing.append(word.strip(MARK))
        elif values is not None:
            values.append(word)
    return found, [word for word in missing if not word.startswith(("$(", "`"))]


def _of_megatron(path: Path, words: Sequence[str]) -> Recipe:
    flags, missing = _flags(words)
    missing += [f"the file of --{flag.replace('_', '-')}" for flag in OPTIONS_ELSEWHERE if flag in flags]
    options: dict[str, Any] = {}
    written: dict[str, str] = {}
    for flag, name in FLAGS.items():
        if flag in flags:
            words = [",".join(flags[flag])] if name == "cuda_graph_modules" else flags[flag]
            options[name] = value_of(words[0]) if words else True
            written[name] = f"--{flag.replace('_', '-')}"
    for flag, name in SWITCHED_OFF.items():
        if flag in flags:
            options[name], written[name] = False, f"--{flag.replace('_', '-')}"
    options = misspelt({flag: f"--{flag.replace('_', '-')}" for flag in flags}) | options
    if not (_has_experts(options) or any(flag.startswith("moe_") for flag in flags)):
        elsewhere = f", and {missing[0]} is not in the file" if missing else ""
        raise RecipeError(f"{path}: no setting of experts in it (--num-experts){elsewhere}")
    is_slime = any(flag in flags for flag in ("actor_num_nodes", "actor_num_gpus_per_node"))
    nodes = _first(flags, NODES)
    if nodes is None and "nproc_per_node" in flags:
        nodes = 1  # torchrun's default
    options["world_size"] = product(nodes, _first(flags, RANKS_OF_A_NODE))
    way = next(iter(flags.get("ckpt_format", ())), DISTRIBUTED)
    not_by_place = NOT_BY_PLACE.get(way, ())
    if not is_slime and "save" in flags and not any(flag in flags for flag in not_by_place):
        options["saves_by_place"] = way in NOT_BY_PLACE
        written["saves_by_place"] = "--save"
    if is_slime and options.get("moe_token_dispatcher_type") == "allgather":
        options["moe_token_dispatcher_type"] = "alltoall"
    defaults: dict[str, Any] = dict(SLIME) if is_slime else {}
    if is_slime and "fp16" in options:
        defaults["bf16"] = options["fp16"] if isinstance(options["fp16"], Unresolved) else not options["fp16"]
    if "num_moe_experts" not in options:
        defaults["num_moe_experts"] = Unresolved("not in the file")
    if missing:
        derived = {"expert_data_parallel_size", "saves_by_place", "phase_offload", "lora", "lora_target_modules"}
        defaults = {name: Unresolved(f"may be in {missing[0]}") for name in FIELDS - derived} | defaults
    else:
        defaults |= {name: value for name, value in BY_FLAGS.items() if MATTERS_WITH[name] in options}
    if options.get("optimizer") in MUON and {**defaults, **options}.get("use_distributed_optimizer") is True:
        # Megatron-LM's arguments take it for the layer-wise one, and nothing else is distributed then.
        options |= {"optimizer": LAYER_WISE, "use_distributed_optimizer": False}
    return Recipe(path.stem, "slime" if is_slime else "Megatron-LM", "megatron", options, defaults, written)


def _first(flags: Mapping[str, Sequence[str]], names: Iterable[str]) -> Any:
    return next((value_of(flags[name][0]) for name in names if flags.get(name)), None)


def misspelt(names: Mapping[str, str]) -> dict[str, Unresolved]:
    """Settings that names look like without being them; the texts are the names as written."""
    unknown = [name for name in names if name not in FLAGS and not name.startswith("no_")]
    near = {name: get_close_matches(name, FLAGS, 1, _ALIKE) for name in unknown}
    return {FLAGS[known[0]]: Unresolved(f"of {names[name]}, misspelt?") for name, known in near.items() if known}


def _has_experts(options: Mapping[str, Any]) -> bool:
    """Whether options are of a model with experts, as far as they say."""
    sizes = (options.get("num_moe_experts"), options.get("expert_model_parallel_size"))
    return any(isinstance(size, Unresolved) or (size or 0) > 1 for size in sizes)


def _overrides(words: Iterable[str]) -> dict[str, str]:
    return {found[1]: found[2] for word in words if (found := _OVERRIDE.fullmatch(word))}


def _of_dtype(text: str | None) -> dict[str, Any]:
    """Megatron's two settings for the dtype that verl's engines compute in."""
    if text is None:
        return {}
    dtype = value_of(text)
    if isinstance(dtype, Unresolved):
        return {"bf16": dtype, "fp16": dtype}
    return {"bf16": dtype in ("bfloat16", "bf16"), "fp16": dtype in ("float16", "fp16")}


def _of_verl(path: Path, overrides: Mapping[str, str], script: Script) -> Recipe:
    options: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, text in overrides.items():
        root = next((root for root in VERL_ROOTS if key.startswith(root)), None)
        if root is None:
            continue
        name = VERL_INNER.sub("", key.removeprefix(root))
        if name in FLAGS or name in PHASES:
            options[name], written[name] = value_of(text), key
        else:
            options = misspelt({name: key}) | options
    if not (_has_experts(options) or any(".moe_" in key for key in overrides)):
        raise RecipeError(f"{path}: no setting of experts in it (expert_model_parallel_size)")
    options |= _of_dtype(next((overrides[f"{root}dtype"] for root in VERL_ROOTS if f"{root}dtype" in overrides), None))
    phases = {name: options.pop(name) for name in PHASES if name in options}
    if phases:
        name = min(phases, key=lambda name: (phases[name] is not True, not isinstance(phases[name], Unresolved)))
        options["phase_offload"], written["phase_offload"] = phases[name], written[name]
    for key, text in overrides.items():
        if key.endswith((".lora_rank", ".lora.rank")) and not key.startswith(OF_OTHER_MODELS):
            rank = value_of(text)
            options["lora"], written["lora"] = rank if isinstance(rank, Unresolved) else bool(rank), key
        if key.endswith((".target_modules", ".lora.target_modules")) and not key.startswith(OF_OTHER_MODELS):
            options["lora_target_modules"] = value_of(text)
    flags, _ = _flags(_split(chain(*script.commands)))
    nodes = overrides.get("trainer.nnodes"), overrides.get("trainer.n_gpus_per_node")
    sizes = [value_of(text) if text is not None else None for text in nodes]
    if None in sizes:
        sizes = [_first(flags, NODES), _first(flags, RANKS_OF_A_NODE)]
    return Recipe(path.stem, "verl", "megatron", {**options, "world_size": product(*sizes)}, dict(VERL), written)
