"""Would a job be balanced? Recipes are read as people write them (flags of Megatron and slime; overrides `key=value` of
verl; JSON; config functions of torchtitan) and judged by the checks that `attach` makes."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
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
SHORT = {
    "num_experts": "num_moe_experts",
    "top_k": "moe_router_topk",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "edp": "expert_data_parallel_size",
    "gpus": "world_size",
}
"""Names that recipes in JSON may have for Megatron's."""
SHORT_TORCHTITAN = {
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "gpus": "world_size",
}
GONE = re.compile(
    "cuda_graph|dispatcher|flex_backend|overlap_moe_comm|params_dtype|nvfp4|fsdp|notes|compile|distributed_optimizer|"
    "precision_aware_optimizer|offload_fraction|edp_at_reference|source_lines"
)
"""Names of our own that recipes in JSON had once."""
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
RL: Mapping[str, Any] = {
    "use_distributed_optimizer": True,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
}
OF_PROJECTS: Mapping[str, Mapping[str, Any]] = {
    "Megatron-LM": BY_FLAGS,
    "slime": {**BY_FLAGS, **RL},
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
_OPENING = ("if", "for", "while", "until", "case", "{")
_CLOSING = ("fi", "done", "esac", "}")
_BEFORE = ("then", "do", "else", "elif", "time", "!", "export", "declare", "local", "readonly", "typeset")
_SEPARATORS = ";&|()<>\n"
_SEVERAL = re.compile(r"(^|\s)(--\S+|\+{0,2}\w+(\.\w+)+=\S*)\s|\s--")
"""Of a text that is several words: flags, or overrides of verl's."""


class RecipeError(FileError):
    """A recipe that cannot be judged; the message names it and says why."""


@dataclass(frozen=True)
class Recipe:
    """How one training job is configured.

    Args:
        name: of the file, function or entry.
        source: the project whose recipe it is.
        host: the framework that trains: "megatron", "torchtitan", or one without a host of ours.
        options: by the framework's own names; values may be `Unknown`.
        defaults: of the project, for options that are not given.
        written: an option's name as the recipe has it, where that is another.
    """

    name: str
    source: str
    host: str
    options: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RecipeAnswer:
    """Whether a recipe's job could be balanced; None in a field: not known, or no host of ours trains it.

    Args:
        without_replicas: what is refused for replica slots besides.
        undecided: settings that a check needs and that are not known.
        assumed: settings that have a default, which the recipe does not give.
        unknown: settings whose value the recipe does not show, and where it comes from.
    """

    recipe: Recipe
    host: Any
    refused: Sequence[Refusal]
    without_replicas: Sequence[Refusal] = ()
    undecided: Sequence[str] = ()
    exact: Exact | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    ep: int | None = None
    edp: int | None = None
    stand_ins: Sequence[tuple[str, str]] = ()

    @property
    def attaches(self) -> bool | None:
        """None: a check needs a setting that is not known."""
        return False if self.refused else None if self.undecided else True

    @property
    def version(self) -> str:
        """The framework's, as people name it."""
        return self.host.VERSION if self.host else ""

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {
            "attaches": self.attaches,
            "homes": self.attaches,
            "replicas": False if self.without_replicas else self.attaches,
            "exact": self.exact,
            "refused": [asdict(one) for one in self.refused],
            "assumed": [{"setting": name, "value": value, "of": self.version} for name, value in self.assumed.items()],
            "unknown": [{"setting": name, "value": text} for name, text in self.unknown.items()],
            "ep": self.ep,
            "edp": self.edp,
            "stand_in": [{"setting": name, "tested": tested} for name, tested in self.stand_ins],
        }


def answer(recipe: Recipe) -> RecipeAnswer:
    """Judge a recipe by the checks of its framework.

    Raises:
        RecipeError: a size is no whole number of at least 1, or EP does not divide the experts.
    """
    host = HOSTS.get(recipe.host)
    if host is None:
        why = "its trainer spreads experts itself, and no host of ours knows it"
        instead = "attach by hand, by attach(..., layers=[eplb.MoE(...)]), where each rank still has all experts"
        refusal = Refusal("host", recipe.source or recipe.host, why, instead)
        return RecipeAnswer(recipe, None, (refusal,), ep=recipe.options.get("ep"), edp=recipe.options.get("edp"))
    given = {name: value for name, value in recipe.options.items() if value is not None}
    _check_sizes(recipe, {**host.settings_of({}).values, "world_size": 1}, given)
    settings = host.settings_of({**recipe.defaults, **given})
    experts, ep, edp = map(settings.values.get, (host.EXPERTS, host.RANKS, "expert_data_parallel_size"))
    if isinstance(experts, int) and isinstance(ep, int) and experts % ep:
        names = [recipe.written.get(name, name) for name in (host.EXPERTS, host.RANKS)]
        raise RecipeError(f"{recipe.name}: {names[0]} {experts} is no multiple of {names[1]} {ep}")
    refused, undecided = run_checks(settings, host.CHECKS)
    without_replicas, undecided_replicas = run_checks(settings, (host.without_replicas,))
    exact: Exact | None = None
    with suppress(UnknownError):
        exact = host.exact(settings)
    unknown = {name: str(value) for name, value in settings.values.items() if isinstance(value, Unknown)}
    assumed = {name: settings.values[name] for name in settings.values if name not in given and name not in unknown}
    assumed.pop("expert_data_parallel_size", None)
    return RecipeAnswer(
        recipe,
        host,
        [replace(one, setting=recipe.written.get(one.setting, one.setting)) for one in refused],
        without_replicas,
        [*undecided, *undecided_replicas],
        exact,
        assumed,
        unknown,
        ep if isinstance(ep, int) else None,
        edp if isinstance(edp, int) else None,
        () if refused else run_checks(settings, (host.stand_ins,))[0],
    )


def _check_sizes(recipe: Recipe, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """A setting whose default is a whole number is one of at least 1."""
    for name in (name for name, default in defaults.items() if type(default) is int and name in given):
        value = given[name]
        if not isinstance(value, Unknown) and not (isinstance(value, int) and value >= 1):
            written = recipe.written.get(name, name)
            raise RecipeError(f"{recipe.name}: {written} is {value!r}, and must be a whole number of at least 1")


def totals(answers: Sequence[RecipeAnswer]) -> list[dict[str, Any]]:
    """How many recipes attach, by project; the last row is the sum."""
    sources = dict.fromkeys(one.recipe.source for one in answers)
    groups = [(source, [one for one in answers if one.recipe.source == source]) for source in sources]
    return [
        {
            "source": source,
            "recipes": len(of_source),
            "attach": sum(one.attaches is True for one in of_source),
            "refused": sum(one.attaches is False for one in of_source),
            "unknown": sum(one.attaches is None for one in of_source),
        }
        for source, of_source in [*groups, ("all", list(answers))]
    ]


def reasons(answers: Sequence[RecipeAnswer]) -> list[dict[str, Any]]:
    """How many recipes each setting refuses, and for how many it is the only one."""
    every = Counter(refusal.setting for one in answers for refusal in one.refused)
    only = Counter(one.refused[0].setting for one in answers if len(one.refused) == 1)
    return [{"setting": name, "recipes": count, "alone": only[name]} for name, count in every.most_common()]


def read_recipes(path: str) -> list[Recipe]:
    """The recipes of a file: JSON, a shell script or text; or of a torchtitan config function by import path.

    Raises:
        RecipeError: there is no recipe of a model with experts in it.
        FileError, OSError: it cannot be read.
    """
    file = Path(path)
    if (
        not file.exists()
        and "/" not in path
        and _FUNCTION.fullmatch(path)
        and file.suffix not in (".sh", ".json", ".txt")
    ):
        return [_of_function(path)]
    if require_readable(file, MOST_BYTES) == 0 or not (text := file.read_text(errors="replace")).strip():
        raise RecipeError(f"{path}: empty")
    try:
        return _of_json(file, json.loads(text)) if file.suffix == ".json" else [_of_script(file, text)]
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}: not JSON: {error}") from None
    except ValueError as error:  # shlex
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"{path}: {error}: write the flags of the training's command into a text file") from None


