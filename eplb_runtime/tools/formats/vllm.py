"""vLLM: expert maps as nested lists."""

from __future__ import annotations

import json
from pathlib import Path

from ...placement import Placement
from ...utils.files import write_file
from .base import Engine, ExpertMap
from .content import Content


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
