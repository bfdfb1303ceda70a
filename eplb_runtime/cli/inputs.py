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
    return Topology(arguments.ranks, arguments.ranks_per_node, *bandwidths)


def read_job(path: str, arguments: argparse.Namespace) -> JobRecord:
    """Return a recorded load without dense layers, with what the record says of the job."""
    import numpy as np

    from ..tools.formats.loads import looks_partial, read_record

    dense = arguments.dense_layers or 0
    record = read_record(path, dense)
    load = record.load
    if 0 < len(empty := dense + np.flatnonzero(~load.any(axis=(0, 2)))) < load.shape[1]:
        few = ", ".join(map(str, empty[:8])) + (", ..." if len(empty) > 8 else "")
        note(f"{path}: no tokens in layer {few}, counted from 0; --dense-layers N leaves out the first N")
    if said := looks_partial(load):
        note(f"{path}: {said}")
    if arguments.experts is None:
        return record
    if (more := arguments.experts - load.shape[2]) < 0:
        raise InputError(f"--experts {arguments.experts}: {path} has tokens of {load.shape[2]}")
    return replace(record, load=np.pad(load, ((0, 0), (0, 0), (0, more))))


def counted_windows(load: NDArray[np.float64], path: str) -> NDArray[np.float64]:
    """Return a load [T, L, E] without windows in which no token was counted: they would count as balanced."""
    counted_T = load.any(axis=(1, 2))
    if not counted_T.any():
        raise InputError(f"{path}: no token was counted; record a job that trains")
    if not counted_T.all():
        note(f"{path}: {int((~counted_T).sum())} of {len(load)} windows have no tokens and are left out")
    return load[counted_T]
