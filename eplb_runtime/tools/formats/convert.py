"""Placements and loads to and from the serving engines' files."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ...placement import EMPTY, Placement
from ...utils.files import require_writable
from .base import Engine, ExpertMap
from .engines import ENGINES, FORMATS, OWN, find_load, find_placement, held_in
from .loads import checked_load, resolved_path
from .reading import FormatError, about, open_content
from .slots import fill_empty_slots, restore_homes

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
    """"kept", "restored" (see ``slots.restore_homes``), or "": the written format has no homes."""
    numbered_from_0: bool = False
    """The format numbers all layers of the model, and ``dense_layers`` was not given: none was assumed."""


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    num_ranks: int | None = None,
    dense_layers: int | None = None,
) -> Conversion:
    """Read a placement or a load and write it in another format.

    Args:
        source: any file that :func:`read_placement` or :func:`loads.read_load` understands.
        destination: the file to write.
        to: one of ``FORMATS``; None: by the ending (``.yaml`` TensorRT-LLM, ``.pt`` SGLang, others our own).
        num_ranks: EP size R; engines' maps do not say it, and our own files need it.
        dense_layers: leading layers of the model without experts, which SGLang and TensorRT-LLM number too: left out
            when read, put back when written. None: none, or what the file says itself; required where SGLang's or
            slime's rows, one for each layer of the model, become a file of MoE layers.

    Raises:
        FormatError, PlacementError: what is wrong with which file.
        OSError: the destination cannot be written.
    """
    source, destination = resolved_path(source), Path(destination)
    target = _engine(to or BY_ENDING.get(destination.suffix, OWN.name))
    with about(destination, reading=False):
        require_writable(destination, sorted({*target.placement_endings, *target.load_endings}))
    with about(source):
        content = open_content(source)
        found, loaded = find_placement(content), None
        if found is None:
            loaded = find_load(content)
            if loaded is None:
                raise FormatError(f"neither a placement nor a load: it holds {held_in(content)}")
            if num_ranks is not None:
                raise FormatError("it holds a load, which has no ranks: leave --ranks out")
            record, engine = loaded
            skipped, written = _dense_layers(engine, target, dense_layers)
            load = checked_load(record.load, skipped)
        else:
            held, engine = found
            if num_ranks is None and not engine.keeps_homes and target.keeps_homes:
                raise FormatError(f"a {engine.name} map does not say how many ranks it is for: give --ranks R")
            layers = held.layers if isinstance(held, ExpertMap) else None
            skipped, written = _dense_layers(engine, target, dense_layers, layers)
            placement, homes = _as_placement(held, num_ranks, skipped)
    numbered_from_0 = dense_layers is None and target.numbers_dense_layers and not engine.numbers_dense_layers
    if found is None:
        with about(destination, reading=False):
            _require_ending(destination, target, target.load_endings, "load")
            target.save_load(destination, load, written)
        return Conversion("load", engine.name, target.name, load.shape, numbered_from_0=numbered_from_0)
    filled = write_placement(destination, placement, target.name, written)
    shape, homes = placement.physical_to_logical.shape, homes if target.keeps_homes else ""
    return Conversion("placement", engine.name, target.name, shape, filled, homes, numbered_from_0)


def read_placement(path: str | Path, num_ranks: int, dense_layers: int = 0, *, layout: str | None = None) -> Placement:
    """Read a placement from our own file or from an engine's map.

    Args:
        num_ranks: EP size R.
        dense_layers: leading rows of an SGLang map that are left out.
        layout: maps know no homes. None: the home layout where an engine's map allows it (see ``slots.restore_homes``),
            else the free one; ``"home"``: it must; ``"free"``: homes are left out.

    Raises:
        FormatError, PlacementError: the file holds no placement, or one for another number of ranks.
    """
    path = Path(path)
    with about(path):
        content = open_content(path)
        found = find_placement(content)
        if found is None:
            if find_load(content) is not None:
                raise FormatError("holds a load, not a placement")
            raise FormatError(f"neither a placement nor a load: it holds {held_in(content)}")
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
    with about(path, reading=False):
        _require_ending(path, engine, engine.placement_endings, "placement")
        engine.save_placement(path, placement, dense_layers)
    return filled


def _engine(name: str) -> Engine:
    if name not in FORMATS:
        raise FormatError(f"unknown format {name!r}; choose one of: {', '.join(FORMATS)}")
    return next(engine for engine in ENGINES if engine.name == name)


def _require_ending(path: Path, engine: Engine, endings: tuple[str, ...], kind: str) -> None:
    if not endings:
        raise FormatError(
            f"{engine.name} reads no {kind} file; write the load for sglang, or plan and convert the plan"
        )
    require_writable(path, endings)


def _as_placement(
    held: Placement | ExpertMap, num_ranks: int | None, skipped: int, layout: str | None = None
) -> tuple[Placement, str]:
    """Return it for so many ranks, without the first ``skipped`` rows of a map, and what became of the homes."""
    if isinstance(held, ExpertMap):
        placement = held.placement(num_ranks or 1, skipped)
    elif num_ranks in (None, held.num_ranks):
        placement = held
    else:
        raise FormatError(f"the placement is for {held.num_ranks} ranks, not {num_ranks}")
    if layout == "free":
        if (placement.physical_to_logical == EMPTY).any():
            raise FormatError("it has empty replica slots, which the free layout does not know")
        return Placement(placement.physical_to_logical, placement.num_experts, placement.num_ranks), ""
    if placement.home is not None:
        return placement, "kept"
    restored = restore_homes(placement) if layout == "home" or isinstance(held, ExpertMap) else None
    if restored is None and layout == "home":
        raise FormatError(
            "it cannot be read in the home layout: not every expert is exactly once in the first slots (experts / "
            "ranks of them) of all ranks, or one is on a rank twice"
        )
    return (placement, "") if restored is None else (restored, "restored")


def _dense_layers(
    source: Engine, target: Engine, given: int | None, layers: tuple[int, ...] | None = None
) -> tuple[int, int]:
    """Return how many leading rows to leave out, and how many dense layers to write; ``layers``: the MoE layers'
    numbers, where the file gives them."""
    if layers is not None:
        if given not in (None, layers[0]):
            raise FormatError(
                f"its first MoE layer has number {layers[0]}: leave --dense-layers out, or give {layers[0]}"
            )
        if target.numbers_dense_layers and any(after - before != 1 for before, after in pairwise(layers)):
            raise FormatError(
                f"its MoE layers {', '.join(map(str, layers[:4]))}, ... do not follow each other; {target.name} files "
                "are written only for models whose MoE layers do"
            )
        return 0, layers[0] if target.numbers_dense_layers else 0
    if given and not (source.numbers_dense_layers or target.numbers_dense_layers):
        names = f"{source.name} nor {target.name}"
        raise FormatError(f"neither {names} files number dense layers: leave --dense-layers out")
    if given is None and source.has_dense_rows and not target.has_dense_rows:
        raise FormatError(
            f"{source.name} files have a row for each layer of the model: give --dense-layers N, the number before the "
            "first MoE layer (0: none)"
        )
    return (given or 0) if source.has_dense_rows else 0, given or 0
