"""Engines whose files are known, in the order in which they are asked; our own files and vLLM's maps are here.

Megatron and slime come before SGLang: folders of SGLang may hold other ``.pt`` files, those of slime hold nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import numpy as np

from ...load.series import holds_series
from ...observe.run_folder import JobRecord, read_run
from ...placement import Placement, PlacementError
from ...utils.files import FileError, replacing, write_file
from ...utils.placement_file import ENDINGS, FILE_FORMAT
from .base import Engine, ExpertMap
from .megatron import Megatron
from .reading import Content, LoadArray, expert_ids, names_in
from .sglang import SGLang
from .slime import Slime
from .tensorrt_llm import TensorRTLLM


class Own(Engine):
    """Placements as ``placement.py`` writes them, loads as arrays named ``load``, the folder of a run."""

    name = "eplb-runtime"
    keeps_homes = True
    placement_endings = ENDINGS
    load_endings = (".npz", ".safetensors", ".json")
    load_names: ClassVar = {"npz": '"load"', "safetensors": '"load"', "json": '"load"'}

    def placement(self, content: Content) -> Placement | None:
        if content.kind == "json" and content.holds("format") and content.value["format"] == FILE_FORMAT:
            return Placement.from_fields(content.value)
        if content.kind == "safetensors" and content.metadata.get("format") == FILE_FORMAT:
            arrays = {
                name: expert_ids(content.value[name], name) if content.holds(name) else None
                for name in ("physical_to_logical", "home")
            }
            return Placement.from_fields({**content.metadata, **arrays})
        return None

    def load(self, content: Content) -> JobRecord | None:
        if content.kind == "directory" and holds_series(content.path):
            return read_run(content.path)
        return JobRecord(content.value["load"]) if content.kind in self.load_names and content.holds("load") else None

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        placement.save(path)

    def save_load(self, path: Path, load: LoadArray, dense_layers: int) -> None:
        array = load.astype(np.int64) if np.array_equal(load, np.floor(load)) else load
        if path.suffix == ".npz":
            with replacing(path) as file:
                np.savez_compressed(file, load=array)
        elif path.suffix == ".safetensors":
            from safetensors.numpy import save

            write_file(path, save({"load": array}))
        else:
            write_file(path, json.dumps({"load": array.tolist()}))


class VLLM(Engine):
    """vLLM's ``physical_to_logical_map`` as nested lists, [MoE layers][P].

    vLLM's main branch reads no map at start; its proposals to (pull requests 49572 and 53022) take this shape and
    check ids and that every expert has a slot.
    """

    name = "vllm"
    placement_endings = (".json",)

    def placement(self, content: Content) -> ExpertMap | None:
        return ExpertMap(content.value) if content.kind == "json" and isinstance(content.value, list) else None

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        write_file(path, json.dumps(placement.physical_to_logical.tolist()))


OWN = Own()
ENGINES: tuple[Engine, ...] = (OWN, Megatron(), Slime(), SGLang(), VLLM(), TensorRTLLM())
FORMATS = tuple(engine.name for engine in ENGINES if engine.placement_endings)
"""What can be written."""


def find_placement(content: Content) -> tuple[Placement | ExpertMap, Engine] | None:
    """Return the placement in a file and the engine whose file it is; None: it holds none."""
    found = ((engine.placement(content), engine) for engine in ENGINES)
    return next(((held, engine) for held, engine in found if held is not None), None)


def find_load(content: Content) -> tuple[JobRecord, Engine] | None:
    """Return the load in a file, unchecked, and the engine whose file it is; None: it holds none."""
    found = ((engine.load(content), engine) for engine in ENGINES)
    return next(((held, engine) for held, engine in found if held is not None), None)


def held_in(content: Content) -> str:
    """Return what a file holds in which no engine finds what was looked for."""
    if content.kind == "directory":
        return "no file that an engine dumps"
    return names_in(content.value) if isinstance(content.value, Mapping) else f"a {type(content.value).__name__}"


def why_no_load(content: Content) -> str:
    """Return why a file has no load, and how to store one."""
    with suppress(FileError, PlacementError):  # one that is broken is none of ours, either
        if (held := find_placement(content)) is not None:
            return f'holds a placement ({held[1].name}), not a load; write a load as {{"load": [...]}}'
    wanted = " or ".join(engine.load_names[content.kind] for engine in ENGINES if content.kind in engine.load_names)
    if content.kind == "directory":
        return f"no load in this directory: it has no {wanted}"
    return f"no {wanted or 'load'} in it, only {held_in(content)}: store the counts under that name"