def value_of(text: str) -> Any:
    """A number, bool or None, where a text is one; `Unknown` where a script computes it."""
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
    flags, overrides, missing = _said(path, text)
    settings = {key: found[1] for key in overrides if (found := _VERL.fullmatch(key))}
    return _of_verl(path, flags, overrides, settings) if settings else _of_megatron(path, flags, missing)


def _said(path: Path, text: str) -> tuple[dict[str, list[Any]], dict[str, Any], list[str]]:
    """Values of flags and of overrides, and what stands for arguments that the script does not have."""
    found: dict[str, list[Any]] = {}
    missing: list[str] = []
    for words, conditional in _statements(text, path.parent, {}):
        values, given = list[Any](), dict[str, list[Any]]()
        for word in words:
            if re.match("--[a-zA-Z]", word):
                name, equals, value = word[2:].partition("=")
                values = given[f"--{name.replace('-', '_')}"] = [value_of(value)] if equals else []
            elif override := _OVERRIDE.fullmatch(word):
                given[override[1]] = [value_of(override[2])]
            elif _ARGUMENTS.fullmatch(word):
                missing.append(word)
            else:
                values.append(value_of(word))
        for name, values in given.items():
            is_known = not conditional or found.get(name) == values
            found[name] = values if is_known else [Unknown("given under a condition")]
    flags = {name[2:]: values for name, values in found.items() if name.startswith("--")}
    return flags, {name: values[0] for name, values in found.items() if name[:2] != "--"}, missing


