"""``eplb-runtime doctor``: what a model will take on each rank, and what of this machine can be used."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import InputError, add_command, adder, not_negative, positive
from .printing import print_json, print_table


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "doctor",
        _run,
        "say what memory a model takes on each rank, for each choice, and what this machine can use",
        """
  eplb-runtime doctor
  eplb-runtime doctor --model-config ./my-model --ranks 64 --replica-slots 1
  eplb-runtime doctor --model-config config.json --ranks 8 --dtype float32 --optimizer sgd --json
""",
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


def _run(arguments: argparse.Namespace) -> None:
    if arguments.model_config is not None and arguments.ranks is None:
        raise InputError("doctor --model-config needs --ranks: how many ranks share the experts")
    from ..doctor import diagnose

    found = diagnose(
        arguments.model_config,
        ranks=arguments.ranks or 1,
        ranks_per_node=arguments.ranks_per_node,
        replica_slots=arguments.replica_slots,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        staging_bytes=arguments.staging_bytes,
    )
    if arguments.json:
        print_json(found.to_dict())
        return
    if found.shape is not None:
        shape = found.shape
        title = (
            f"{shape.model}: {shape.parameters / 1e9:.4g} billion parameters, {shape.layers} MoE layers of "
            f"{shape.experts} experts, on {shape.ranks} ranks, {shape.replica_slots} replica slots, {shape.dtype}"
        )
        print_table(
            title,
            [
                {"memory of each rank": item.what, "GiB": _gib(item.nbytes), "where": item.where, "when": item.when}
                for item in found.memory
            ],
        )
    print_table("versions", [{"package": name, "version": version} for name, version in found.versions.items()])
    print_table(
        "back ends",
        [{"back end": b.name, "usable": "yes" if b.usable else "no", "why": b.why} for b in found.backends],
    )


def _gib(nbytes: int) -> str:
    gib = nbytes / 2**30
    return f"{gib:,.0f}" if gib >= 100 else f"{gib:.3g}"
