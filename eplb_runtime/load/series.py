"""A load series as it is recorded: a folder of text files that only grow, so that a crash costs the last line at most.

``load/000001.jsonl`` in the folder of a run; another file for each start of the job. The
first line of a file is ``{"format": "eplb-runtime-load", "version": 1, "layers": L, "experts": E}``. Each other holds
windows, oldest first: ``{"steps": training steps of a window, "shape": [T, L, E], "data": ...}``, the data being int64,
little-endian, compressed by zlib (whose checksum notices what is broken), in base64. Any line may also have ``"job"``,
fields of `RecordedJob` that are known by then. Who counts is not known here.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..utils.files import FileError, require_readable

FORMAT = "eplb-runtime-load"
ENDING = ".jsonl"
LONGEST = 1 << 20
"""Windows of one line; far more than anybody keeps."""
MOST_BYTES = 8 << 30
"""Of a series in memory."""
_WIDEST = 1 << 24
"""L x E of any model."""
_MOST = 1 << 53
"""No number of a job is larger."""


@dataclass(frozen=True)
class RecordedJob:
    """What a series says of the job that was recorded. 0 or empty: unknown.

    Args:
        ranks: of the job; counts are summed over all of them.
        ranks_per_node: consecutive ranks that share a node.
        ep_size: ranks among which the experts were spread; 1: each rank held all of them.
        interval: steps between two writings, or between two decisions.
        hidden_size: columns of a token.
        top_k: experts that a token is sent to.
        expert_parameters: numbers in one expert's weights, in the layer where they are most.
        expert_bytes: bytes of these weights.
        optimizer_bytes: bytes that the optimizer keeps for one expert.
        takes_no_replicas: 1: the framework's layers hold no replicas.
        dtype, device: of the weights, as ``bfloat16`` and ``cuda``.
        step_seconds: of a training step; in a series that is read, the median of what its lines say.
        expert_seconds: those of a training step in expert work, dispatch to combine; the median, too.
        imbalance: max / mean rank load while these seconds were measured; 0: that of experts in logical order.
        intra_node_bandwidth, inter_node_bandwidth: GB/s of a rank, as the job measured them.
    """

    ranks: int = 0
    ranks_per_node: int = 0
    ep_size: int = 0
    interval: int = 0
    hidden_size: int = 0
    top_k: int = 0
    expert_parameters: int = 0
    expert_bytes: int = 0
    optimizer_bytes: int = 0
    takes_no_replicas: int = 0
    dtype: str = ""
    device: str = ""
    step_seconds: float = 0.0
    expert_seconds: float = 0.0
    imbalance: float = 0.0
    intra_node_bandwidth: float = 0.0
    inter_node_bandwidth: float = 0.0

    def known(self) -> dict[str, Any]:
        """The fields that say something, as a line holds them."""
        values = ((entry.name, getattr(self, entry.name)) for entry in fields(self))
        return {name: value for name, value in values if value}


class SeriesWriter:
    """Appends to the series of a run; one process at a time.

    Args:
        run: folder of the run; made if it is not there.
        num_layers, num_experts: L and E of each window.
        job: what is known of the job at its start.

    Raises:
        FileError: the run holds the load of another model.
        OSError: the folder cannot be written to.
    """

    def __init__(self, run: Path, num_layers: int, num_experts: int, job: RecordedJob | None = None) -> None:
        self._folder = run / "load"
        self._folder.mkdir(parents=True, exist_ok=True)
        files = _files(self._folder)
        for path in files[-1:]:
            before = _shape(path, next(_lines(path), None))
            if before not in (None, (num_layers, num_experts)):
                raise FileError(
                    f"{run} holds the load of {before[0]} layers of {before[1]} experts, not {num_layers} of "
                    f"{num_experts}: name another folder for this run"
                )
        self._number = int(files[-1].stem) if files else 0
        while True:  # a file of our own: a crash may have left another with half a line
            self._number += 1
            with suppress(FileExistsError):
                self._file = _path(self._folder, self._number).open("xb", buffering=0)
                break
        self._write({"format": FORMAT, "version": 1, "layers": num_layers, "experts": num_experts, **_job_entry(job)})

    def append(self, load_TLE: NDArray[np.int64], steps: int, job: RecordedJob | None = None) -> None:
        """Add windows ``[T, L, E]``, oldest first, of ``steps`` each; they are with the operating system when this
        returns. FileError: another writer has begun a file after ours."""
        if _path(self._folder, self._number + 1).exists():
            raise FileError(f"another job writes its load to {self._folder.parent} now")
        self._write({"steps": steps, **_job_entry(job), **encode(load_TLE)})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        while data:
            data = data[self._file.write(data) :]


def holds_series(folder: Path) -> bool:
    """Whether this is the folder of a run with a recorded load, or its ``load`` folder."""
    return bool(_files_of(folder))


def read_series(folder: Path) -> tuple[NDArray[np.int64], list[int], RecordedJob]:
    """Return all windows of a run, int64 ``[T, L, E]``, oldest first, the training steps of each, and what the newest
    file with windows says of the job, by its later lines. A last line that a crash cut off is left out."""
    windows: list[NDArray[np.int64]] = []
    steps: list[int] = []
    job = RecordedJob()
    before: tuple[int, int] | None = None
    nbytes = 0
    for path in _files_of(folder):
        require_readable(path, MOST_BYTES)
        lines = _lines(path)
        shape = _shape(path, header := next(lines, None))
        if shape is None:
            continue  # the job ended before it could say what it is
        if before not in (None, shape):
            raise FileError(f"{path.name} is of {shape} layers x experts, the files before of {before}")
        before, said = shape, []
        for number, line in enumerate(lines, 2):
            try:
                windows.append(decode(line, *shape, LONGEST))
                if type(line["steps"]) is not int or not 0 < line["steps"] < _MOST:
                    raise ValueError(f"steps is {line['steps']!r}: a window is of 1 or more training steps")
            except (ValueError, KeyError, TypeError) as error:
                raise FileError(f"{path.name}, line {number}: {error}") from None
            if (nbytes := nbytes + windows[-1].nbytes) > MOST_BYTES:
                raise FileError(f"more than {MOST_BYTES >> 30} GiB of load: give a part of the files")
            steps += [line["steps"]] * len(windows[-1])
            said.append(_job_of(line))
        if said:
            known = _job_of(header)
            for entry in said:
                known |= entry
            for name in ("step_seconds", "expert_seconds"):
                known[name] = median([entry[name] for entry in said if name in entry] or [0.0])
            job = RecordedJob(**known)
    if not windows:
        raise FileError("no load has been recorded here yet")
    return np.concatenate(windows), steps, job


def encode(load: NDArray[np.int64], level: int = -1) -> dict[str, Any]:
    """int64 ``[T, L, E]`` as JSON; much smaller than lists of numbers. ``level``: of zlib, 1 is quickest."""
    data = zlib.compress(np.ascontiguousarray(load, dtype="<i8").tobytes(), level)
    return {"shape": list(load.shape), "data": base64.b64encode(data).decode()}


def decode(saved: Any, num_layers: int, num_experts: int, most_windows: int) -> NDArray[np.int64]:
    """Return what `encode` wrote, at most the newest ``most_windows``; ValueError: it is something else."""
    try:
        windows, layers, experts = (int(length) for length in saved["shape"])
        data = base64.b64decode(saved["data"], validate=True)
    except (KeyError, TypeError, OverflowError, binascii.Error) as error:
        raise ValueError(f"not a saved load: {type(error).__name__}: {error}") from None
    if (layers, experts) != (num_layers, num_experts) or not 0 <= windows <= LONGEST:
        raise ValueError(f"the saved load has shape {saved['shape']}, not [windows, {num_layers}, {num_experts}]")
    nbytes = 8 * windows * layers * experts
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise ValueError(f"the saved load cannot be read: {error}") from None
    if len(raw) != nbytes:
        raise ValueError("the saved load has another size than it says")
    load = np.frombuffer(raw, dtype="<i8").astype(np.int64).reshape(windows, layers, experts)
    return load[max(0, windows - most_windows) :]


def _job_entry(job: RecordedJob | None) -> dict[str, Any]:
    known = {} if job is None else job.known()
    return {"job": known} if known else {}


def _job_of(line: Any) -> dict[str, Any]:
    """Return what a line says of the job: usable values of fields of `RecordedJob`."""
    said = line.get("job") if isinstance(line, Mapping) else None
    if not isinstance(said, Mapping):
        return {}
    kinds = {entry.name: type(entry.default) for entry in fields(RecordedJob)}
    return {name: value for name, value in said.items() if name in kinds and _is_usable(value, kinds[name])}


def _is_usable(value: Any, kind: type) -> bool:
    if kind is str or type(value) not in (int, kind):
        return kind is str and type(value) is str
    return bool(0 < value < _MOST)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06}{ENDING}"


def _files(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob(f"*{ENDING}") if path.stem.isdigit()), key=lambda path: int(path.stem))


def _files_of(folder: Path) -> list[Path]:
    return _files(folder / "load") or _files(folder)


def _shape(path: Path, header: Any) -> tuple[int, int] | None:
    """Return L and E of a file by its first line; None: it has no whole line."""
    if header is None:
        return None
    try:
        layers, experts = int(header["layers"]), int(header["experts"])
        known = header["format"] == FORMAT and header["version"] == 1
    except (ValueError, KeyError, TypeError):
        known, layers, experts = False, 0, 0
    if not known or layers < 1 or experts < 1 or layers * experts > _WIDEST:
        raise FileError(f"{path.name} is no recorded load: its first line does not say {FORMAT!r}, version 1")
    return layers, experts


def _lines(path: Path) -> Iterator[Any]:
    """Yield the values of a file's whole lines, of which the first is short; an empty one where it is not JSON."""
    with path.open("rb") as file:
        for line in chain([file.readline(4096)], file):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield {}
