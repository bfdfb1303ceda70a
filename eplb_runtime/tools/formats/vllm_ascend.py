"""vLLM-Ascend: expert maps by layer and device."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

from ...placement import Placement
from ...utils.files import write_file
from .base import Engine, ExpertMap
from .content import Content
from .errors import ConvertError


class VLLMAscend(Engine):
    """``layer_list[l].device_list[r].device_expert`` holds the experts of rank r's slots.

    Its readers (``eplb_utils.expert_file_to_tensor``, ``ExpertLoadBalancer``) want ``moe_layer_count`` MoE layers, all
    devices with equally many experts.
    """

    name = "vllm-ascend"
    needs_ranks = True
    placement_endings = (".json",)

    def placement(self, content: Content) -> ExpertMap | None:
        if content.kind != "json" or not content.holds("layer_list"):
            return None
        try:
            layers = [
                [device["device_expert"] for device in layer["device_list"]] for layer in content.value["layer_list"]
            ]
        except (KeyError, TypeError) as error:
            raise ConvertError(f"a vLLM-Ascend map without {error} in a layer") from None
        ranks = {len(devices) for devices in layers}
        if len(ranks) != 1:
            raise ConvertError(f"layers differ in their number of devices: {sorted(ranks)}")
        try:
            rows = [list(chain.from_iterable(devices)) for devices in layers]
        except TypeError:
            raise ConvertError("a device_expert of the vLLM-Ascend map is no list") from None
        return ExpertMap(rows, num_ranks=ranks.pop())

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        by_rank = placement.physical_to_logical.reshape(placement.num_layers, placement.num_ranks, -1).tolist()
        layers = [
            {
                "layer_id": layer,
                "device_count": placement.num_ranks,
                "device_list": [{"device_id": rank, "device_expert": experts} for rank, experts in enumerate(ranks)],
            }
            for layer, ranks in enumerate(by_rank)
        ]
        write_file(path, json.dumps({"moe_layer_count": len(layers), "layer_list": layers}))
