"""Our own files: placements as ``placement.py`` writes them, loads as arrays named ``load``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..placement import FILE_FORMAT, Placement
from .arrays import LoadArray
from .base import Engine
from .content import Content
from .errors import LoadFileError


class Own(Engine):
    name = "eplb-runtime"
    needs_ranks = keeps_empty_slots = True
    load_names: ClassVar = {"npz": '"load"', "safetensors": '"load"', "json": '"load"'}

    def placement(self, content: Content) -> Placement | None:
        said = content.value.get("format") if content.kind == "json" and content.holds("format") else None
        return Placement.load(content.path) if FILE_FORMAT in (said, content.metadata.get("format")) else None

    def load(self, content: Content) -> Any | None:
        return content.value["load"] if content.kind in self.load_names and content.holds("load") else None

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        placement.save(path)

    def save_load(self, path: Path, load: LoadArray, dense_layers: int) -> None:
        array = load.astype(np.int64) if np.array_equal(load, np.floor(load)) else load
        if path.suffix == ".npz":
            np.savez_compressed(path, load=array)
        elif path.suffix == ".safetensors":
            from safetensors.numpy import save_file

            save_file({"load": array}, path)
        elif path.suffix == ".json":
            path.write_text(json.dumps({"load": array.tolist()}))
        else:
            raise LoadFileError("a load file is written as .npz, .safetensors or .json")
