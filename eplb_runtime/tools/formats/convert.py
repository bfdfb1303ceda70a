"""Placements and loads to and from the serving engines' files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement, PlacementError
from ...utils.files import FileError, require_writable
from .arrays import LoadArray, expert_ids
from .base import Engine, ExpertMap
from .content import Content, open_content
from .engines import ENGINES, OWN
from .errors import ConvertError
from .loads import checked_load, find_load, layers_without_tokens, neither, resolved_path
from .slots import fill_empty_slots, restore_homes

FORMATS = tuple(engine.name for engine in ENGINES if engine.placement_endings)
"""What can be written."""
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
    homes: str = ""
    """"kept", "restored" (see ``slots.restore_homes``), or "": what was written knows no homes."""
    numbered_from_0: bool = False
    """The format numbers all layers of the model, and nobody said how many dense ones come first: none was assumed."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    num_ranks: int | None = None,
    dense_layers: int | None = None,
    layout: str | None = None,
) -> Conversion:
    """Read a placement or a load and write it in another format.

    Args:
        source: any file that :func:`read_placement` or :func:`loads.read_load` understands.
        destination: the file to write.
        to: one of ``FORMATS``; None: by the ending (``.yaml`` TensorRT-LLM, ``.pt`` SGLang, others our own).
        num_ranks: EP size R; engines' maps do not say it, and our own files need it.
        dense_layers: leading layers of the model without experts, which SGLang and TensorRT-LLM number too: left out
            when read, put back when written. None: none, or what the file says itself; it is asked for where leading
            layers look like dense ones.
        layout: as in :func:`read_placement`.

    Raises:
        ConvertError, PlacementError: what is wrong with which file.
        OSError: the destination cannot be written.
    """
    source, destination = resolved_path(source), Path(destination)
    target = _engine(to or BY_ENDING.get(destination.suffix, OWN.name))
    with _about(destination, reading=False):
        require_writable(destination, sorted({*target.placement_endings, *target.load_endings}))
    with _about(source):
        content = open_content(source)
        found = _find_placement(content)
        if found is None:
            engine, load, dense = _read_load(content, target, dense_layers)
        else:
            held, engine = found
            if num_ranks is None and held.num_ranks is None and target.needs_ranks:
                raise ConvertError(f"a {engine.name} map does not say how many ranks it is for: give --ranks R")
            skipped, dense = _dense_layers_of_map(held, engine, target, dense_layers)
            placement, homes = _as_placement(held, num_ranks, skipped, layout)
    numbered_from_0 = dense_layers is None and target.numbers_dense_layers and not engine.numbers_dense_layers
    if found is None:
        ignored = {"--ranks": num_ranks, "--layout": layout}
        if unused := [option for option, value in ignored.items() if value is not None]:
            raise ConvertError(f"{source}: it holds a load, which has no ranks or homes: leave {unused[0]} out")
        with _about(destination, reading=False):
            _require_ending(destination, target, target.load_endings, "load")
            target.save_load(destination, load, dense)
        return Conversion("load", engine.name, target.name, load.shape, numbered_from_0=numbered_from_0)
    filled = write_placement(destination, placement, target.name, dense)
    shape, homes = placement.physical_to_logical.shape, homes if target.keeps_homes else ""
    return Conversion("placement", engine.name, target.name, shape, filled, homes, numbered_from_0)


def read_placement(
    path: str | Path,
    num_ranks: int,
    dense_layers: int = 0,
    *,
    layout: str | None = None,
) -> Placement:
    """A placement from our own file or from an engine's map.

    Args:
        num_ranks: EP size R.
        dense_layers: leading rows of an SGLang map that are left out.
        layout: maps know no homes. None: the home layout where an engine's map allows it (see ``slots.restore_homes``),
            else the free one; ``"home"``: it must; ``"free"``: homes are left out.

    Raises:
        ConvertError, PlacementError: the file holds no placement, or one for another number of ranks.
    """
    path = Path(path)
    with _about(path):
        content = open_content(path)
        found = _find_placement(content)
        if found is None:
            is_load = find_load(content) is not None
            raise ConvertError("holds a load, not a placement" if is_load else neither(content))
        held, engine = found
        return _as_placement(held, num_ranks, dense_layers if engine.has_dense_rows else 0, layout)[0]


def write_placement(path: str | Path, placement: Placement, to: str = OWN.name, dense_layers: int = 0) -> int:
    """Write a placement in one of ``FORMATS``; an engine's map loses homes and epoch.

    Returns:
        how many empty replica slots were given a copy (0 in our own format, which keeps them empty).
    """
    path, engine, filled = Path(path), _engine(to), 0
    if not engine.keeps_homes:
        filled = int((placement.physical_to_logical == EMPTY).sum())
        placement = Placement(fill_empty_slots(placement), placement.num_experts, placement.num_ranks)
    with _about(path, reading=False):
        _require_ending(path, engine, engine.placement_endings, "placement")
        engine.save_placement(path, placement, dense_layers)
    return filled


def _engine(name: str) -> Engine:
    if name not in FORMATS:
        raise ConvertError(f"unknown format {name!r}; choose one of: {', '.join(FORMATS)}")
    return next(engine for engine in ENGINES if engine.name == name)


