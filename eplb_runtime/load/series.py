"""A load series as it is recorded: ``load.jsonl`` in the folder of a run. It only grows: a crash costs its last line.

Each start of the job begins with ``{"format": "eplb-runtime-load", "version": 1, "layers": L, "experts": E}``. Each
other line holds windows, oldest first: ``{"steps": training steps of a window, "shape": [T, L, E], "data": ...}``, the
data being int64, little-endian, compressed by zlib (whose checksum notices what is broken), in base64. Any line may
also have ``"job"``, fields of `RecordedJob` that are known by then.
"""

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..utils.files import FileError, require_readable

FORMAT = "eplb-runtime-load"
NAME = "load.jsonl"
LONGEST = 1 << 20
"""Windows of one line; far more than anybody keeps."""
MOST_BYTES = 8 << 30
"""Of a series in memory."""
_WIDEST, _MOST = 1 << 24, 1 << 53
"""L x E of any model; no number of a job is larger than the second."""


@dataclass(frozen=True)
class RecordedJob:
    """What a series says of the job that was recorded. 0 or empty: unknown."""

    ranks: int = 0  # of the job; counts are summed over all of them
    ranks_per_node: int = 0  # consecutive ranks that share a node
    ep_size: int = 0  # ranks among which the experts were spread; 1: each rank held all of them
    interval: int = 0  # steps between two writings, or between two decisions
    hidden_size: int = 0  # columns of a token
    top_k: int = 0  # experts that a token is sent to
    expert_parameters: int = 0  # numbers in one expert's weights, in the layer where they are most
    expert_bytes: int = 0  # of these weights
    optimizer_bytes: int = 0  # that the optimizer keeps for one expert
    takes_no_replicas: int = 0  # 1: the framework's layers hold no replicas
    dtype: str = ""  # of the weights, as ``bfloat16``
    device: str = ""  # as ``cuda``
    step_seconds: float = 0.0  # of a training step; in a series that is read, the median of what its lines say
    expert_seconds: float = 0.0  # those in expert work, dispatch to combine; the median, too
    imbalance: float = 0.0  # max / mean rank load meanwhile, the median, too; 0: that of experts in logical order
    intra_node_bandwidth: float = 0.0  # GB/s of a rank, as the job measured it
    inter_node_bandwidth: float = 0.0


def lines_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, JSON value) of each line of a file. The value is None for a line that is not JSON."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, None


def first_line(num_layers: int, num_experts: int, job: RecordedJob | None = None) -> dict[str, Any]:
    """Return the first line of a start of the job, a dict: format, version, L, E, and the known fields of ``job``."""
    return {"format": FORMAT, "version": 1, "layers": num_layers, "experts": num_experts, **_entry(job)}


def line_of(load_TLE: NDArray[np.int64], steps: int, job: RecordedJob | None = None) -> dict[str, Any]:
    """Return a line as a dict: windows ``[T, L, E]``, oldest first, ``steps`` training steps of each, and ``job``."""
    return {"steps": steps, **_entry(job), **encode(load_TLE)}


def holds_series(folder: Path) -> bool:
    """Return whether a folder has a recorded load (``load.jsonl``)."""
    return (folder / NAME).is_file()


def shape_recorded(folder: Path) -> tuple[int, int] | None:
    """Return (L, E) of the series in a folder; None: there is none. FileError: its first line is no header."""
    lines = lines_of(folder / NAME) if holds_series(folder) else iter(())
    return next((_shape_in(line) for _, line in lines if line is not None), None)


