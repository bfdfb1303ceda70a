"""TensorRT-LLM: load balancer configurations, and directories of expert statistics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from ...observe.run_folder import JobRecord
from ...placement import Placement
from ...utils.files import FileError, write_file
from .base import Engine, ExpertMap
from .reading import Content, FormatError, LoadArray, numbers, read_tensors, require_few


class TensorRTLLM(Engine):
    name = "tensorrt-llm"
    numbers_dense_layers = True
    placement_endings = (".yaml", ".yml")
    load_names: ClassVar = {"directory": "rank*.safetensors"}

    def placement(self, content: Content) -> ExpertMap | None:
        """Its load balancer configuration: ``initial_global_assignments: {layer: [num_slots]}``.

        Its reader (``llmapi/llm_args.py``, ``MoeLoadBalancerConfig``) takes these keys and no others: ``num_slots``,
        ``initial_global_assignments``, ``layer_updates_per_iter``. Every MoE layer needs a row under its number in the
        model, ``num_slots`` long, that names every expert (``fused_moe/interface.py``); EP size divides ``num_slots``.
        """
        if content.kind != "yaml" or not content.holds("initial_global_assignments"):
            return None
        assignments = content.value["initial_global_assignments"]
        if not isinstance(assignments, dict) or not assignments:
            raise FormatError("initial_global_assignments holds no layers")
        if not all(isinstance(layer, int) and layer >= 0 for layer in assignments):
            raise FormatError("a layer of initial_global_assignments is no number")
        layers = tuple(sorted(assignments))
        return ExpertMap([assignments[layer] for layer in layers], layers=layers)

    def load(self, content: Content) -> JobRecord | None:
        """A directory of statistics, one window an iteration.

        ``rank*.safetensors`` hold one count vector [E] by name ``<iteration>_<layer>``; they are summed over ranks.
        ``rank*_raw.safetensors`` are left alone. Dense layers do not occur, so layer numbers are taken in ascending
        order. Checked against its ``examples/wide_ep/ep_load_balancer/utils.py`` (``load_expert_statistic``).
        """
        files = sorted(content.path.glob("rank*.safetensors")) if content.kind == "directory" else []
        if not files:
            return None
        counts: dict[tuple[int, int], LoadArray] = {}
        experts = 0
        for file in files:
            for key, vector in _vectors(file) if not file.stem.endswith("_raw") else ():
                experts = experts or len(vector)
                if len(vector) != experts:
                    raise FormatError(
                        f"{file.name}: iteration {key[0]}, layer {key[1]} counts {len(vector)} experts, others "
                        f"{experts}: give one run's files alone"
                    )
                counts[key] = counts.get(key, 0.0) + vector
                require_few(len(counts) * experts, "the directory")
        iterations, layers = (sorted({key[part] for key in counts}) for part in (0, 1))
        if not counts or len(counts) != len(iterations) * len(layers):
            raise FormatError(
                f"{len(counts)} count vectors for {len(iterations)} iterations x {len(layers)} layers: some are missing"
            )
        return JobRecord(np.array([[counts[iteration, layer] for layer in layers] for iteration in iterations]))

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        rows = enumerate(placement.physical_to_logical.tolist(), start=dense_layers)
        lines = [f"  {layer}: {json.dumps(row)}" for layer, row in rows]
        head = [f"num_slots: {placement.num_slots}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
        write_file(path, "\n".join(head + lines) + "\n")


def _vectors(file: Path) -> Iterator[tuple[tuple[int, int], LoadArray]]:
    """Yield each count vector of one rank's file with its (iteration, layer)."""
    try:
        for name, values in read_tensors(file).items():
            match = re.fullmatch(r"([0-9]{1,18})_([0-9]{1,18})", name)
            if match is None:
                raise FormatError(f"it holds {name[:80]!r}, which is no <iteration>_<layer>")
            vector = numbers(values, name)
            if vector.ndim != 1 or not vector.size:
                raise FormatError(f"{name} has shape {list(vector.shape)}; it must be [experts]")
            yield (int(match[1]), int(match[2])), vector
    except FileError as error:
        raise FormatError(f"{file.name}: {error}") from None