def _require_ending(path: Path, engine: Engine, endings: tuple[str, ...], kind: str) -> None:
    if not endings:
        raise ConvertError(
            f"{engine.name} reads no {kind} file; write the load for sglang, or plan and convert the plan"
        )
    require_writable(path, endings)


@contextmanager
def _about(path: Path, reading: bool = True) -> Iterator[None]:
    """Inside, whatever is wrong is said of this file."""
    try:
        yield
    except OSError as error:
        if not reading:
            raise
        raise ConvertError(f"{path}: cannot be read: {error.strerror or error}") from None
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None
    except FileError as error:
        raise ConvertError(f"{path}: {error}") from None


# -- reading -------------------------------------------------------------------------------------------------------


def _find_placement(content: Content) -> tuple[Placement | ExpertMap, Engine] | None:
    """The placement in a file and the engine whose file it is; None: it holds none."""
    for engine in ENGINES:
        held = engine.placement(content)
        if held is not None:
            return held, engine
    return None


def _as_placement(
    held: Placement | ExpertMap, num_ranks: int | None, skipped: int, layout: str | None
) -> tuple[Placement, str]:
    """For so many ranks, without the first ``skipped`` rows of a map; and what became of the homes."""
    if isinstance(held, Placement):
        if num_ranks not in (None, held.num_ranks):
            raise ConvertError(f"the placement is for {held.num_ranks} ranks, not {num_ranks}")
        placement = held
    else:
        placement = held.placement(num_ranks or held.num_ranks or 1, skipped)
    if layout == "free":
        if (placement.physical_to_logical == EMPTY).any():
            raise ConvertError("it has empty replica slots, which the free layout does not know: leave --layout out")
        return Placement(placement.physical_to_logical, placement.num_experts, placement.num_ranks), ""
    if placement.home is not None:
        return placement, "kept"
    restored = restore_homes(placement) if layout == "home" or isinstance(held, ExpertMap) else None
    if restored is None and layout == "home":
        raise ConvertError(
            "it cannot be read in the home layout: not every expert stands exactly once in the first slots (experts / "
            "ranks of them) of all ranks, or one stands on a rank twice"
        )
    return (placement, "") if restored is None else (restored, "restored")


def _read_load(content: Content, target: Engine, given: int | None) -> tuple[Engine, LoadArray, int]:
    """The engine whose file it is, the load without dense layers, and how many dense layers to write."""
    found = find_load(content)
    if found is None:
        raise ConvertError(neither(content))
    values, engine = found
    _refuse_dense_layers(engine, target, given)
    load = checked_load(values, (given or 0) if engine.has_dense_rows else 0)
    if given is None and engine.has_dense_rows and not target.has_dense_rows:
        _ask_for_dense_layers(layers_without_tokens(load), load.shape[1], "carry no token")
    return engine, load, given or 0


def _dense_layers_of_map(
    held: Placement | ExpertMap, engine: Engine, target: Engine, given: int | None
) -> tuple[int, int]:
    """How many leading rows of the map to leave out, and how many dense layers to write."""
    if isinstance(held, ExpertMap) and held.layers is not None:
        return 0, _numbered(held.layers, target, given)
    _refuse_dense_layers(engine, target, given)
    if given is None and isinstance(held, ExpertMap) and engine.has_dense_rows and not target.has_dense_rows:
        rows = expert_ids(held.rows, "the map")
        _ask_for_dense_layers(
            _rows_in_trivial_order(rows), len(rows), "have their experts in order, as nobody planned,"
        )
    return (given or 0) if engine.has_dense_rows else 0, given or 0


def _numbered(layers: tuple[int, ...], target: Engine, given: int | None) -> int:
    """How many dense layers come first by the numbers that a file gives its MoE layers."""
    if given not in (None, layers[0]):
        raise ConvertError(f"its first MoE layer has number {layers[0]}: leave --dense-layers out, or give {layers[0]}")
    if target.numbers_dense_layers and any(after - before != 1 for before, after in pairwise(layers)):
        raise ConvertError(
            f"its MoE layers {', '.join(map(str, layers[:4]))}, ... do not follow each other; {target.name} files are "
            "written only for models whose MoE layers do"
        )
    return layers[0] if target.numbers_dense_layers else 0


def _refuse_dense_layers(source: Engine, target: Engine, given: int | None) -> None:
    if given and not (source.numbers_dense_layers or target.numbers_dense_layers):
        raise ConvertError(
            f"neither {source.name} nor {target.name} files number dense layers: leave --dense-layers out"
        )


def _ask_for_dense_layers(leading: int, layers: int, what: str) -> None:
    if 0 < leading < layers:
        raise ConvertError(
            f"the first {leading} of {layers} layers {what} as dense layers do: give --dense-layers {leading} to leave "
            "them out, or --dense-layers 0 to keep them"
        )


def _rows_in_trivial_order(rows: NDArray[np.int64]) -> int:
    """Leading rows 0, 1, 2, ... and again from 0: what SGLang gives layers without a plan."""
    trivial = np.arange(rows.shape[1]) % (int(rows.max(initial=-1)) + 1 or 1)
    planned = np.flatnonzero((rows != trivial).any(axis=1))
    return int(planned[0]) if len(planned) else len(rows)
