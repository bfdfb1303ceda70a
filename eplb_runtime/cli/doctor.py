"""Say what this machine can use, and whether a job would attach.

examples:
  eplb-runtime doctor
  torchrun --nproc-per-node 4 -m eplb_runtime.cli doctor       # measures the links between ranks, too
  eplb-runtime doctor --recipe run-qwen3-30B-A3B.sh      # would it attach? by the flags alone; -v: what is assumed

exit status: 0; 1 if a recipe's job would not attach, 2 bad input
"""

import argparse
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from ..utils.files import FileError
from .arguments import choice, complain, option
from .printing import print_json, print_table, spinner

RECIPE = "would it attach: Megatron's flags, verl's overrides, a DistributedConfig in JSON, Accelerate's YAML"
OPTIONS = [
    option("--recipe", "FILE", str, RECIPE, nargs="+"),
    choice("--device", ("cpu", "cuda"), "what transports are tried on (default: cuda where there is one)"),
]


def run(arguments: argparse.Namespace) -> int:
    if arguments.recipe is not None:
        return max(_judge(path, arguments) for path in arguments.recipe)
    import torch

    from ..tools.doctor import backends, try_transports, versions
    from ..tools.launch import is_first, process_group

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    with process_group(device) as here, spinner() if is_first() else nullcontext():
        trials = try_transports(here)
    if not is_first():
        return 0
    said: dict[str, Any] = {
        "versions": versions(),
        "backends": [asdict(one) for one in backends()],
        "transports": [asdict(trial) for trial in trials],
    }
    if arguments.json:
        print_json(said)
        return 0
    print_table("versions", [{"package": name, "version": version} for name, version in said["versions"].items()])
    print_table("back ends", said["backends"])
    heads = ("transport", "on", "usable", "why", "GB/s in node", "between")
    print_table("transports of experts", [dict(zip(heads, one.values(), strict=True)) for one in said["transports"]])
    return 0


def _judge(path: str, arguments: argparse.Namespace) -> int:
    """Return 1 where a recipe is refused, 2 where it cannot be judged."""
    from ..tools.recipes import answer, read_recipe

    try:
        recipe = read_recipe(path)
        found = answer(recipe)
    except FileError as error:
        return complain(error)
    if arguments.json:
        print_json(found)
        return int(found["attaches"] is False)
    verdict = {
        True: "yes, it attaches",
        False: "no, it does not attach",
        None: f"not known: {', '.join(found['undecided'])} decides, and the recipe does not show it",
    }
    print(f"{recipe.name}: {verdict[found['attaches']]} ({recipe.of})")
    if found["attaches"] is not False:
        equal = {"bit": "to the bit", "rounding": "to rounding", None: "to rounding, if not to the bit"}
        print(f"with homes moved, training is equal {equal[found['exact']]}")
    else:
        print_table("refused", found["refused"])
    tables = {
        "the recipe does not show": found["unknown"],
        f"assumed: defaults of {recipe.of}, or of what trains with it": found["assumed"],
    }
    for title, values in tables.items() if arguments.verbose else ():
        print_table(title, [{"setting": name, "value": value} for name, value in values.items()])
    return int(found["attaches"] is False)
