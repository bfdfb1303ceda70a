"""Memory that a model will take on each rank; nothing is trained.

A model's shapes come from its configuration on the meta device, which has no memory. All numbers are bytes of one rank,
of tensors that this package makes or cuts; activations and what a framework keeps for itself are not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...config import MigrationConfig
from ...placement import Placement
from ...replicas.bank import replica_memory

STATE_TENSORS = {"adamw": 2, "sgd": 1}
"""Tensors of a parameter's size and dtype that an optimizer keeps for it; SGD with momentum."""


class DoctorError(ValueError):
    """The question cannot be answered as it is put; one line that says why."""


class Item(NamedTuple):
    """Memory for one purpose on one rank; ``key`` is its name in JSON."""

    key: str
    what: str
    nbytes: int


def memory_of(
    model_config: str | Path, *, ranks: int, replica_slots: int = 0, dtype: str = "bfloat16", optimizer: str = "adamw"
) -> tuple[str, list[Item]]:
    """Return the model in words, and its memory.

    Args:
        model_config: a folder with ``config.json``, or that file.
        ranks: R of the EP group.
        replica_slots: k.
        dtype: of weights, gradients and optimizer state, a name of torch's.
        optimizer: one of STATE_TENSORS.

    Raises:
        DoctorError, ModelError, PlacementError, AttachError: this model cannot be spread so.
    """
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
    stacks = [[getattr(layer.experts, name) for name in layer.parameters] for layer in layers]
    homes = [[nn.Parameter(one.detach()[:own], one.requires_grad) for one in of_layer] for of_layer in stacks]
    spread = {id(stack) for of_layer in stacks for stack in of_layer}
    dense = [parameter for parameter in model.parameters() if id(parameter) not in spread]
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    title = (
        f"{type(model).__name__}: {billions:.4g} billion parameters, {len(layers)} MoE layers of {experts} experts, on "
        f"{ranks} ranks, {replica_slots} replica slots, {dtype}"
    )
    return title, _items(homes, dense, replica_slots, optimizer)


def _items(homes: Sequence[Sequence[Tensor]], dense: Sequence[Tensor], slots: int, optimizer: str) -> list[Item]:
    states = STATE_TENSORS[optimizer]
    own = sum(parameter.nbytes for layer in homes for parameter in layer)
    rest = sum(parameter.nbytes for parameter in dense)
    experts = [sum(parameter[:1].nbytes for parameter in layer) * (1 + states) for layer in homes]
    staging = max(MigrationConfig().staging_bytes, *experts)
    items = [
        Item("homes_weights", "experts at home: weights", own),
        Item("homes_gradients", "experts at home: gradients", own),
        Item("homes_optimizer_state", f"experts at home: {optimizer} state", own * states),
        Item("dense_weights", "the rest of the model, not sharded: weights", rest),
        Item("dense_gradients", "the rest: gradients", rest),
        Item("dense_optimizer_state", f"the rest: {optimizer} state", rest * states),
    ]
    if slots:
        copies = replica_memory(homes, slots, gradients=True)
        items += [
            Item("copies_kept", "copies: weights, gradients", copies.kept),
            Item("copies_kept_no_sync", "copies, with no_sync: gradients held back", copies.held_back),
        ]
    return [*items, Item("migration_peak", "a migration: experts on their way in and out, at most", 2 * staging)]
