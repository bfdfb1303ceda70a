"""Would a job be balanced? A recipe is read as people write it (flags of Megatron and slime; overrides `key=value` of
verl; JSON; a config function of torchtitan) and judged by the checks that `attach` makes."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from ..hosts.megatron import settings as megatron
from ..hosts.settings import Exact, Refusal, Unknown, UnknownError, run_checks
from ..hosts.torchtitan import settings as torchtitan
from ..utils.errors import one_line
from ..utils.files import FileError, require_readable

HOSTS: Mapping[str, Any] = {"megatron": megatron, "torchtitan": torchtitan}
MOST_BYTES = 64 << 20
FLAGS: Mapping[str, tuple[str, Any]] = {
    **{name: (name, True) for name in (*megatron.DEFAULTS, "enable_cuda_graph", "external_cuda_graph")},
    "num_experts": ("num_moe_experts", True),
    "fp8_format": ("fp8", True),
    "fp4_format": ("fp4", True),
    "use_custom_fsdp": ("use_megatron_fsdp", True),
    "use_torch_fsdp2": ("use_megatron_fsdp", True),
    "cuda_graph_scope": ("cuda_graph_modules", True),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
}
"""Megatron's flags with ``_`` for ``-``: the setting, and its value where none follows."""
OF_THE_MODEL = Unknown("of the model's own config")
BY_FLAGS: Mapping[str, Any] = {"optimizer_offload_fraction": 1.0, "gradient_accumulation_fusion": True}
RL: Mapping[str, Any] = {"use_distributed_optimizer": True, "moe_token_dispatcher_type": "alltoall", "bf16": True}
OF_PROJECTS: Mapping[str, Mapping[str, Any]] = {
    "Megatron-LM": {"num_moe_experts": Unknown("not in the file"), **BY_FLAGS},
    "slime": {"num_moe_experts": Unknown("not in the file"), **BY_FLAGS, **RL},
    "verl": {
        **RL,
        "num_moe_experts": OF_THE_MODEL,
        "moe_router_topk": OF_THE_MODEL,
        "moe_permute_fusion": Unknown("set by the model's bridge"),
    },
    "Megatron-Bridge": {
        "moe_permute_fusion": Unknown("set by the model's provider"),
        "gradient_accumulation_fusion": True,  # its default where TransformerEngine is there
    },
}
"""Defaults of projects where Megatron's configs have others."""
_VERL = re.compile(
    r"(?:actor_rollout_ref\.actor\.(?:megatron|optim)|engine|optim)\."
    r"(?:override_(?:transformer|ddp|optimizer)_config\.)?(\w+)"
)
_LORA = re.compile(r"(?!critic\.|reward).*\.(?:lora_rank|lora\.rank|target_modules)")
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_FUNCTION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*[.:][A-Za-z_]\w*")
_ARGUMENTS = re.compile(r"\$\{?(\w+(?:\[[@*]\])|\w*(?:ARG|OPT|FLAG|CONFIG|EXTRA|PARAM)\w*)\}?")
"""A word that stands for arguments, where its variable has no value in the script."""
_COMPUTED = re.compile(r"\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\})")
_BEFORE = ("then", "do", "else", "export", "declare", "local", "readonly")
_SEPARATORS = ";&|()<>\n"


class RecipeError(FileError):
    """A recipe that cannot be judged; the message names it and says why."""


@dataclass(frozen=True)
class Recipe:
    """How one training job is configured.

    Args:
        name: of the file or function.
        host: the framework that trains: "megatron" or "torchtitan".
        options: by the framework's own names; values may be `Unknown`.
        project: whose recipe it is; its defaults are taken for options that are not given.
    """

    name: str
    host: str
    options: Mapping[str, Any]
    project: str = ""


@dataclass(frozen=True)
class RecipeAnswer:
    """Whether a recipe's job could be balanced; None in a field: not known.

    Args:
        attaches, replicas: whether homes can move, and whether ranks can have replica slots.
        undecided: settings that a check needs and that are not known.
        exact: how equal training with and without moves is.
        assumed: settings that have a default, which the recipe does not give.
        unknown: settings whose value the recipe does not show, and where it comes from.
    """

    attaches: bool | None
    replicas: bool | None
    exact: Exact | None
    refused: Sequence[Refusal]
    undecided: Sequence[str]
    assumed: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return asdict(self)


