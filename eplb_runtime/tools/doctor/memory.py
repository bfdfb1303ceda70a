"""What a model will take on each rank, for each choice; nothing is trained.

A model's shapes come from its configuration on the meta device, which has no memory. All numbers are bytes of one rank,
of tensors that this package makes or cuts; activations and what a framework keeps for itself are not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config import MigrationConfig
from ...moe.experts.gathering import rows_per_call
from ...moe.experts.record import RecordFormat
from ...moe.experts.registry import ExpertTensor
from ...placement import Placement
from ...replicas.bank import accumulation_dtype, replica_memory
from .machine import Backend, backends, versions

STATE_TENSORS = {"adamw": 2, "sgd": 1}
"""Tensors of a parameter's size and dtype that an optimizer keeps for it; SGD with momentum."""
SHARD_BYTES = 5 * 10**9
"""What ``export_pretrained`` writes into a file unless it is given ``max_shard_size``."""


class DoctorError(ValueError):
    """The question cannot be answered as it is put; one line that says why."""


@dataclass(frozen=True)
class Item:
    """Memory for one purpose on one rank.

    Args:
        key: the purpose in JSON.
        where: ``"device"``, ``"host"`` (the CPU's memory, which all ranks of a node share), either, or ``"disk"``.
        when: ``"always"``, or what asks for it.
    """

    key: str
    what: str
    where: str
    when: str
    nbytes: int


