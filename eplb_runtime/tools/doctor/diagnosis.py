"""What a model will take on each rank, for each choice; nothing is trained.

A model's shapes come from its configuration on the meta device, which has no memory, so a 671 B parameter model is
answered on a laptop. All numbers are bytes of one rank, of tensors that this package makes or cuts; activations and
what a framework keeps for itself are not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config import BalancerConfig, MigrationConfig
from ...hosts.attaching.description import MoELayer
from ...moe.experts.gathering import rows_per_call
from ...moe.experts.record import RecordFormat
from ...moe.experts.registry import ExpertTensor
from ...placement import Placement
from ...replicas.bank import accumulation_dtype, replica_memory
from .exactness import Exactness, Width, exactness, widths_of
from .machine import Backend, backends, compiled, versions

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
STATE_TENSORS = {"adamw": 2, "sgd": 1}
"""Tensors of a parameter's size and dtype that an optimizer keeps for it; SGD with momentum."""


class DoctorError(ValueError):
    """The question cannot be answered as it is put; one line that says why."""


@dataclass(frozen=True)
class ModelShape:
    """What was asked about."""

    model: str
    dtype: str
    optimizer: str
    layers: int
    experts: int
    ranks: int
    ranks_per_node: int
    replica_slots: int
    parameters: int


@dataclass(frozen=True)
class Item:
    """Memory for one purpose on one rank.

    Args:
        what: the purpose; ``key`` names it in JSON.
        where: ``"device"``, ``"host"`` (the CPU's memory, which all ranks of a node share), either, or ``"disk"``.
        when: ``"always"``, or what asks for it.
        nbytes: bytes.
    """

    key: str
    what: str
    where: str
    when: str
    nbytes: int


