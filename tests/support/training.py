"""A training job in a few calls: how a rank of a test attaches a model, and takes a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from flat_settings import config_from_settings
from torch import nn

import eplb_runtime as eplb

from .shuffle import plan_by, plan_shuffle

DEADLINE = 8.0
"""Seconds for which ranks wait for one that does not come: on a busy machine who comes may be late by some."""


def attach(
    model: Any,
    optimizer: Any = None,
    *,
    moving: bool = False,
    ep_group: dist.ProcessGroup | None = None,
    ranks: eplb.hosts.Ranks | None = None,
    **settings: Any,
) -> eplb.Balancer:
    """A balancer with settings by their own names (`flat_settings`); it averages gradients, and splits every batch over
    replicas.

    Args:
        moving: all homes change places at each decision.
    """
    least = 0 if settings.get("replica_slots") else 64
    config = config_from_settings({"dense_gradients": "allreduce", "split_least_tokens": least, **settings})
    balancer = eplb.attach(model, optimizer, config=config, ep_group=ep_group, ranks=ranks)
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