@dataclass(frozen=True)
class Diagnosis:
    """Memory of the model in question, and what of this machine can be used. ``shape``: the model; None: none."""

    shape: Mapping[str, Any] | None
    memory: Sequence[Item]
    versions: Mapping[str, str]
    backends: Sequence[Backend]

    @property
    def title(self) -> str:
        """Return the model and the job in words."""
        shape = self.shape
        if shape is None:
            return ""
        return (
            f"{shape['model']}: {shape['parameters'] / 1e9:.4g} billion parameters, {shape['layers']} MoE layers of "
            f"{shape['experts']} experts, on {shape['ranks']} ranks, {shape['replica_slots']} replica slots, "
            f"{shape['dtype']}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-able; memory by key, in bytes a rank."""
        said = asdict(self)
        memory = {one["key"]: one["nbytes"] for one in said.pop("memory")}
        return {"shape": said.pop("shape"), "memory_bytes": memory, **said}


def diagnose(
    model_config: str | Path | None = None,
    *,
    ranks: int = 1,
    ranks_per_node: int | None = None,
    replica_slots: int = 0,
    dtype: str = "bfloat16",
    optimizer: str = "adamw",
    staging_bytes: int | None = None,
) -> Diagnosis:
    """Look at this machine and, if one is given, at a model.

    Args:
        model_config: a folder with ``config.json``, or that file; None: no model.
        ranks: R of the EP group.
        ranks_per_node: that share a host's memory; None: 8, or all.
        replica_slots: k.
        dtype: of weights, gradients and optimizer state, a name of torch's.
        optimizer: one of STATE_TENSORS.
        staging_bytes: as in `MigrationConfig`; None: its default.

    Raises:
        DoctorError, ModelError, PlacementError, AttachError: this model cannot be spread so.
    """
    if model_config is None:
        return Diagnosis(None, (), versions(), backends())
    from ...hosts.transformers.describe import describe
    from ...hosts.transformers.models import choices_per_token, meta_model, read_config

    described = read_config(model_config)
    model = meta_model(described, getattr(torch, dtype))
    layers = describe(model).layers
    counts = sorted({layer.num_experts for layer in layers})
    if not layers:
        raise DoctorError(f"{model_config}: {type(model).__name__} has no MoE layer that can be spread")
    if len(counts) > 1:
        raise DoctorError(f"{model_config}: its MoE layers have {counts} experts: all must have as many")
    (experts,) = counts
    if (chosen := choices_per_token(described)) > experts:
        raise DoctorError(f"{model_config}: it picks {chosen} of {experts} experts for a token")
    Placement.initial(len(layers), experts, ranks, replica_slots)  # says what cannot be spread
    own = experts // ranks
    if replica_slots > experts - own:
        raise DoctorError(
            f"{replica_slots} replica slots: a rank has only {experts - own} experts of other ranks to copy"
        )
    node = min(ranks, 8) if ranks_per_node is None else ranks_per_node
    if ranks % node:
        raise DoctorError(f"{ranks} ranks do not fill nodes of {node}: give --ranks-per-node")
    stacks = [{name: getattr(layer.experts, name) for name in layer.parameters} for layer in layers]
    homes = [[nn.Parameter(one.detach()[:own], one.requires_grad) for one in of_layer.values()] for of_layer in stacks]
    spread = {id(stack) for of_layer in stacks for stack in of_layer.values()}
    shape = {
        "model": type(model).__name__,
        "dtype": dtype,
        "optimizer": optimizer,
        "layers": len(layers),
        "experts": experts,
        "ranks": ranks,
        "ranks_per_node": node,
        "replica_slots": replica_slots,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    dense = [parameter for parameter in model.parameters() if id(parameter) not in spread]
    buffers = [one for one in model.state_dict(keep_vars=True).values() if not isinstance(one, nn.Parameter)]
    migration = MigrationConfig() if staging_bytes is None else MigrationConfig(staging_bytes=staging_bytes)
    memory = _memory(shape, homes, dense, sum(buffer.nbytes for buffer in buffers), migration.staging_bytes)
    return Diagnosis(shape, memory, versions(), backends())


def _memory(
    shape: Mapping[str, Any],
    homes: Sequence[Sequence[Tensor]],
    dense: Sequence[Tensor],
    buffer_bytes: int,
    staging_bytes: int,
) -> list[Item]:
    name, ranks, node = shape["optimizer"], shape["ranks"], shape["ranks_per_node"]
    states = STATE_TENSORS[name]
    own = sum(parameter.nbytes for layer in homes for parameter in layer)
    rest = sum(parameter.nbytes for parameter in dense)
    staging = max(staging_bytes, *(_record_bytes(layer, states) for layer in homes))
    row = max(rows_per_call(parameter) * parameter[:1].nbytes for layer in homes for parameter in layer)
    export = 2 * row + max((parameter.nbytes for parameter in dense), default=0) + min(own + rest, SHARD_BYTES)
    whole = (own * ranks + rest) * (1 + states) + buffer_bytes + row
    items = [
        Item("homes_weights", "experts at home: weights", "device", "always", own),
        Item("homes_gradients", "experts at home: gradients", "device", "training", own),
        Item("homes_optimizer_state", f"experts at home: {name} state", "device", "training", own * states),
        Item("dense_weights", "the rest of the model, not sharded: weights", "device", "always", rest),
        Item("dense_gradients", "the rest: gradients", "device", "training", rest),
        Item("dense_optimizer_state", f"the rest: {name} state", "device", "training", rest * states),
        Item("training", "all of this", "device", "training", (own + rest) * (2 + states)),
    ]
    if shape["replica_slots"]:
        copies, kept = replica_memory(homes, shape["replica_slots"], gradients=True), "copies kept"
        lent = max(sum(p[0].numel() * accumulation_dtype(p).itemsize for p in layer) for layer in homes)
        items += [
            Item("copies_kept", "copies: weights, gradients", "device", kept, copies.kept),
            Item("copies_kept_no_sync", "gradients held back", "device", f"{kept}, no_sync", copies.held_back),
            Item("copies_arriving", "gradients that arrive, for each copy lent", "device", "training", lent),
        ]
    what, state, moving = "an expert, its conversion, a dense tensor, a shard", "logical_state_dict", "a migration"
    return [
        *items,
        Item("migration_staging", "experts on their way in", "device", moving, staging),
        Item("migration_peak", "experts on their way in and out, at most", "device", moving, 2 * staging),
        Item("export_peak", what, "device, host", "export_pretrained", export),
        Item("export_written", "what it writes, on average", "disk", "export_pretrained", own + rest // ranks),
        Item(state, "the whole state", "host", state, whole),
        Item("logical_state_dict_node", f"the same on a node of {node} ranks", "host", state, whole * node),
    ]


def _record_bytes(layer: Sequence[Tensor], states: int) -> int:
    """Return the bytes of one expert on the wire: its rows and the optimizer's."""
    tensors = [
        ExpertTensor(f"{position}/{number}", parameter, "parameter" if number == 0 else "optimizer_state")
        for position, parameter in enumerate(layer)
        for number in range(1 + states)
    ]
    return RecordFormat.of(tensors).nbytes
