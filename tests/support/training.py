"""A training job in a few calls: how a rank of a test attaches a model, and takes a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import eplb_runtime as eplb
from eplb_runtime.config import BalancerConfig, DispatchConfig, MigrationConfig

from .shuffle import plan_by, plan_shuffle

DEADLINE = 8.0
"""Seconds for which ranks wait for one that does not come: on a busy machine who comes may be late by some."""
OF_DISPATCH = {"dispatch": "name", "dispatch_dtype": "dtype", "dispatch_sms": "num_sms"} | {
    own.name: own.name for own in fields(DispatchConfig) if own.name not in ("name", "dtype", "num_sms")
}
OF_MIGRATION = [own.name for own in fields(MigrationConfig)]


def config_from_settings(settings: Mapping[str, Any]) -> BalancerConfig:
    """The config of all settings by their own names, but ``"dispatch"``, ``"dispatch_dtype"``, ``"dispatch_sms"``."""
    top = {name: value for name, value in settings.items() if name not in (*OF_DISPATCH, *OF_MIGRATION)}
    dispatch = {inner: settings[name] for name, inner in OF_DISPATCH.items() if name in settings}
    migration = {name: settings[name] for name in OF_MIGRATION if name in settings}
    if isinstance(dispatch.get("name"), DispatchConfig):  # vars() of a config has its parts
        top["dispatch"] = dispatch.pop("name")
    if dispatch:
        top["dispatch"] = DispatchConfig(**dispatch)
    if migration:
        top["migration"] = MigrationConfig(**migration)
    return BalancerConfig(**top)


@cache
def meshes(ep: int, edp: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Over EDP and EP ranks, and over all."""
    names = ("edp", "ep")
    return init_device_mesh("cpu", (edp, ep), mesh_dim_names=names), init_device_mesh("cpu", (ep * edp,))


def config_of(**settings: Any) -> eplb.BalancerConfig:
    """Of settings by their own names; gradients are averaged."""
    return config_from_settings({"dense_gradients": "allreduce", **settings})


def shard(model: Any, ep: int, edp: int, options: Any = None, **settings: Any) -> None:
    """Leave each EDP rank a slice of every expert, and each rank one of all else; an attach with the same settings, of
    which gradients that the host averages are one, follows."""
    mesh, everyone = meshes(ep, edp)
    eplb.shard_experts(model, config=config_of(**settings), ep_group=mesh["ep"].get_group())
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["edp"], shard_placement_fn=lambda _: Shard(1), **(options or {}))
        fully_shard(layer, mesh=everyone, **(options or {}))
    fully_shard(model, mesh=everyone, **(options or {}))


def attach(
    model: Any,
    optimizer: Any = None,
    *,
    moving: bool = False,
    ep_group: dist.ProcessGroup | None = None,
    ranks: eplb.hosts.Ranks | None = None,
    layers: Any = None,
    **settings: Any,
) -> eplb.Balancer:
    """A balancer with these settings (`config_of`).

    Args:
        moving: all homes change places at each decision.
    """
    where = {"ep_group": ep_group, "ranks": ranks, "layers": layers}
    balancer = eplb.attach(model, optimizer, config=config_of(**settings), **where)
    if moving:
        plan_by(balancer, plan_shuffle)
    return balancer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """Train on a batch; the loss."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@contextmanager
def undone(*changed: type | ModuleType) -> Iterator[None]:
    """Put every attribute of these back at the end: a test changes them in ranks that go on with another job."""
    before = [dict(vars(one)) for one in changed]
    try:
        yield
    finally:
        for one, was in zip(changed, before, strict=True):
            for name, value in list(vars(one).items()):
                if name not in was:
                    delattr(one, name)
                elif value is not was[name]:
                    setattr(one, name, was[name])