def answer(recipe: Recipe) -> RecipeAnswer:
    """Judge a recipe by the checks of its framework.

    Raises:
        RecipeError: a size is no whole number of at least 1, or EP does not divide the experts.
    """
    host = HOSTS[recipe.host]
    given = {name: value for name, value in recipe.options.items() if value is not None}
    sizes = [name for name, default in host.settings_of({}).values.items() if type(default) is int]
    for name in (name for name in (*sizes, "world_size") if name in given):
        size = given[name]
        if not isinstance(size, Unknown) and not (isinstance(size, int) and size >= 1):
            raise RecipeError(f"{recipe.name}: {name} is {size!r}, and must be a whole number of at least 1")
    settings = host.settings_of({**OF_PROJECTS.get(recipe.project, {}), **given})
    experts, ep = map(settings.values.get, (host.EXPERTS, host.RANKS))
    if isinstance(experts, int) and isinstance(ep, int) and experts % ep:
        raise RecipeError(f"{recipe.name}: {host.EXPERTS} {experts} is no multiple of {host.RANKS} {ep}")
    refused, undecided = run_checks(settings, host.CHECKS)
    without_replicas, undecided_replicas = run_checks(settings, (host.without_replicas,))
    exact: Exact | None = None
    with suppress(UnknownError):
        exact = host.exact(settings)
    unknown = {name: str(value) for name, value in settings.values.items() if isinstance(value, Unknown)}
    undecided = [*undecided, *undecided_replicas]
    attaches = False if refused else None if undecided else True
    return RecipeAnswer(
        attaches,
        False if without_replicas else attaches,
        exact,
        refused,
        undecided,
        {name: value for name, value in settings.values.items() if name not in given and name not in unknown},
        unknown,
    )


def read_recipe(path: str) -> Recipe:
    """Return the recipe of a file, JSON, a shell script or text; or of a torchtitan config function by import path.

    Raises:
        RecipeError: there is no recipe of a model with experts in it.
        FileError, OSError: it cannot be read.
    """
    file = Path(path)
    if not file.exists() and _FUNCTION.fullmatch(path) and file.suffix not in (".sh", ".json", ".txt"):
        return _of_function(path)
    if require_readable(file, MOST_BYTES) == 0 or not (text := file.read_text(errors="replace")).strip():
        raise RecipeError(f"{path}: empty")
    try:
        return _of_json(file, json.loads(text)) if file.suffix == ".json" else _of_script(file, text)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}: not JSON: {error}") from None
    except ValueError as error:  # shlex
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{path}: {error}: write the flags of the training's command into a text file") from None


def value_of(text: str) -> Any:
    """Return a number, bool or None, where a text is one; `Unknown` where a script computes it."""
    if "$" in text:
        return Unknown(text)
    plain = text.strip().strip("'\"")
    known = {"true": True, "false": False, "null": None, "none": None}
    if plain.lower() in known:
        return known[plain.lower()]
    if re.fullmatch(r"[+-]?\d+", plain):
        return int(plain)
    try:
        number = ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        return plain
    return number if isinstance(number, int | float) else plain


def _of_script(path: Path, text: str) -> Recipe:
    found, missing = _said(text)
    flags = {name[2:]: values for name, values in found.items() if name.startswith("--")}
    overrides = {name: values[0] for name, values in found.items() if not name.startswith("--")}
    settings = {key: match[1] for key in overrides if (match := _VERL.fullmatch(key))}
    of_megatron = _of_megatron(path.stem, flags, missing)
    recipe = _of_verl(path.stem, flags, overrides, settings) if settings else of_megatron
    if not (_has_experts(recipe.options) or any(name.startswith("moe_") for name in (*flags, *settings.values()))):
        raise RecipeError(f"{path}: no setting of experts in it (--num-experts)")
    return recipe


