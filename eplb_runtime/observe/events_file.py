"""Events of a run: as records, the same in a running job and read back, and ``events.jsonl`` in the folder of a run.

Everything that shows a job - log, page, metrics, report - works on records, so that all of them say the same. A record
is ``{"event": name, "time": seconds since 1970, "step": ..., ...}``, plain fields and numpy arrays; what a listener has
to work out from an event (the load of each rank, what no balancer would have had) is worked out here, once. The file
only grows, and a crash costs its last line; each start of the job begins with its record and where its experts are.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..config import BalancerConfig
from ..events import Event, LoadMeasured, RebalanceCommitted, RebalancePlanned
from ..load.clock import ExpertShare
from ..load.series import decode, encode, lines_of
from ..placement import Placement
from ..planner.evaluate import has_no_copies, predicted_imbalance, rank_load
from ..topology import Topology
from ..utils.files import FileError

Record = dict[str, Any]

NAME = "events.jsonl"
ARRAYS = ("load", "rank_load", "placement", "transfers")
"""Fields that are int64 arrays with three axes: ``[1, L, E]`` tokens; ``[2, L, R]`` tokens, measured and with the
initial placement; ``[1, L, P]`` experts, -1: none; ``[1, M, 4]`` layer, expert, source and destination rank."""
JOB = "JobAttached"
"""The first record of every file of a log."""
FORMAT = "eplb-runtime-events"
_OF_TOPOLOGY = ("ranks_per_node", "intra_node_bandwidth", "inter_node_bandwidth")
_OF_CONFIG = ("policy", "gate", "interval", "replica_slots")
_DIGITS = 6


class RecordError(ValueError):
    """A record that no job of ours wrote."""


def job_record(
    config: BalancerConfig,
    topology: Topology,
    placement: Placement,
    world_size: int,
    now: float,
    layers_of_stage: Sequence[int] = (),
) -> Record:
    """Return the record ``JobAttached`` of a job: its sizes, topology and settings, and its placement at the start.

    Args:
        topology: of one EP group; ``world_size``: ranks of the job.
        now: seconds since 1970.
        layers_of_stage: MoE layers of each pipeline stage; empty: there is one stage.
    """
    share = ExpertShare.before_measuring(config.migration.moe_share)
    return {
        "event": JOB,
        "time": now,
        "step": 0,
        "format": FORMAT,
        "version": 1,
        "package": __version__,
        "layers": placement.num_layers,
        "experts": placement.num_experts,
        "ranks": placement.num_ranks,
        "slots_per_rank": placement.slots_per_rank,
        "world_size": world_size,
        "layers_of_stage": list(layers_of_stage) or [placement.num_layers],
        **{name: getattr(topology, name) for name in _OF_TOPOLOGY},
        **{name: getattr(config, name) for name in _OF_CONFIG},
        "moe_share": share.value,
        "moe_share_source": share.source,
        "horizon_steps": config.horizon,
        "epoch": placement.epoch,
        "placement": slots_of(placement),
    }


def record_of(event: Event, start: Placement, now: float, speed_R: NDArray[np.float64] | None = None) -> Record:
    """Return an event as a record: its fields, ``time``, placement and transfers of a commit, and what is worked out of
    a measured load: tokens of each rank, imbalance (also with the placement ``start``) and MaxVio of each layer. Takes
    a few milliseconds for a large model: not for the training thread.

    Args:
        start: where the experts would stand without a balancer.
        now: seconds since 1970.
        speed_R: of the ranks, as the planner knows it.
    """
    record: Record = {**event.to_dict(), "time": now}
    if isinstance(event, LoadMeasured):
        record["imbalance"] = _rounded(np.array(event.imbalance, dtype=np.float64))
        if event.load is not None and event.placements is not None:
            total_1LE = event.load.sum(axis=0, keepdims=True)
            measured_LR = _rank_load(event.load, total_1LE, event.placements, speed_R)
            start_LR = _rank_load(event.load, total_1LE, ((len(event.load), start),), speed_R)
            record["load"] = total_1LE
            record["rank_load"] = np.rint(np.stack([measured_LR, start_LR])).astype(np.int64)
            record["imbalance_start"] = _rounded(predicted_imbalance(event.load.astype(float), start, speed_R))
            record["max_vio"] = _rounded(max_violation(event.load))
    elif isinstance(event, RebalancePlanned) and event.by_layer is not None:
        record["by_layer"] = _rounded(event.by_layer)
    elif isinstance(event, RebalanceCommitted):
        record["phase_seconds"] = {name: round(seconds, 9) for name, seconds in event.phase_seconds.items()}
        if event.placement is not None:
            record["placement"] = slots_of(event.placement)
            transfers, slots = event.transfers, event.placement.slots_per_rank
            moved = np.zeros((0, 4), dtype=np.int64) if transfers is None else transfers.copy()
            moved[:, 2:] //= slots
            record["transfers"] = moved[None]
            record["expert_bytes"] = list(event.expert_bytes or ())
    return record


def slots_of(placement: Placement) -> NDArray[np.int64]:
    """Return the logical expert in each slot of a placement, int64 ``[1, L, P]``; -1: the slot is empty."""
    return placement.physical_to_logical[None].astype(np.int64)


def max_violation(load_TLE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return MaxVio of each layer, float64 ``[L]``: max / mean - 1 of the experts' loads, mean over rows with tokens.

    It is a property of the router: no placement changes it. Source: Wang et al., "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts", 2024, where a row is a batch.
    """
    mean_TL = load_TLE.mean(axis=2)
    most_TL = load_TLE.max(axis=2)
    violation_TL = np.divide(most_TL, mean_TL, out=np.ones_like(mean_TL), where=mean_TL > 0) - 1.0
    rows_L = (mean_TL > 0).sum(axis=0)
    return np.asarray(violation_TL.sum(axis=0) / np.maximum(rows_L, 1))


