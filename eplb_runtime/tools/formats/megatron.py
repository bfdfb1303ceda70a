"""Megatron-LM's router trace: the experts that each token of a training job was sent to, by rank, step and layer."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...load.series import RecordedJob
from ...observe.run_state import JobRecord
from ...utils.files import FileError, require_readable
from .reading import MOST_EXPERTS, Content, expert_ids, first_line

NAME = re.compile(r"router_trace_rank\d+\.jsonl")
STAGE = "pre_dispatch"
"""Place in a layer where the choices were taken; lines of any other stage are left out."""
MOST_BYTES = 64 << 30  # of one rank's file, which is read line by line

_Layer = tuple[bool, int, int]
"""In a multi-token prediction block or not, that block's index, and the layer's number in its block."""


def load_in(content: Content) -> JobRecord | None:
    """Return the load of a directory that ``--moe-routing-trace-path`` has filled, or of one rank's file of it: one
    window a step. None: there is no such file. FileError: a line is no router trace, or no step has all layers.

    Checked against Megatron-LM's ``core/transformer/moe/router_trace.py``: a line is a micro-batch of one router, with
    ``step``, ``stage``, ``block``, ``layer``, ``top_indices`` ``[tokens, topk]``, and ``mtp_idx`` for layers of
    multi-token prediction, which come last here. Steps that not all layers have reached, as the last one of a job that
    was stopped, are left out. The number of experts is that of ``logit_shape`` where logits were captured, and else one
    more than the largest id. The layers take no replicas.
    """
    files, ranks = [content.path] if content.kind == "jsonl" else [], 0
    if content.kind == "directory":
        files = sorted(path for path in content.path.iterdir() if NAME.fullmatch(path.name))
        ranks = len(files)
    if not files:
        return None
    load = _traced(files)
    return JobRecord(load, (1,) * len(load), RecordedJob(ranks=ranks, takes_no_replicas=1))


def _traced(files: list[Path]) -> NDArray[np.int64]:
    """Return int64 ``[T, L, E]``, summed over ranks and micro-batches."""
    counts: dict[tuple[int, _Layer], NDArray[np.int64]] = {}
    experts = 0
    for file in files:
        for number, line in _lines(file):
            try:
                key, ids, of_logits = _read(line)
            except KeyError as error:
                raise FileError(f"{file.name}, line {number}: a router trace has {error} in each line") from None
            except (TypeError, ValueError, OverflowError, RecursionError) as error:
                said = first_line(error)
                raise FileError(f"{file.name}, line {number}: no line of a router trace ({said})") from None
            if key is None:
                continue
            before = counts.get(key, np.zeros(0, np.int64))
            counts[key] = np.bincount(ids, minlength=len(before))
            counts[key][: len(before)] += before
            experts = max(experts, len(counts[key]), of_logits)
    steps, layers = {step for step, _ in counts}, sorted({layer for _, layer in counts})
    whole = [step for step in sorted(steps) if all((step, layer) in counts for layer in layers)]
    if not whole:
        raise FileError("no step of the trace has all its layers: give the files of all ranks, in one directory")
    load = np.zeros((len(whole), len(layers), experts), np.int64)
    for window, step in enumerate(whole):
        for row, layer in enumerate(layers):
            load[window, row, : len(counts[step, layer])] = counts[step, layer]
    return load


def _read(line: bytes) -> tuple[tuple[int, _Layer] | None, NDArray[np.int64], int]:
    """Return step and layer of a line (None: of another stage), its experts, and E where the line says it, else 0."""
    record: Any = json.loads(line)
    if not isinstance(record, Mapping):
        raise TypeError(f"it holds a {type(record).__name__}")
    none = np.zeros(0, np.int64)
    if record.get("stage", STAGE) != STAGE:
        return None, none, 0
    mtp = record.get("mtp_idx")
    layer = (record.get("block", "decoder") != "decoder", 0 if mtp is None else int(mtp), int(record["layer"]))
    rows = record["top_indices"]
    ids = expert_ids(rows, "top_indices").reshape(-1).astype(np.int64) if rows else none
    ids = ids[ids >= 0]  # a token that is dropped, or padding
    shape = record.get("logit_shape")
    of_logits = int(shape[-1]) if isinstance(shape, list) and shape else 0
    if (largest := max(of_logits - 1, int(ids.max(initial=0)))) >= MOST_EXPERTS:
        raise ValueError(f"expert {largest}")
    return (int(record["step"]), layer), ids, of_logits


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield numbers and lines of a file, without a last one that was cut off."""
    require_readable(path, MOST_BYTES)
    with open(path, "rb") as file:
        yield from ((number, line) for number, line in enumerate(file, 1) if line.endswith(b"\n"))