def _said(text: str) -> tuple[dict[str, list[Any]], list[str]]:
    """Return values of flags and of overrides, and words for arguments that the script does not have. Nothing is run,
    and conditions are not looked at: what has two values is unknown."""
    found: dict[str, list[Any]] = {}
    missing: list[str] = []
    variables: dict[str, str] = {}
    words: list[str] = []
    for token in [*_tokens(text), "\n"]:
        if token.strip(_SEPARATORS):
            words.append(token)
            continue
        while words and words[0] in _BEFORE:
            del words[0]
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
            name, value = assigned[1], _expand(assigned[2], variables)
            variables[name] = value if variables.get(name, value) == value else f"${name}"
            words = [value, *words[1:]] if "--" in value else words[1:]
        values, given = list[Any](), dict[str, list[Any]]()
        for word in _expanded(words, variables):
            if re.match("--[a-zA-Z]", word):
                name, equals, value = word.partition("=")
                values = given[f"--{name[2:].replace('-', '_')}"] = [value_of(value)] if equals else []
            elif override := _OVERRIDE.fullmatch(word):
                given[override[1]] = [value_of(override[2])]
            elif _ARGUMENTS.fullmatch(word):
                missing.append(word)
            else:
                values.append(value_of(word))
        for name, values in given.items():
            found[name] = values if found.get(name, values) == values else [Unknown("given twice")]
        words = []
    return found, missing