def _of_megatron(path: Path, flags: Mapping[str, list[Any]], missing: list[str]) -> Recipe:
    missing = missing + ["the file of --yaml-cfg"] * ("yaml_cfg" in flags)
    first = {name: values[0] for name, values in flags.items() if values}
    options: dict[str, Any] = {}
    written: dict[str, str] = {}
    for flag in (name for name in FLAGS if name in flags):
        setting, switched = FLAGS[flag]
        is_list = setting == "cuda_graph_modules" and len(flags[flag]) > 1
        options[setting] = list(map(str, flags[flag])) if is_list else first.get(flag, switched)
        written[setting] = f"--{flag.replace('_', '-')}"
    if not (_has_experts(options) or any(flag.startswith("moe_") for flag in flags)):
        elsewhere = f", and {missing[0]} is not in the file" if missing else ""
        raise RecipeError(f"{path}: no setting of experts in it (--num-experts){elsewhere}")
    project = "slime" if {"actor_num_nodes", "actor_num_gpus_per_node"} & {*flags} else "Megatron-LM"
    defaults = {"num_moe_experts": Unknown("not in the file"), **OF_PROJECTS[project]}
    if project == "slime":
        nodes, ranks = first.get("actor_num_nodes"), first.get("actor_num_gpus_per_node")
        defaults["bf16"] = options["fp16"] if isinstance(options.get("fp16"), Unknown) else not options.get("fp16")
        if options.get("moe_token_dispatcher_type") == "allgather":
            options["moe_token_dispatcher_type"] = "alltoall"
    else:
        ranks = first.get("nproc_per_node")
        nodes = first.get("nnodes", 1 if ranks else None)  # torchrun's default
        way = first.get("ckpt_format", "torch_dist")
        by_name = "no_save_optim" in flags or (way == "torch_dist" and "dist_ckpt_optim_fully_reshardable" in flags)
        if "save" in flags and way in ("torch", "torch_dist"):
            options["saves_by_place"], written["saves_by_place"] = not by_name, "--save"
    options["world_size"] = _product(nodes, ranks)
    if missing:
        defaults = {**{name: Unknown(f"may be in {missing[0]}") for name in megatron.DEFAULTS}, **defaults}
    if options.get("optimizer") in megatron.MUON and {**defaults, **options}.get("use_distributed_optimizer") is True:
        # Megatron-LM's arguments take it for the layer-wise one, and nothing else is distributed then.
        options |= {"optimizer": megatron.LAYER_WISE, "use_distributed_optimizer": False}
    return Recipe(path.stem, project, "megatron", options, defaults, written)


def _of_verl(
    path: Path, flags: Mapping[str, list[Any]], overrides: Mapping[str, Any], settings: Mapping[str, str]
) -> Recipe:
    options = {name: overrides[key] for key, name in settings.items() if name in megatron.DEFAULTS}
    written = {name: key for key, name in settings.items()}
    if not (_has_experts(options) or any(name.startswith("moe_") for name in written)):
        raise RecipeError(f"{path}: no setting of experts in it (expert_model_parallel_size)")
    if "dtype" in written:
        dtype = overrides[written["dtype"]]
        for name, long in (("bf16", "bfloat16"), ("fp16", "float16")):
            options[name] = dtype if isinstance(dtype, Unknown) else dtype in (name, long)
    for key in filter(_LORA.fullmatch, overrides):
        value = overrides[key]
        if key.endswith("target_modules"):
            options["lora_target_modules"] = value
        else:
            options["lora"], written["lora"] = value if isinstance(value, Unknown) else bool(value), key
    sizes = [overrides.get("trainer.nnodes"), overrides.get("trainer.n_gpus_per_node")]
    if None in sizes:
        sizes = [next(iter(flags.get(name, ())), None) for name in ("nnodes", "nproc_per_node")]
    options["world_size"] = _product(*sizes)
    return Recipe(path.stem, "verl", "megatron", options, OF_PROJECTS["verl"], written)


def _has_experts(options: Mapping[str, Any]) -> bool:
    sizes = (options.get("num_moe_experts"), options.get("expert_model_parallel_size"))
    return any(isinstance(size, Unknown) or (size or 0) > 1 for size in sizes)


