"""``eplb-runtime doctor``: what a model takes on each rank, what of a machine can be used, would a recipe attach?"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from .arguments import InputError, add_command, choice, not_negative, option, positive
from .printing import print_json, print_table, spinner

EXAMPLES = """
  eplb-runtime doctor
  torchrun --nproc-per-node 4 -m eplb_runtime.cli doctor       # measures the links between ranks, too
  eplb-runtime doctor --model-config ./my-model --ranks 64 --replica-slots 1
  eplb-runtime doctor --model-config config.json --ranks 8 --dtype float32 --optimizer sgd --json
  eplb-runtime doctor --recipe run-qwen3-30B-A3B.sh            # would it attach? by the flags alone

exit status: 0; 1 if a recipe's job would not attach, 2 bad input
"""
_YES_NO = {True: "yes", False: "no", None: "not known"}


def add(commands: Any) -> None:
    recipe = "say whether a job would attach: a script or text with Megatron's flags or verl's overrides, or JSON"
    dtype = "of weights, gradients and state (default: bfloat16)"
    tried = "what transports are tried on (default: cuda where there is one)"
    options = [
        option("--recipe", "FILE", str, recipe),
        option("--model-config", "PATH", str, "a folder with config.json, or that file"),
        option("--ranks", "R", positive, "ranks of the EP group"),
        option("--replica-slots", "K", not_negative, "copies that each rank can hold per layer (default: 0)", 0),
        choice("--dtype", ("bfloat16", "float16", "float32", "float64"), dtype, "bfloat16"),
        choice("--optimizer", ("adamw", "sgd"), "sgd: with momentum (default: adamw)", "adamw"),
        choice("--device", ("cpu", "cuda"), tried),
    ]
    summary = "say what memory a model takes on each rank, for each choice, and what this machine can use"
    add_command(commands, "doctor", _run, summary, EXAMPLES, options)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.recipe is not None:
        return _judge(arguments.recipe, arguments.json)
    if arguments.model_config is not None and arguments.ranks is None:
        raise InputError("doctor --model-config needs --ranks: how many ranks share the experts")
    import torch

    from ..tools.doctor import backends, memory_of, try_transports, versions
    from ..tools.launch import is_first, process_group

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    title, memory = "", list[Any]()
    if arguments.model_config is not None:
        given = {name: getattr(arguments, name) for name in ("ranks", "replica_slots", "dtype", "optimizer")}
        title, memory = memory_of(arguments.model_config, **given)
    with process_group(device) as here, spinner() if is_first() else nullcontext():
        trials = try_transports(here)
    said: dict[str, Any] = {
        "model": title,
        "memory_bytes": {item.key: item.nbytes for item in memory},
        "versions": versions(),
        "backends": [asdict(one) for one in backends()],
        "transports": [asdict(trial) for trial in trials],
    }
    if not is_first():
        return 0
    if arguments.json:
        print_json(said)
        return 0
    if memory:
        print_table(title, [{"memory of each rank": item.what, "GiB": _gib(item.nbytes)} for item in memory])
    print_table("versions", [{"package": name, "version": version} for name, version in said["versions"].items()])
    print_table("back ends", said["backends"])
    heads = ("transport", "on", "usable", "why", "GB/s in node", "between")
    print_table("transports of experts", [dict(zip(heads, one.values(), strict=True)) for one in said["transports"]])
    return 0


def _gib(nbytes: int) -> str:
    gib = nbytes / 2**30
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.3g}"


def _judge(path: str, as_json: bool) -> int:
    """Return 1 where a recipe is refused."""
    from ..tools.recipes import HOSTS, answer, read_recipe

    recipe = read_recipe(path)
    found, host = answer(recipe), HOSTS[recipe.host]
    said = asdict(found)
    if as_json:
        print_json(said)
        return int(found.attaches is False)
    verdict = {
        True: "yes, it attaches",
        False: "no, it does not attach",
        None: f"not known: {', '.join(found.undecided)} decides, and the recipe does not show it",
    }
    print(
        f"{recipe.name}: {verdict[found.attaches]} ({host.VERSION})",
        f"homes move: {_YES_NO[found.attaches]}; replica slots: {_YES_NO[found.replicas]}",
        f"with homes moved, training is equal to: {found.exact or 'not known'}",
        sep="\n",
    )
    if found.refused:
        print_table("refused", said["refused"])
    for title, values in (
        ("the recipe does not show", found.unknown),
        (f"assumed: defaults of {host.VERSION}, or of what trains with it", found.assumed),
    ):
        if values:
            print_table(title, [{"setting": name, "value": value} for name, value in values.items()])
    return int(found.attaches is False)