def _expanded(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return words with the values of their variables, as far as they are known; a value may be several words."""
    each = (_expand(word, variables) for word in words)
    return [part for word in each for part in (word.split() if "--" in word else [word] if word else [])]


def _expand(word: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[2])
        return found[0] if known is None and found[3] is None else known or _expand(found[3] or "", variables)

    return _VARIABLE.sub(value, word)


def _tokens(text: str) -> shlex.shlex:
    """Return words and separators; what a script computes is ``$COMPUTED``."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text.replace("\\\n", " "))
    before = ""
    while before != text:
        before, text = text, _COMPUTED.sub("$COMPUTED", text)
    found = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    found.whitespace, found.commenters, found.whitespace_split = " \t\r", "", True
    return found


def _of_megatron(name: str, flags: Mapping[str, list[Any]], missing: list[str]) -> Recipe:
    missing += ["the file of --yaml-cfg"] * ("yaml_cfg" in flags)
    first = {name: values[0] for name, values in flags.items() if values}
    options: dict[str, Any] = {}
    if missing:
        options = {setting: Unknown(f"may be in {missing[0]}") for setting in megatron.DEFAULTS}
    for flag, (setting, switched) in FLAGS.items():
        if flag in flags:
            is_list = setting == "cuda_graph_modules" and len(flags[flag]) > 1
            options[setting] = list(map(str, flags[flag])) if is_list else first.get(flag, switched)
    project = "slime" if {"actor_num_nodes", "actor_num_gpus_per_node"} & {*flags} else "Megatron-LM"
    if project == "slime":
        nodes, ranks = first.get("actor_num_nodes"), first.get("actor_num_gpus_per_node")
        if "fp16" in flags:
            options["bf16"] = options["fp16"] if isinstance(options["fp16"], Unknown) else not options["fp16"]
        if options.get("moe_token_dispatcher_type") == "allgather":
            options["moe_token_dispatcher_type"] = "alltoall"
    else:
        ranks = first.get("nproc_per_node")
        nodes = first.get("nnodes", 1 if ranks else None)  # torchrun's default
        way = first.get("ckpt_format", "torch_dist")
        by_name = "no_save_optim" in flags or (way == "torch_dist" and "dist_ckpt_optim_fully_reshardable" in flags)
        options["saves_by_place"] = "save" in flags and way in ("torch", "torch_dist") and not by_name
    options["world_size"] = _product(nodes, ranks)
    is_distributed = {**OF_PROJECTS[project], **options}.get("use_distributed_optimizer")
    if options.get("optimizer") in megatron.MUON and is_distributed is True:
        # Megatron-LM's arguments take it for the layer-wise one, and nothing else is distributed then.
        options |= {"optimizer": megatron.LAYER_WISE, "use_distributed_optimizer": False}
    return Recipe(name, "megatron", options, project)


def _of_verl(
    name: str, flags: Mapping[str, list[Any]], overrides: Mapping[str, Any], settings: Mapping[str, str]
) -> Recipe:
    by_name = {setting: overrides[key] for key, setting in settings.items()}
    options = {setting: value for setting, value in by_name.items() if setting in megatron.DEFAULTS}
    if "dtype" in by_name:
        dtype = by_name["dtype"]
        for short, long in (("bf16", "bfloat16"), ("fp16", "float16")):
            options[short] = dtype if isinstance(dtype, Unknown) else dtype in (short, long)
    for key in filter(_LORA.fullmatch, overrides):
        value = overrides[key]
        if key.endswith("target_modules"):
            options["lora_target_modules"] = value
        else:
            options["lora"] = value if isinstance(value, Unknown) else bool(value)
    sizes = [overrides.get("trainer.nnodes"), overrides.get("trainer.n_gpus_per_node")]
    if None in sizes:
        sizes = [next(iter(flags.get(flag, ())), None) for flag in ("nnodes", "nproc_per_node")]
    return Recipe(name, "megatron", {**options, "world_size": _product(*sizes)}, "verl")


def _has_experts(options: Mapping[str, Any]) -> bool:
    sizes = (options.get(name) for host in HOSTS.values() for name in (host.EXPERTS, host.RANKS))
    return any(isinstance(size, Unknown) or (isinstance(size, int) and size > 1) for size in sizes)


def _product(*sizes: Any) -> Any:
    """Return ranks of a job, of its nodes and the ranks of a node; None or `Unknown` where one of them is."""
    odd = next((size for size in sizes if not isinstance(size, int)), 0)
    return prod(sizes) if odd == 0 else odd if odd is None or isinstance(odd, Unknown) else Unknown(str(odd))


def _of_json(path: Path, entry: Any) -> Recipe:
    if not isinstance(entry, Mapping) or entry.get("host") not in HOSTS:
        raise RecipeError(f'{path}: no recipe: write an object with "host": {" or ".join(HOSTS)} and its settings')
    host, project = str(entry["host"]), str(entry.get("project", ""))
    options = {name: value for name, value in entry.items() if value is not None}
    if not _has_experts(options):
        raise RecipeError(f"{path}: it has no experts ({HOSTS[host].EXPERTS}, {HOSTS[host].RANKS})")
    if host == "megatron":
        options = {"num_moe_experts": OF_THE_MODEL, "moe_router_topk": OF_THE_MODEL, **options}
    return Recipe(str(entry.get("name", path.stem)), host, options, project)


def _of_function(path: str) -> Recipe:
    """Return the recipe that a function of torchtitan's configs returns. Runs it."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        config = getattr(import_module(module), name)()
    except Exception as error:
        raise RecipeError(f"{path}: {one_line(error)}") from None
    config = getattr(config, "trainer", config) if not hasattr(config, "parallelism") else config
    if not hasattr(config, "parallelism"):
        raise RecipeError(f"{path}: gives a {type(config).__name__}, which has no parallelism: no config of a Trainer")
    layers = getattr(getattr(getattr(config, "model_spec", None), "model", None), "layers", None) or ()
    experts = [getattr(getattr(layer, "moe", None), "routed_experts", None) for layer in layers]
    dispatchers = [one.token_dispatcher for one in experts if one is not None]
    if not dispatchers:
        raise RecipeError(f"{path}: its model has no routed experts")
    options: dict[str, Any] = {}
    for one in (config.parallelism, dispatchers[0], getattr(config, "training", None), getattr(config, "debug", None)):
        options |= {key: getattr(one, key) for key in torchtitan.DEFAULTS if hasattr(one, key)}
    groups = getattr(config.optimizer, "param_groups", ())
    options |= {
        "moe_comm_backend": torchtitan.backend_of(dispatchers),
        "compiled": tuple(config.compile.components) if config.compile.enable else (),
        "optimizers": tuple(dict.fromkeys(group.optimizer_name for group in groups)) or None,
    }
    return Recipe(name, "torchtitan", options)