def _rounded(values: NDArray[np.float64]) -> list[Any]:
    """As it is shown and written: a log is read more easily than 17 digits."""
    rounded: list[Any] = values.round(_DIGITS).tolist()
    return rounded


def _rank_load(
    load_TLE: NDArray[np.int64],
    total_1LE: NDArray[np.int64],
    placements: tuple[tuple[int, Placement], ...],
    speed_R: NDArray[np.float64] | None,
) -> NDArray[np.float64]:
    """Return float64 ``[L, R]``: tokens of each rank under the job's split, over all rows (sum: ``total_1LE``)."""
    first, total = 0, np.zeros((load_TLE.shape[1], placements[-1][1].num_ranks))
    for end, placement in placements:
        rows_TLE = load_TLE[first:end]
        if placement.home is None or has_no_copies(placement):  # else no sum of batches is split as each of them
            rows_TLE = total_1LE if len(rows_TLE) == len(load_TLE) else rows_TLE.sum(axis=0, keepdims=True)
        if len(rows_TLE):
            total += rank_load(rows_TLE.astype(np.float64), placement, speed_R).sum(axis=0)
        first = end
    return total


# -- the file ----------------------------------------------------------------------------------------------------------


class LineFile:
    """A file of JSON objects, one a line. Where another process begins to write to it, the older one stops: two jobs
    would read as one.

    Args:
        path: the file; made with its folder if it is not there.
        first: the line of this start of the job.

    Raises:
        OSError: it cannot be written to.
    """

    def __init__(self, path: Path, first: Mapping[str, Any]) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._size = os.lseek(self._descriptor, 0, os.SEEK_END)
        try:
            if self._size and os.pread(self._descriptor, 1, self._size - 1) != b"\n":
                self._append(b"\n")  # after half a line that a crash has left
            self.write(first)
        except OSError:
            self.close()
            raise

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line as JSON, arrays as `to_json` has them; it is with the operating system when this returns.
        OSError: it cannot be written (a full disk); what is half written is taken back. FileError: another process has
        begun to write to this file."""
        if os.fstat(self._descriptor).st_size != self._size:
            raise FileError(f"another job writes to {self._path} now")
        self._append(json.dumps(to_json(line)).encode() + b"\n")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: bytes) -> None:
        data = memoryview(line)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # perhaps half a line
            raise
        self._size += len(line)


def read_events(run: Path) -> list[Record]:
    """Return all records of a run's log, oldest first, also while it is written. Lines that a crash cut off or that are
    no record of ours are left out. FileError: no log, or one of another kind or a later version. OSError:
    unreadable."""
    if not (run / NAME).exists():
        raise FileError(f"{run} is no folder of a run: it has no {NAME} (BalancerConfig(run=...) writes one)")
    found: list[Record] = []
    for _, fields in lines_of(run / NAME):
        if isinstance(fields, dict) and fields.get("event") == JOB:
            kind, version = fields.get("format"), fields.get("version")
            if (kind, version) != (FORMAT, 1):
                raise FileError(f"events of format {kind!r}, version {version!r}: not ours, or newer")
        with suppress(RecordError):
            found.append(from_json(fields))
    return found


def to_json(record: Mapping[str, Any]) -> Record:
    """Return a copy of a record with its arrays as JSON-able dicts (`encode`), as a line of the log holds it."""
    return {name: encode(value, level=1) if isinstance(value, np.ndarray) else value for name, value in record.items()}


def from_json(line: Any) -> Record:
    """Return the record that a line of the log holds, with its arrays. RecordError: the line is no record."""
    if not isinstance(line, dict) or not isinstance(line.get("event"), str):
        raise RecordError("not an event")
    for name in ("time", "step"):
        if isinstance(line.get(name), bool) or not isinstance(line.get(name), int | float):
            raise RecordError(f"an event without its {name}")
    return {name: _array(name, value) if name in ARRAYS else value for name, value in line.items()}


def _array(name: str, saved: Any) -> NDArray[np.int64]:
    try:
        _, rows, columns = (int(length) for length in saved["shape"])
        return decode(saved, rows, columns)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordError(f"{name} cannot be read: {error}") from None
