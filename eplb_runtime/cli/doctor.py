"""``eplb-runtime doctor``: what a model will take on each rank, what of this machine can be used, and whether jobs of a
recipe would attach."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .arguments import InputError, add_command, adder, not_negative, positive
from .printing import print_json, print_lines, print_table, spinner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..tools.doctor import Diagnosis, TransportTrial
    from ..tools.recipes import RecipeAnswer


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "doctor",
        _run,
        "say what memory a model takes on each rank, for each choice, and what this machine can use",
        """
  eplb-runtime doctor
  torchrun --nproc-per-node 4 -m eplb_runtime.cli doctor       # measures the links between ranks, too
  eplb-runtime doctor --model-config ./my-model --ranks 64 --replica-slots 1
  eplb-runtime doctor --model-config config.json --ranks 8 --dtype float32 --optimizer sgd --json
  eplb-runtime doctor --recipe run-qwen3-30B-A3B.sh            # would it attach? by the flags alone
  eplb-runtime doctor --recipe torchtitan.models.deepseek_v3.config_registry.deepseek_v3_16b
  eplb-runtime doctor --recipe recipes.json run_verl.sh --json # several: a total

exit status: 0; 1 if a recipe's job would not attach, 2 bad input
""",
    )
    command.add_argument(
        "--recipe",
        nargs="+",
        metavar="FILE",
        help="say whether a job would attach: a script or text with Megatron's flags or verl's overrides, JSON, or a "
        "torchtitan config function by import path",
    )
    command.add_argument("--model-config", metavar="PATH", help="a folder with config.json, or that file")
    add = adder(command)
    add("--ranks", "R", positive, "ranks of the EP group")
    add("--replica-slots", "K", not_negative, "copies that each rank can hold per layer (default: 0)", default=0)
    add("--ranks-per-node", "G", positive, "ranks that share a node's memory (default: 8, or all)")
    dtypes = ("bfloat16", "float16", "float32", "float64")
    command.add_argument(
        "--dtype", choices=dtypes, default="bfloat16", help="of weights, gradients and state (default: bfloat16)"
    )
    command.add_argument(
        "--optimizer", choices=("adamw", "sgd"), default="adamw", help="sgd: with momentum (default: adamw)"
    )
    add("--staging-bytes", "N", positive, "as in BalancerConfig (default: its own)")
    command.add_argument(
        "--device", choices=("cpu", "cuda"), help="what transports are tried on (default: cuda where there is one)"
    )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.recipe is not None:
        return _judge(arguments.recipe, arguments.json)
    if arguments.model_config is not None and arguments.ranks is None:
        raise InputError("doctor --model-config needs --ranks: how many ranks share the experts")
    import torch

    from ..tools.doctor import diagnose, try_transports
    from ..tools.launch import is_first, process_group

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    found = diagnose(
        arguments.model_config,
        ranks=arguments.ranks or 1,
        ranks_per_node=arguments.ranks_per_node,
        replica_slots=arguments.replica_slots,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        staging_bytes=arguments.staging_bytes,
    )
    with process_group(device) as here, spinner() if is_first() else nullcontext() as shown:
        trials = try_transports(here, on_progress=lambda said: shown.update(said) if shown is not None else None)
    if is_first() and arguments.json:
        print_json({**found.to_dict(), "transports": [asdict(trial) for trial in trials]})
    elif is_first():
        _show(found, trials)
    return 0


def _judge(paths: Sequence[str], as_json: bool) -> int:
    """Returns 1 where one is refused."""
    from ..tools.recipes import answer, read_recipes, reasons, totals

    answers = [answer(recipe) for path in paths for recipe in read_recipes(path)]
    if as_json and len(answers) == 1:
        print_json(answers[0].to_dict())
    elif as_json:
        each = [{"recipe": one.recipe.name, "source": one.recipe.source, **one.to_dict()} for one in answers]
        print_json({"recipes": each, "total": totals(answers), "reasons": reasons(answers)})
    elif len(answers) == 1:
        _show_answer(answers[0])
    else:
        rows = [
            {
                "recipe": one.recipe.name,
                "attaches": _YES_NO[one.attaches],
                "refused": ", ".join(refusal.setting for refusal in one.refused),
            }
            for one in answers
        ]
        print_table("recipes", rows)
        print_table("total", totals(answers))
        print_table("refused settings", reasons(answers))
    return int(any(one.attaches is False for one in answers))


_YES_NO = {True: "yes", False: "no", None: "not known"}


def _show_answer(found: RecipeAnswer) -> None:
    from ..config import MigrationConfig

    number, version = len(found.refused), found.version
    verdict = {
        True: "yes, it attaches",
        False: f"no, it does not attach: {number} {'setting is' if number == 1 else 'settings are'} refused",
        None: f"not known: {', '.join(found.undecided)} decides, and the recipe does not show it",
    }
    staged = MigrationConfig().staging_bytes >> 20
    ep, edp = ("not known" if size is None else size for size in (found.ep, found.edp))
    print_lines(
        f"{found.recipe.name}: {verdict[found.attaches]}{f' ({version})' if version else ''}",
        f"homes move: {_YES_NO[found.attaches]}; replica slots: {_YES_NO[found.to_dict()['replicas']]}"
        + "".join(f" ({one.setting}: {one.why})" for one in found.without_replicas[:1]),
        f"with homes moved, training is equal to: {found.exact or 'not known'}",
        f"EP {ep}, EDP {edp}; a migration takes up to {2 * staged} MiB per rank ({staged} in, {staged} out; more only "
        "where one expert with its state is larger)",
    )
    said = found.to_dict()
    for title, rows in (
        ("refused", said["refused"]),
        ("the recipe does not show", said["unknown"]),
        (f"assumed: defaults of {version}, or of {found.recipe.source}", said["assumed"]),
        ("tested with a stand-in, and not on a GPU yet", said["stand_in"]),
    ):
        if rows:
            print_table(title, [{name: str(cell) for name, cell in row.items() if name != "of"} for row in rows])
    if found.host:
        print_lines("checked at attach:", *(f"  {what}" for what in found.host.CHECKED_AT_ATTACH))


def _show(found: Diagnosis, trials: Sequence[TransportTrial]) -> None:
    if (shape := found.shape) is not None:
        title = (
            f"{shape['model']}: {shape['parameters'] / 1e9:.4g} billion parameters, {shape['layers']} MoE layers of "
            f"{shape['experts']} experts, on {shape['ranks']} ranks, {shape['replica_slots']} replica slots, "
            f"{shape['dtype']}"
        )
        rows = [(item.what, _gib(item.nbytes), item.where, item.when) for item in found.memory]
        _print_rows(title, ("memory of each rank", "GiB", "where", "when"), rows)
        steady = {True: "steady", False: "the last bits depend on where a row stands"}
        rows_of_experts = [
            (one.tensor, " and ".join(map(str, one.row_bytes)), steady[one.steady]) for one in found.widths
        ]
        _print_rows("rows that experts make", ("tensor", "bytes", "on a CPU"), rows_of_experts)
    _print_rows("versions", ("package", "version"), list(found.versions.items()))
    backends = [(one.name, _YES_NO[one.usable], one.why) for one in found.backends]
    _print_rows("back ends", ("back end", "usable", "why"), backends)
    speeds = [
        [
            "" if speed is None else f"{speed:.3g}"
            for speed in (one.intra_node_gb_per_second, one.inter_node_gb_per_second)
        ]
        for one in trials
    ]
    tried = [(one.name, one.device, _YES_NO[one.usable], *of, one.why) for one, of in zip(trials, speeds, strict=True)]
    _print_rows("transports of experts", ("transport", "on", "usable", "GB/s in node", "between", "why"), tried)
    same = [(said.what, said.same, said.why) for said in found.exactness]
    _print_rows("two trainings are the same", ("", "to", "why"), same)


def _print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print_table(title, [dict(zip(columns, row, strict=True)) for row in rows])


def _gib(nbytes: int) -> str:
    gib = nbytes / 2**30
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.3g}"
