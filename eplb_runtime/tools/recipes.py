"""Would a job attach? Options of a recipe (Megatron's flags, overrides of verl, or JSON), judged by the checks that
`attach` makes on a live job."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..hosts.megatron import settings as megatron
from ..hosts.megatron.settings import Unknown
from ..hosts.refusals import Refusal
from ..hosts.transformers import settings as transformers
from ..utils.files import FileError, require_readable

EP, EXPERTS = "expert_model_parallel_size", "num_moe_experts"
MOST_BYTES = 64 << 20
FLAGS: Mapping[str, tuple[str, Any]] = {
    **{name: (name, True) for name in megatron.DEFAULTS},
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "external_cuda_graph": ("cuda_graph_impl", "transformer_engine"),
    "num_experts": ("num_moe_experts", True),
    "fp8_format": ("fp8", True),
    "fp4_format": ("fp4", True),
    "use_custom_fsdp": ("use_megatron_fsdp", True),
    "use_torch_fsdp2": ("use_megatron_fsdp", True),
    "cuda_graph_scope": ("cuda_graph_modules", True),
    **dict.fromkeys(("lora_rank", "lora.rank"), ("lora", True)),
    "lora.target_modules": ("lora_target_modules", True),
}
"""Megatron's flags with ``_`` for ``-``, and verl's adapters: the setting, and its value where none follows."""
OF_THE_MODEL = Unknown("of the model's own config")
BY_FLAGS = {"num_moe_experts": OF_THE_MODEL, "optimizer_offload_fraction": 1.0}
RL = {"use_distributed_optimizer": True, "moe_token_dispatcher_type": "alltoall", "bf16": True}
BY_VERL = {**RL, **dict.fromkeys(("num_moe_experts", "moe_router_topk", "moe_permute_fusion"), OF_THE_MODEL)}
"""Defaults of Megatron-LM's flags, of slime and verl, and of verl, where those of Megatron's configs are others."""
NODES = ("actor_num_nodes", "nnodes")
RANKS_OF_A_NODE = ("actor_num_gpus_per_node", "n_gpus_per_node", "nproc_per_node")
_FLAG = re.compile(r"--([a-zA-Z][^=]*)(?:=(.*))?", re.DOTALL)
_VERL = re.compile(
    r"\+{0,2}(?:actor_rollout_ref\.(?:actor|model)|engine|optim|model|trainer)\.(?:\w+\.)*?((?:lora\.)?\w+)=(.*)",
    re.DOTALL,
)
_ARGUMENTS = re.compile(r"\$\{?(\w+(?:\[[@*]\])|\w*(?:ARG|OPT|FLAG|CONFIG|EXTRA|PARAM)\w*)\}?")
"""A word in place of arguments, where its variable has no value in the script."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_SEPARATORS = ";&|()<>\n"


class Recipe(NamedTuple):
    """Configuration of one job; ``defaults`` are those that are not Megatron's. Values may be `Unknown`."""

    name: str
    options: Mapping[str, Any]
    defaults: Mapping[str, Any]
    of: str = megatron.VERSION


def answer(recipe: Recipe) -> dict[str, Any]:
    """Judge a recipe by the checks that `attach` makes; FileError: a size is no whole number of at least 1.

    Returns:
        ``attaches`` and ``exact`` (None: not known), ``refused``, ``undecided`` settings that a check needs and that
        are not known, ``assumed`` defaults, and ``unknown`` settings that the recipe does not show, with their source.
    """
    given = recipe.options
    if recipe.of == transformers.VERSION:
        found = [asdict(one) for one in transformers.refusals(given)]
        exact = None if found else transformers.exact(given)
        return {"attaches": not found, "exact": exact, "refused": found, "undecided": [], "assumed": {}, "unknown": {}}
    for name in ("world_size", *(name for name, default in megatron.DEFAULTS.items() if type(default) is int)):
        if not isinstance(size := given.get(name, 1), Unknown) and not (isinstance(size, int) and size >= 1):
            raise FileError(f"{recipe.name}: {name} is {size!r}, and must be a whole number of at least 1")
    settings = megatron.settings_of({**recipe.defaults, **given})
    values, refused = {"world_size": given.get("world_size"), **settings.values}, list[Refusal]()
    for whole, parts in ((EXPERTS, (EP,)), ("world_size", ("pipeline_model_parallel_size", EP))):
        known = all(isinstance(values[name], int) for name in (whole, *parts))
        if known and values[whole] % (divisor := prod(values[name] for name in parts)):
            why = f"the job cannot start, it is no multiple of {' x '.join(parts)} {divisor}"
            refused.append(Refusal(whole, values[whole], why, f"set {whole} to a multiple of {divisor}"))
    refused += [one for one in megatron.refusals(settings) if not isinstance(one.value, Unknown)]
    undecided = list(settings.undecided)
    settings.undecided.clear()
    exact = megatron.exact(settings)
    unknown = {name: str(value) for name, value in settings.values.items() if isinstance(value, Unknown)}
    return {
        "attaches": False if refused else None if undecided else True,
        "exact": None if refused or settings.undecided else exact,
        "refused": [asdict(one) for one in refused],
        "undecided": undecided,
        "assumed": {name: value for name, value in settings.values.items() if name not in {*given, *unknown}},
        "unknown": unknown,
    }


