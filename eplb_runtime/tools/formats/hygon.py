"""Hygon's vLLM plugin: offline expert maps, one or several models in a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .arrays import names_in
from .base import Engine, ExpertMap
from .content import Content
from .errors import ConvertError


class Hygon(Engine):
    """``{"version": 2, "model_maps": {model class: map}}``, or one map alone (version 1). Only read.

    A map has ``physical_to_logical_map`` [MoE layers][P] (``expert_map`` in older files) beside ``model_class``,
    ``num_moe_layers``, ``num_logical_experts``, ``num_physical_experts`` and ``num_redundant_experts``. A model with
    speculative decoding layers (MTP) records them as a model of its own.

    Checked against HYGON-AI/vllm-plugin-das: ``record_offline_expert_map``, and ``load_static_eplb_plan`` in
    ``model_executor/layers/fused_moe/static_eplb.py``.
    """

    name = "hygon"

    def placement(self, content: Content) -> ExpertMap | None:
        if content.kind != "json":
            return None
        if content.holds("model_maps"):
            return _map_of(_chosen(content.value["model_maps"], content.model))
        described = content.holds("model_class") or content.holds("num_moe_layers")
        return _map_of(content.value) if described and _has_rows(content.value) else None


def _chosen(maps: Any, model: str | None) -> Any:
    if not isinstance(maps, Mapping) or not maps:
        raise ConvertError('"model_maps" holds no model')
    if model is None and len(maps) > 1:
        raise ConvertError(f"it holds maps of several models, {names_in(maps)}: give --model NAME")
    if model is not None and model not in maps:
        raise ConvertError(f"it holds no model {model!r}, only {names_in(maps)}")
    return maps[model] if model is not None else next(iter(maps.values()))


def _map_of(fields: Any) -> ExpertMap:
    if not isinstance(fields, Mapping) or not _has_rows(fields):
        raise ConvertError('a model without "physical_to_logical_map"')
    rows = fields.get("physical_to_logical_map", fields.get("expert_map"))
    said = fields.get("num_moe_layers")
    if isinstance(said, int) and isinstance(rows, list) and said != len(rows):
        raise ConvertError(f"it says {said} MoE layers, its map has {len(rows)}")
    experts = fields.get("num_logical_experts")
    return ExpertMap(rows, num_experts=experts if isinstance(experts, int) else None)


def _has_rows(fields: Mapping[str, Any]) -> bool:
    return "physical_to_logical_map" in fields or "expert_map" in fields
