"""Would a job attach? Options of a recipe, judged by the checks that `attach` makes on a live job."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..hosts.megatron import settings as megatron
from ..hosts.megatron.settings import Unknown
from ..hosts.transformers import settings as transformers
from ..utils.files import FileError, require_readable
from .formats.reading import about

EP, EXPERTS = "expert_model_parallel_size", "num_moe_experts"
MOST_BYTES, LONGEST = 1 << 20, 1 << 12  # of a file, and of a variable's value in characters
SETTINGS: Mapping[str, str] = {
    **{name: name for name in megatron.DEFAULTS},
    **{"num_experts": EXPERTS, "fp8_format": "fp8", "fp4_format": "fp4", "cuda_graph_scope": "cuda_graph_modules"},
    **dict.fromkeys(("use_custom_fsdp", "use_torch_fsdp2"), "use_megatron_fsdp"),
    **dict.fromkeys(("enable_cuda_graph", "external_cuda_graph"), "cuda_graph_impl"),
    **{"lora_rank": "lora", "lora.rank": "lora", "lora.target_modules": "lora_target_modules"},
}
"""By Megatron's flags, with ``_`` for ``-``, and by verl's names of adapters."""
GRAPHS = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
OF_THE_MODEL = Unknown("of the model's own config")
BY_FLAGS = {EXPERTS: OF_THE_MODEL, "optimizer_offload_fraction": 1.0}
RL = {"use_distributed_optimizer": True, "moe_token_dispatcher_type": "alltoall", "bf16": True}
BY_VERL = {**RL, **dict.fromkeys((EXPERTS, "moe_router_topk", "moe_permute_fusion"), OF_THE_MODEL)}
"""Defaults of Megatron-LM's flags, of slime and verl, and of verl, where those of Megatron's configs are others."""
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
    """Return what the checks of `attach` say of a recipe. ``attaches``: whether it would; None: not known. ``exact``:
    whether training stays the same to the ``"bit"`` or to ``"rounding"``; None: refused, or not known. ``refused``: the
    refusals. ``undecided``: settings that a check needs and that are not known. ``assumed``: defaults of settings that
    are not given. ``unknown``: settings without a known value, with the place that may have it. FileError: a size is no
    whole number above 0."""
    given = recipe.options
    is_megatron = recipe.of == megatron.VERSION
    of_megatron = ("world_size", *(name for name, default in megatron.DEFAULTS.items() if type(default) is int))
    for name in of_megatron if is_megatron else transformers.SIZES:
        if not isinstance(size := given.get(name), Unknown | None) and not (isinstance(size, int) and size >= 1):
            raise FileError(f"{recipe.name}: {name} is {size!r}, and must be a whole number of at least 1")
    if not is_megatron:
        found = [asdict(one) for one in transformers.refusals(given)]
        exact = None if found else transformers.exact(given)
        return {"attaches": not found, "exact": exact, "refused": found, "undecided": [], "assumed": {}, "unknown": {}}
    settings = megatron.settings_of({**recipe.defaults, **given})
    values = settings.values
    refused = [asdict(one) for one in megatron.refusals(settings) if not isinstance(one.value, Unknown)]
    undecided = list(settings.undecided)
    settings.undecided.clear()
    exact = megatron.exact(settings)
    unknown = {name: str(value) for name, value in values.items() if isinstance(value, Unknown)}
    return {
        "attaches": False if refused else None if undecided else True,
        "exact": None if refused or settings.undecided else exact,
        "refused": refused,
        "undecided": undecided,
        "assumed": {name: value for name, value in values.items() if name not in {*given, *unknown}},
        "unknown": unknown,
    }


def read_recipe(path: str) -> Recipe:
    """Return the recipe in a JSON file, Accelerate's YAML, a shell script or a text. FileError: the file cannot be
    read, or is no recipe of a model with experts."""
    file, kind = Path(path), {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}.get(Path(path).suffix)
    with about(file):
        require_readable(file, MOST_BYTES)
        text = file.read_text(errors="replace")
    try:
        if kind == "YAML":
            content: Any = import_module("yaml").safe_load(text)
        else:
            content = json.loads(text) if kind else list(_words(text))
    except Exception as error:  # of json, yaml or shlex, or there is no pyyaml
        raise FileError(f"{path}: not {kind or 'words of a shell'}: {' '.join(str(error).split())}") from None
    if options := transformers.options_of(content):
        return Recipe(file.stem, options, {}, transformers.VERSION)
    if not kind:
        given, defaults = _of_script(content)
    elif isinstance(content, Mapping) and content.get("host") == "megatron":
        given, defaults = dict(content), dict.fromkeys((EXPERTS, "moe_router_topk"), OF_THE_MODEL)
    else:
        raise FileError(f'{path}: no recipe: write an object with "host": "megatron" and its settings')
    if all(given.get(name) in (None, 0, 1) for name in (EXPERTS, EP)):
        raise FileError(f"{path}: no setting of experts in it ({EXPERTS}, {EP}) nor DistributedConfig: attach says")
    return Recipe(file.stem, {name: value for name, value in given.items() if value is not None}, defaults)


def _of_script(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what all commands of a script say, and defaults; what has two values is unknown."""
    given, values, missing = list[tuple[str, list[Any]]](), list[Any](), ""
    for word in words:
        flag, override = _FLAG.fullmatch(word), _VERL.fullmatch(word)
        if found := flag or override:
            values = [] if found[2] is None else [_value_of(found[2])]
            given.append((found[1].replace("-", "_"), values))
        elif _ARGUMENTS.fullmatch(word):
            missing = missing or word
        elif word.strip(_SEPARATORS):
            values.append(_value_of(word))
        if override or not word.strip(_SEPARATORS):
            values = []
    said: dict[str, list[Any]] = {}
    for key, values in given:
        said[key] = values if said.get(key, values) == values else [Unknown("given twice")]
    is_verl, is_slime = any(map(_VERL.fullmatch, words)), "actor_num_nodes" in said
    options: dict[str, Any] = {}
    missing = missing or "the file of --yaml-cfg" * ("yaml_cfg" in said)
    if missing and not is_verl:
        options = dict.fromkeys(megatron.DEFAULTS, Unknown(f"may be in {missing}"))
    for flag_name, setting in SETTINGS.items():
        if (each := said.get(flag_name)) is not None:
            options[setting] = each[0] if len(each) == 1 else ",".join(map(str, each)) or GRAPHS.get(flag_name, True)
    nodes = said.get("actor_num_nodes") or said.get("nnodes") or [1]  # as torchrun and verl have it
    ranks = said.get("actor_num_gpus_per_node") or said.get("n_gpus_per_node") or said.get("nproc_per_node") or [None]
    are_known = isinstance(nodes[0], int) and isinstance(ranks[0], int)
    options["world_size"] = nodes[0] * ranks[0] if are_known else Unknown("ranks of the job")
    if "fp16" in said:
        options.setdefault("bf16", False)
    if not is_slime and not is_verl:
        way = (said.get("ckpt_format") or ["torch_dist"])[0]
        by_name = "no_save_optim" in said or (way == "torch_dist" and "dist_ckpt_optim_fully_reshardable" in said)
        by_place = "save" in said and way in ("torch", "torch_dist") and not by_name
        options["saves_by_place"] = by_place and next(iter(said["save"]), True)
    if options.get("optimizer") in megatron.MUON and options.get("use_distributed_optimizer", is_slime) is True:
        # Megatron-LM's arguments take it for the layer-wise one, and nothing else is distributed then.
        options |= {"optimizer": megatron.LAYER_WISE, "use_distributed_optimizer": False}
    return options, BY_VERL if is_verl else {**BY_FLAGS, **RL} if is_slime else BY_FLAGS


def _value_of(text: str) -> Any:
    """Return a number, bool or None, where a text is one; `Unknown` where a script computes it."""
    if "$" in text or "`" in text:
        return Unknown(text)
    plain = text.strip().strip("'\"")
    for kind in (int, float):
        with suppress(ValueError):
            return kind(plain)
    return {"true": True, "false": False, "null": None, "none": None}.get(plain.lower(), plain)


def _words(text: str) -> Iterator[str]:
    """Yield words and separators without comments, and with the values of variables that have one."""
    lexer = shlex.shlex(re.sub(r"(?m)(^|\s)#.*$", r"\1", text.replace("\\\n", " ")), None, True, _SEPARATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    variables: dict[str, str] = {}

    def value(found: re.Match[str]) -> str:
        known, default = variables.get(found[1] or found[2]), found[3]
        return found[0] if known is None and default is None else known or _VARIABLE.sub(value, default or "")

    for token in lexer:
        word = _VARIABLE.sub(value, token)
        if assigned := _ASSIGNMENT.fullmatch(word):
            name, word = assigned.groups()
            is_plain = variables.get(name, word) == word and len(word) < LONGEST
            variables[name] = word if is_plain else f"${name}"
        yield from word.split() if "--" in word else [word]
