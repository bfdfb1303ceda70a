"""What ``plan`` and ``simulate`` are asked about: the cluster, the load, the options of policies."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import InputError
from .printing import note

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..topology import Topology


def topology_of(arguments: argparse.Namespace) -> Topology:
    from ..topology import Topology

    try:
        return Topology(
            arguments.ranks,
            arguments.ranks_per_node,
            arguments.intra_node_bandwidth * 1e9,
            arguments.inter_node_bandwidth * 1e9,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


def policy_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"spilled_experts": arguments.spilled_experts, "global_above": arguments.global_above}


def read_windows(path: str, arguments: argparse.Namespace) -> NDArray[np.float64]:
    from ..formats.loads import layers_without_tokens, read_load

    load = read_load(path, arguments.dense_layers)
    chosen: NDArray[np.float64] = load[arguments.windows]
    if not len(chosen):
        raise InputError(f"{path}: --windows leaves none of its {len(load)} windows")
    empty = layers_without_tokens(chosen)
    if empty:
        counted = f"--dense-layers {arguments.dense_layers + empty}"
        note(f"{path}: the first {empty} layers carry no tokens; {counted} leaves them out")
    return chosen