@dataclass(frozen=True)
class Diagnosis:
    shape: ModelShape | None
    memory: tuple[Item, ...]
    widths: tuple[Width, ...]
    exactness: tuple[Exactness, ...]
    versions: dict[str, str]
    backends: tuple[Backend, ...]
    compiled: Backend

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; memory by key, in bytes a rank."""
        return {
            "shape": asdict(self.shape) if self.shape is not None else None,
            "memory_bytes": {item.key: item.nbytes for item in self.memory},
            "widths": [asdict(width) for width in self.widths],
            "exactness": [asdict(said) for said in self.exactness],
            "versions": self.versions,
            "backends": [asdict(backend) for backend in self.backends],
            "compiled": asdict(self.compiled),
        }


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
        dtype: of weights, gradients and optimizer state, one of DTYPES.
        optimizer: one of STATE_TENSORS.
        staging_bytes: as in `BalancerConfig`; None: its default.

    Raises:
        DoctorError, ModelError, PlacementError, AttachError: this model cannot be spread so.
    """
    if model_config is None:
        return Diagnosis(None, (), (), exactness(None, 0), versions(), backends(), compiled())
    model, layers = _spreadable(model_config, DTYPES[dtype])
    num_experts = layers[0].num_experts
    Placement.initial(len(layers), num_experts, ranks, replica_slots)  # says what cannot be spread
    if replica_slots > num_experts - num_experts // ranks:
        raise DoctorError(
            f"{replica_slots} replica slots: a rank has only {num_experts - num_experts // ranks} experts of other "
            "ranks to copy"
        )
    homes = [
        [_first_rows(getattr(layer.experts, name), num_experts // ranks) for name in layer.parameters]
        for layer in layers
    ]
    spread = {id(getattr(layer.experts, name)) for layer in layers for name in layer.parameters}
    config = (
        BalancerConfig()
        if staging_bytes is None
        else BalancerConfig(migration=MigrationConfig(staging_bytes=staging_bytes))
    )
    node = min(ranks, 8) if ranks_per_node is None else ranks_per_node
    if ranks % node:
        raise DoctorError(f"{ranks} ranks do not fill nodes of {node}: give --ranks-per-node")
    shape = ModelShape(
        type(model).__name__,
        dtype,
        optimizer,
        len(layers),
        num_experts,
        ranks,
        node,
        replica_slots,
        sum(parameter.numel() for parameter in model.parameters()),
    )
    dense = [parameter for parameter in model.parameters() if id(parameter) not in spread]
    buffers = [
        tensor for name, tensor in model.state_dict(keep_vars=True).items() if not isinstance(tensor, nn.Parameter)
    ]
    widths = widths_of({name: getattr(layer.experts, name) for layer in layers for name in layer.parameters})
    return Diagnosis(
        shape,
        tuple(_memory(shape, homes, dense, buffers, config)),
        widths,
        exactness(widths, replica_slots),
        versions(),
        backends(),
        compiled(),
    )


def _spreadable(model_config: str | Path, dtype: torch.dtype) -> tuple[nn.Module, tuple[MoELayer, ...]]:
    """A model on the meta device and its MoE layers, which have equally many experts; at least one.

    Raises:
        DoctorError, ModelError, AttachError: it cannot be spread.
    """
    from ...hosts.transformers.describe import describe
    from ...hosts.transformers.models import choices_per_token, meta_model, read_config

    described = read_config(model_config)
    model = meta_model(described, dtype)
    layers = describe(model).layers
    if not layers:
        raise DoctorError(f"{model_config}: {type(model).__name__} has no MoE layer that can be spread")
    experts = {layer.num_experts for layer in layers}
    if len(experts) > 1:
        raise DoctorError(f"{model_config}: its MoE layers have {sorted(experts)} experts: all must have as many")
    (num_experts,) = experts
    if choices_per_token(described) > num_experts:
        raise DoctorError(
            f"{model_config}: it picks {choices_per_token(described)} of {num_experts} experts for a token"
        )
    return model, layers


def _first_rows(stack: nn.Parameter, rows: int) -> nn.Parameter:
    return nn.Parameter(stack.detach()[:rows], requires_grad=stack.requires_grad)


def _memory(
    shape: ModelShape,
    homes: Sequence[Sequence[Tensor]],
    dense: Sequence[Tensor],
    buffers: Sequence[Tensor],
    config: BalancerConfig,
) -> list[Item]:
    states = STATE_TENSORS[shape.optimizer]
    own = sum(parameter.nbytes for layer in homes for parameter in layer)
    rest = sum(parameter.nbytes for parameter in dense)
    copies = replica_memory(homes, shape.replica_slots, gradients=True)
    record = max(_record_bytes(layer, states) for layer in homes)
    staging = max(config.migration.staging_bytes, record)
    row = max(rows_per_call(parameter) * parameter[:1].nbytes for layer in homes for parameter in layer)
    largest = max((parameter.nbytes for parameter in dense), default=0)
    whole = (own * shape.ranks + rest) * (1 + states) + sum(buffer.nbytes for buffer in buffers)
    lent = max(sum(p[0].numel() * accumulation_dtype(p).itemsize for p in layer) for layer in homes)
    trained = (own + rest) * (2 + states)
    always, training, either = "always", "training", "device, host"
    kept = "copies kept"
    items = [
        Item("homes_weights", "experts at home: weights", "device", always, own),
        Item("homes_gradients", "experts at home: gradients", "device", training, own),
        Item("homes_optimizer_state", f"experts at home: {shape.optimizer} state", "device", training, own * states),
        Item("dense_weights", "the rest of the model, not sharded: weights", "device", always, rest),
        Item("dense_gradients", "the rest: gradients", "device", training, rest),
        Item("dense_optimizer_state", f"the rest: {shape.optimizer} state", "device", training, rest * states),
        Item("training", "all of this", "device", training, trained),
    ]
    if shape.replica_slots:
        items += [
            Item("copies_kept", "copies: weights, gradients", "device", kept, copies.kept),
            Item("copies_kept_no_sync", "gradients held back", "device", f"{kept}, no_sync", copies.held_back),
            Item("copies_arriving", "gradients that arrive, for each copy lent", "device", training, lent),
        ]
    node = f"the same on a node of {shape.ranks_per_node} ranks"
    return [
        *items,
        Item("migration_staging", "experts on their way in", "device", "a migration", staging),
        Item("migration_peak", "experts on their way in and out, at most", "device", "a migration", 2 * staging),
        Item(
            "export_peak", "an expert, its conversion, a dense tensor", either, "export_pretrained", 2 * row + largest
        ),
        Item("export_written", "what it writes, on average", "disk", "export_pretrained", own + rest // shape.ranks),
        Item("logical_state_dict", "the whole state", "host", "logical_state_dict", whole + row),
        Item("logical_state_dict_node", node, "host", "logical_state_dict", (whole + row) * shape.ranks_per_node),
    ]


def _record_bytes(layer: Sequence[Tensor], states: int) -> int:
    """One expert on the wire: its rows and the optimizer's."""
    tensors = [
        ExpertTensor(f"{position}/{number}", parameter, "parameter" if number == 0 else "optimizer_state")
        for position, parameter in enumerate(layer)
        for number in range(1 + states)
    ]
    return RecordFormat.of(tensors).nbytes
