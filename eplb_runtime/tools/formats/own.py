"""Our own files: placements as ``placement.py`` writes them, loads as arrays named ``load``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ...load.series import holds_series, read_series
from ...placement import Placement
from ...utils.files import replacing, write_file
from ...utils.placement_file import ENDINGS, FILE_FORMAT
from .arrays import LoadArray
from .base import Engine
from .content import Content


class Own(Engine):
    name = "eplb-runtime"
    needs_ranks = keeps_homes = True
    placement_endings = ENDINGS
    load_endings = (".npz", ".safetensors", ".json")
    load_names: ClassVar = {"npz": '"load"', "safetensors": '"load"', "json": '"load"'}

    def placement(self, content: Content) -> Placement | None:
        if content.kind == "json" and content.holds("format") and content.value["format"] == FILE_FORMAT:
            return Placement.from_fields(content.value)
        if content.kind == "safetensors" and content.metadata.get("format") == FILE_FORMAT:
            arrays = {name: content.value.get(name) for name in ("physical_to_logical", "home")}
            return Placement.from_fields({**content.metadata, **arrays})
        return None

    def load(self, content: Content) -> Any | None:
        if content.kind == "directory" and holds_series(content.path):
            return read_series(content.path)[0]
        return content.value["load"] if content.kind in self.load_names and content.holds("load") else None

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