def read_series(folder: Path) -> tuple[NDArray[np.int64], list[int], RecordedJob]:
    """Return all windows of a run, int64 ``[T, L, E]``, oldest first; the training steps of each; and the job by the
    newest start that has windows (seconds and imbalance: medians over its lines). A line that a crash cut off is left
    out. FileError: no window, more than 8 GiB, or a line of another format."""
    require_readable(folder / NAME, MOST_BYTES)
    windows: list[NDArray[np.int64]] = []
    steps: list[int] = []
    starts: list[list[dict[str, Any]]] = []
    shape, nbytes, broken = (0, 0), 0, 0
    for number, line in lines_of(folder / NAME):
        if line is None:
            broken = number
            continue
        try:
            if not starts or "format" in line:
                if (here := _shape_in(line)) != shape and starts:
                    raise ValueError(f"its layers x experts are {here}, those before {shape}")
                shape, broken = here, 0
                starts.append([_known_of_job(line)])
                continue
            if broken:
                raise ValueError(f"the one before, line {broken}, is not JSON")
            windows.append(decode(line, *shape))
            if type(line["steps"]) is not int or not 0 < line["steps"] < _MOST:
                raise ValueError(f"steps is {line['steps']!r}: a window is of 1 or more training steps")
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"{NAME}, line {number}: {error}") from None
        if (nbytes := nbytes + windows[-1].nbytes) > MOST_BYTES:
            raise FileError(f"more than {MOST_BYTES >> 30} GiB of load: give a part of the lines")
        steps += [line["steps"]] * len(windows[-1])
        starts[-1].append(_known_of_job(line))
    if not windows:
        raise FileError("no load has been recorded here yet")
    header, *said = next(lines for lines in reversed(starts) if len(lines) > 1)
    known = dict(chain(header.items(), *(line.items() for line in said)))
    for name in ("step_seconds", "expert_seconds", "imbalance"):
        known[name] = median([line[name] for line in said if name in line] or [0.0])
    return np.concatenate(windows), steps, RecordedJob(**known)


def encode(load: NDArray[np.int64], level: int = -1) -> dict[str, Any]:
    """Return int64 ``[T, L, E]`` as a JSON-able dict: ``shape`` and ``data`` (zlib of this ``level``, then base64)."""
    data = zlib.compress(np.ascontiguousarray(load, dtype="<i8").tobytes(), level)
    return {"shape": list(load.shape), "data": base64.b64encode(data).decode()}


def decode(saved: Any, num_layers: int, num_experts: int) -> NDArray[np.int64]:
    """Return what `encode` was given. ValueError: damaged, or another L or E."""
    try:
        windows, layers, experts = (int(length) for length in saved["shape"])
        data = base64.b64decode(saved["data"], validate=True)
        if (layers, experts) != (num_layers, num_experts) or not 0 <= windows <= LONGEST:
            raise ValueError(f"it has shape {saved['shape']}, not [windows, {num_layers}, {num_experts}]")
        nbytes = 8 * windows * layers * experts
        raw = zlib.decompressobj().decompress(data, nbytes + 1)
    except (KeyError, TypeError, ValueError, OverflowError, zlib.error) as error:
        raise ValueError(f"the saved load cannot be read: {type(error).__name__}: {error}") from None
    if len(raw) != nbytes:
        raise ValueError("the saved load has another size than it says")
    return np.frombuffer(raw, dtype="<i8").astype(np.int64).reshape(windows, layers, experts)


def _entry(job: RecordedJob | None) -> dict[str, Any]:
    return {} if job is None else {"job": {name: value for name, value in asdict(job).items() if value}}


def _known_of_job(line: Any) -> dict[str, Any]:
    """Return usable values of fields of `RecordedJob` that a line says: of its kind, and within bounds."""
    said: Any = line.get("job") if isinstance(line, dict) else None
    known = {}
    for entry in fields(RecordedJob) if isinstance(said, dict) else ():
        kind, value = type(entry.default), said.get(entry.name)
        if type(value) is kind is str or (kind is not str and type(value) in (int, kind) and 1 / _MOST < value < _MOST):
            known[entry.name] = value
    return known


def _shape_in(line: Any) -> tuple[int, int]:
    """Return L and E by the first line of a start."""
    try:
        layers, experts = int(line["layers"]), int(line["experts"])
        if (line["format"], line["version"]) == (FORMAT, 1) and 0 < layers * experts <= _WIDEST and layers > 0:
            return layers, experts
    except (ValueError, KeyError, TypeError, OverflowError):
        pass
    raise FileError(f"no recorded load: it does not begin with {FORMAT!r}, version 1")