def _product(*sizes: Any) -> Any:
    """Ranks of a job, of its nodes and the ranks of a node; None or `Unknown` where one of them is."""
    odd = next((size for size in sizes if not isinstance(size, int)), 0)
    return prod(sizes) if odd == 0 else odd if odd is None or isinstance(odd, Unknown) else Unknown(str(odd))


def _of_json(path: Path, content: Any) -> list[Recipe]:
    entries = content if isinstance(content, list) else [content]
    if not entries:
        raise RecipeError(f"{path}: no recipe in it")
    recipes = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("host"), str):
            raise RecipeError(f"{path}: entry {number} is no recipe: it has no field 'host'")
        name, project = str(entry.get("name", f"{path.stem}[{number}]")), str(entry.get("project", ""))
        host: str = entry["host"]
        if gone := [key for key in entry if GONE.fullmatch(key)]:
            raise RecipeError(f"{path}: {name}: {gone[0]} is no setting of {host}'s: write those by its own names")
        short = {"megatron": SHORT, "torchtitan": SHORT_TORCHTITAN}.get(host, {})
        given = {str(key): value for key, value in entry.items() if value is not None}
        options: dict[str, Any] = {short.get(key, key): value for key, value in given.items()}
        experts, ranks = (options.get(short.get(key, key)) for key in ("num_experts", "ep"))
        if not any(isinstance(size, int) and size > 1 for size in (experts, ranks)):
            raise RecipeError(f"{path}: {name} has no experts (num_experts, ep)")
        if host == "megatron":
            options = {"num_moe_experts": OF_THE_MODEL, "moe_router_topk": OF_THE_MODEL, **options}
        written = {long: key for key, long in short.items() if key in entry}
        recipes.append(Recipe(name, project, host, options, OF_PROJECTS.get(project, {}), written))
    return recipes


def _of_function(path: str) -> Recipe:
    """The recipe that a function of torchtitan's configs returns. Runs it."""
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
    return Recipe(name, "torchtitan", "torchtitan", options)


def _statements(text: str, folder: Path, variables: dict[str, str]) -> list[tuple[list[str], bool]]:
    """Words of each command and array of a script and of the files in its folder that it sources, and whether it is
    reached under a condition alone. Nothing is run: plain assignments are resolved, the rest keeps its ``$``."""
    found: list[tuple[list[str], bool]] = []
    depth, conditional, in_array = 0, False, False
    words: list[str] = []
    for token in [*_tokens(text), "\n"]:
        if token.strip(_SEPARATORS):
            words.append(token)
            continue
        if in_array and ")" not in token:
            continue
        while not in_array and words and words[0] in (*_BEFORE, *_OPENING, *_CLOSING, "function"):
            first = words.pop(0)
            depth += (first in (*_OPENING, "function")) - (first in _CLOSING)
            words = words[1:] if first == "function" or (words and re.fullmatch("-[a-zA-Z]+", words[0])) else words
        in_array = token.startswith("(") and bool(words) and words[-1].endswith("=") and ")" not in token
        is_conditional = depth > 0 or conditional
        while words and (assigned := _ASSIGNMENT.fullmatch(words[0])):
            name, value = assigned[1], _expand(assigned[2], variables)
            variables[name] = value if not is_conditional or variables.get(name) == value else f"${name}"
            words = [value, *words[1:]] if _SEVERAL.search(value) else words[1:]
        if words[:1] in (["source"], ["."]) and len(words) > 1:
            file = folder / _expand(re.sub(r"^\$\{?\w+\}?/", "", words[1]), variables)
            if "$" not in str(file) and file.is_file():
                found += _statements(file.read_text(errors="replace"), folder, variables)
        elif words:
            expanded = [one for word in words if (one := _expand(word, variables))]
            found.append(([part for one in expanded for part in _parts(one)], is_conditional))
        words = []
        if not in_array:
            conditional = token in ("&&", "||") or (conditional and not {*token} & {*";\n"})
    return found


def _parts(word: str) -> list[str]:
    return word.split() if _SEVERAL.search(word) else [word]


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """A word with the values of its variables, as far as they are known."""

    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[2])
        return found[0] if known is None and found[3] is None else known or _expand(found[3] or "", variables)

    return _VARIABLE.sub(value, word)


def _tokens(text: str) -> shlex.shlex:
    """Words and separators; what a script computes is ``$COMPUTED``."""
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text.replace("\\\n", " "))
    before = ""
    while before != text:
        before, text = text, _COMPUTED.sub("$COMPUTED", text)
    found = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    found.whitespace, found.commenters, found.whitespace_split = " \t\r", "", True
    return found
