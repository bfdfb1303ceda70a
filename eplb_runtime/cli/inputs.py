"""What commands are asked about (cluster, load, policies), and what they look at before the work that needs it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from .arguments import InputError
from .printing import note

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..observe.run_folder import JobRecord
    from ..topology import Topology


def topology_of(arguments: argparse.Namespace) -> Topology:
    from ..topology import Topology

    bandwidths = (arguments.intra_node_bandwidth * 1e9, arguments.inter_node_bandwidth * 1e9)
    try:
        return Topology(arguments.ranks, arguments.ranks_per_node, *bandwidths)
    except ValueError as error:
        raise InputError(str(error)) from None


def read_job(path: str, arguments: argparse.Namespace) -> JobRecord:
    """Return the windows that were asked for, without dense layers, with what the record says of the job."""
    import numpy as np

    from ..tools.formats.loads import looks_partial, read_record

    dense, windows = arguments.dense_layers or 0, arguments.windows
    record = read_record(path, dense)
    chosen = record.load[windows]
    if not len(chosen):
        raise InputError(f"{path}: --windows leaves none of its {len(record.load)} windows")
    if 0 < len(empty := dense + np.flatnonzero(~chosen.any(axis=(0, 2)))) < chosen.shape[1]:
        few = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
        note(f"{path}: no tokens in layer {few}, counted from 0; --dense-layers N leaves out the first N")
    if said := looks_partial(chosen):
        note(f"{path}: {said}")
    if arguments.experts is not None and (more := arguments.experts - chosen.shape[2]) < 0:
        raise InputError(f"--experts {arguments.experts}: {path} has tokens of {chosen.shape[2]}")
    elif arguments.experts is not None:
        chosen = np.pad(chosen, ((0, 0), (0, 0), (0, more)))
    return replace(record, load=chosen, steps_T=record.steps_T[windows])


def counted_windows(load: NDArray[np.float64], path: str) -> NDArray[np.float64]:
    """Return a load [T, L, E] without windows in which no token was counted: they would count as balanced."""
    counted_T = load.any(axis=(1, 2))
    if not counted_T.any():
        raise InputError(f"{path}: no token was counted; record a job that trains")
    if not counted_T.all():
        note(f"{path}: {int((~counted_T).sum())} of {len(load)} windows have no tokens and are left out")
    return load[counted_T]
