"""Placements and loads to and from the serving engines' files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, Placement, PlacementError
from .base import Engine, ExpertMap
from .content import Content, open_content
from .engines import ENGINES, OWN
from .errors import ConvertError, FormatError
from .loads import checked_load, find_load, neither

BY_NAME = {engine.name: engine for engine in ENGINES}
FORMATS = tuple(BY_NAME)
BY_ENDING = {".yaml": "tensorrt-llm", ".yml": "tensorrt-llm", ".pt": "sglang"}
"""What is written under an ending when no format is asked for; others: our own."""


@dataclass(frozen=True)
class Conversion:
    """What :func:`convert` did. ``kind`` is "placement" or "load"; ``shape`` is [L, P] or [T, L, E]."""

    kind: str
    source_format: str
    format: str
    shape: tuple[int, ...]
    filled_slots: int = 0
    """Empty replica slots that were given a copy, since no engine's map can hold an empty slot."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    num_ranks: int | None = None,
    dense_layers: int = 0,
) -> Conversion:
    """Read a placement or a load and write it in another format.

    Args:
        source: any file that :func:`read_placement` or :func:`loads.read_load` understands.
        destination: the file to write.
        to: one of ``FORMATS``; None: by the ending (``.yaml`` TensorRT-LLM, ``.pt`` SGLang, others our own).
        num_ranks: EP size R; engine maps do not say it, so our own files and vLLM-Ascend's need it told.
        dense_layers: leading layers of the model without experts, which SGLang and TensorRT-LLM number too: left out
            when read, put back when written.

    Raises:
        ConvertError, PlacementError: what is wrong with which file.
    """
    source, destination = Path(source), Path(destination)
    target = _engine(to or BY_ENDING.get(destination.suffix, OWN.name))
    content = _open(source)
    found = _find_placement(content)
    if found is None:
        return _convert_load(content, destination, target, dense_layers)
    held, engine = found
    _check_numbering(engine, target, dense_layers)
    if num_ranks is None and held.num_ranks is None and target.needs_ranks:
        raise ConvertError(f"{source}: a {engine.name} map does not say how many ranks it is for: give --ranks R")
    placement = _as_placement(held, engine, source, num_ranks, dense_layers)
    filled = write_placement(destination, placement, target.name, dense_layers)
    return Conversion("placement", engine.name, target.name, placement.physical_to_logical.shape, filled)


def read_placement(path: str | Path, num_ranks: int, dense_layers: int = 0) -> Placement:
    """A placement from our own file (either layout) or from an engine's map (``free`` layout: maps know no homes).

    Raises:
        ConvertError, PlacementError: the file holds no placement, or one for another number of ranks.
    """
    path = Path(path)
    content = _open(path)
    found = _find_placement(content)
    if found is None:
        is_load = _find_load(content) is not None
        raise ConvertError(f"{path}: {'holds a load, not a placement' if is_load else neither(content)}")
    return _as_placement(*found, path, num_ranks, dense_layers)


def write_placement(path: str | Path, placement: Placement, to: str = OWN.name, dense_layers: int = 0) -> int:
    """Write a placement in one of ``FORMATS``; an engine's map loses homes and epoch.

    Returns:
        how many empty replica slots were given a copy (0 in our own format, which keeps them empty).
    """
    path, engine, filled = Path(path), _engine(to), 0
    if not engine.keeps_empty_slots:
        filled = int((placement.physical_to_logical == EMPTY).sum())
        placement = Placement(fill_empty_slots(placement), placement.num_experts, placement.num_ranks)
    try:
        engine.save_placement(path, placement, dense_layers)
    except FormatError as error:
        raise ConvertError(f"{path}: {error}") from None
    return filled


def fill_empty_slots(placement: Placement) -> NDArray[np.int32]:
    """int32 [L, P]: the map with each empty slot given a copy of the expert that has fewest copies so far.

    Ties go to the lower id; never an expert that stands on that rank already, if there is another.
    """
    rows = np.array(placement.physical_to_logical)
    counts = np.array(placement.copy_count)
    for layer, slot in np.argwhere(rows == EMPTY):
        rank_start = slot - slot % placement.slots_per_rank
        on_rank = rows[layer, rank_start : rank_start + placement.slots_per_rank]
        cost = counts[layer] + placement.num_slots * np.isin(np.arange(placement.num_experts), on_rank)
        expert = int(np.argmin(cost))
        rows[layer, slot] = expert
        counts[layer, expert] += 1
    return rows


def _convert_load(content: Content, destination: Path, target: Engine, dense_layers: int) -> Conversion:
    found = _find_load(content)
    if found is None:
        raise ConvertError(f"{content.path}: {neither(content)}")
    values, engine = found
    _check_numbering(engine, target, dense_layers)
    try:
        load = checked_load(values, dense_layers if engine.has_dense_rows else 0)
    except FormatError as error:
        raise ConvertError(f"{content.path}: {error}") from None
    try:
        target.save_load(destination, load, dense_layers)
    except FormatError as error:
        raise ConvertError(f"{destination}: {error}") from None
    return Conversion("load", engine.name, target.name, load.shape)


def _engine(name: str) -> Engine:
    if name not in BY_NAME:
        raise ConvertError(f"unknown format {name!r}; choose one of: {', '.join(FORMATS)}")
    return BY_NAME[name]


def _open(path: Path) -> Content:
    try:
        return open_content(path)
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror or error}") from None
    except FormatError as error:
        raise ConvertError(f"{path}: {error}") from None


def _find_placement(content: Content) -> tuple[Placement | ExpertMap, Engine] | None:
    """The placement in a file and the engine whose file it is; None: it holds none."""
    try:
        for engine in ENGINES:
            held = engine.placement(content)
            if held is not None:
                return held, engine
    except FormatError as error:
        raise ConvertError(f"{content.path}: {error}") from None
    return None


def _find_load(content: Content) -> tuple[Any, Engine] | None:
    try:
        return find_load(content)
    except FormatError as error:
        raise ConvertError(f"{content.path}: {error}") from None


def _as_placement(
    held: Placement | ExpertMap, engine: Engine, path: Path, num_ranks: int | None, dense_layers: int
) -> Placement:
    """For so many ranks, without dense layers."""
    if isinstance(held, Placement):
        if num_ranks not in (None, held.num_ranks):
            raise ConvertError(f"{path}: the placement is for {held.num_ranks} ranks, not {num_ranks}")
        return held
    try:
        return held.placement(num_ranks or held.num_ranks or 1, dense_layers if engine.has_dense_rows else 0)
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None
    except FormatError as error:
        raise ConvertError(f"{path}: {error}") from None


def _check_numbering(source: Engine, target: Engine, dense_layers: int) -> None:
    if dense_layers and not (source.numbers_dense_layers or target.numbers_dense_layers):
        raise ConvertError(
            f"neither {source.name} nor {target.name} files number dense layers: leave --dense-layers out"
        )