def read_recipe(path: str) -> Recipe:
    """Return the recipe of a JSON file, Accelerate's YAML, a shell script or a text.

    Raises:
        FileError: there is no recipe of a model with experts in it, or it cannot be read.
        OSError: there is no such file.
    """
    file, kind = Path(path), {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}.get(Path(path).suffix)
    require_readable(file, MOST_BYTES)
    text = file.read_text(errors="replace")
    try:
        content: Any = json.loads(text) if kind == "JSON" else _yaml(text) if kind else list(_words(text))
    except Exception as error:  # of json, yaml or shlex, or there is no pyyaml
        raise FileError(f"{path}: not {kind or 'words of a shell'}: {' '.join(str(error).split())}") from None
    if options := transformers.options_of(content):
        return Recipe(file.stem, options, {}, transformers.VERSION)
    if kind and (not isinstance(content, Mapping) or content.get("host") != "megatron"):
        raise FileError(f'{path}: no recipe: write an object with "host": "megatron" and its settings')
    given = {name: value for name, value in content.items() if value is not None} if kind else {}
    of_model = dict.fromkeys((EXPERTS, "moe_router_topk"), OF_THE_MODEL)
    recipe = Recipe(file.stem, given, of_model) if kind else _of_script(file.stem, content)
    if all(recipe.options.get(name) in (None, 0, 1) for name in (EXPERTS, EP)):
        raise FileError(f"{path}: no setting of experts in it ({EXPERTS}, {EP}) nor DistributedConfig: attach says")
    return recipe


def _yaml(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


def value_of(text: str) -> Any:
    """Return a number, bool or None, where a text is one; `Unknown` where a script computes it."""
    if "$" in text or "`" in text:
        return Unknown(text)
    plain = text.strip().strip("'\"")
    with suppress(ValueError, SyntaxError):
        if isinstance(number := ast.literal_eval(plain), int | float):
            return number
    return {"true": True, "false": False, "null": None, "none": None}.get(plain.lower(), plain)


def _of_script(name: str, words: Sequence[str]) -> Recipe:
    """Return what all commands of a script say; what has two values is unknown."""
    missing, values, given = list[str](), list[Any](), list[tuple[str, list[Any]]]()
    for word in words:
        flag, override = _FLAG.fullmatch(word), _VERL.fullmatch(word)
        if found := flag or override:
            values = [] if found[2] is None else [value_of(found[2])]
            given.append((found[1].replace("-", "_"), values))
        elif _ARGUMENTS.fullmatch(word):
            missing.append(word)
        elif word.strip(_SEPARATORS):
            values.append(value_of(word))
        if override or not word.strip(_SEPARATORS):
            values = []
    said: dict[str, list[Any]] = {}
    for key, values in given:
        said[key] = values if said.get(key, values) == values else [Unknown("given twice")]
    is_verl = any(map(_VERL.fullmatch, words))
    missing += ["the file of --yaml-cfg"] * ("yaml_cfg" in said)
    options: dict[str, Any] = {}
    if missing and not is_verl:
        options = dict.fromkeys(megatron.DEFAULTS, Unknown(f"may be in {missing[0]}"))
    for name_of_flag, (setting, switched) in FLAGS.items():
        if (each := said.get(name_of_flag)) is not None:
            options[setting] = each[0] if len(each) == 1 else ",".join(map(str, each)) or switched
    options["world_size"] = _ranks(said)
    if "fp16" in said:
        options.setdefault("bf16", False)
    is_slime = "actor_num_nodes" in said
    if not is_slime and not is_verl:
        way = said.get("ckpt_format", ["torch_dist"])[0]
        by_name = "no_save_optim" in said or (way == "torch_dist" and "dist_ckpt_optim_fully_reshardable" in said)
        by_place = "save" in said and way in ("torch", "torch_dist") and not by_name
        options["saves_by_place"] = by_place and next(iter(said["save"]), True)
    if options.get("optimizer") in megatron.MUON and options.get("use_distributed_optimizer", is_slime) is True:
        # Megatron-LM's arguments take it for the layer-wise one, and nothing else is distributed then.
        options |= {"optimizer": megatron.LAYER_WISE, "use_distributed_optimizer": False}
    defaults = BY_VERL if is_verl else {**BY_FLAGS, **RL} if is_slime else BY_FLAGS
    return Recipe(name, {key: one for key, one in options.items() if one is not None}, defaults)


def _ranks(said: Mapping[str, list[Any]]) -> Any:
    """Return the ranks of a job; one node unless it is said, as torchrun and verl have it."""
    given = {"nnodes": [1], **{name: values for name, values in said.items() if values}}
    nodes, each = (next((given[one][0] for one in names if one in given), None) for names in (NODES, RANKS_OF_A_NODE))
    return nodes * each if isinstance(nodes, int) and isinstance(each, int) else Unknown("ranks of the job")


def _words(text: str) -> Iterator[str]:
    """Yield words and separators without comments, and with the values of variables that have one."""
    lexer = shlex.shlex(re.sub(r"(?m)(^|\s)#.*$", r"\1", text.replace("\\\n", " ")), None, True, _SEPARATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    variables: dict[str, str] = {}
    for token in lexer:
        word = _expand(token, variables)
        if assigned := _ASSIGNMENT.fullmatch(word):
            name, word = assigned.groups()
            variables[name] = word if variables.get(name, word) == word else f"${name}"
        yield from word.split() if "--" in word else [word]


def _expand(word: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[2])
        return found[0] if known is None and found[3] is None else known or _expand(found[3] or "", variables)

    return _VARIABLE.sub(value, word)
