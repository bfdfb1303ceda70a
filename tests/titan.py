"""Trainings by torchtitan's own Trainer, with a balancer and without."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from examples import FOLDER, load_example
from support.shuffle import plan_by, plan_shuffle
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import eplb_runtime as eplb

STEPS, SAVED = 3, 2


class Run:
    """One training by torchtitan's Trainer.

    Args:
        ep: ranks of an EP group; torchtitan's FSDP divides the experts over those that are left.
        balanced: None: torchtitan alone; False: experts stay; True: every home moves after each step.
    """

    def __init__(self, family: str, ep: int, folder: Path, balanced: bool | None, **options: Any) -> None:
        example = load_example("torchtitan_moe")
        from eplb_runtime.hosts.torchtitan import balance

        config = example.training(family, ep, options.get("steps", STEPS), folder)
        config.checkpoint.enable = "saves" in options
        config.checkpoint.interval = SAVED
        config.checkpoint.load_only = not options.get("saves", True)
        config.checkpoint.load_step = options.get("load_step", -1)
        options.get("change", lambda config: None)(config)
        if balanced is not None:
            policy = "incremental" if balanced else "static"
            balance(
                config,
                eplb.BalancerConfig(policy=policy, interval=1, gate="always", migration=eplb.MigrationConfig(lag=0)),
            )
        options.get("mistake", lambda config: None)(config)
        _clear_sharding_prop_cache()  # it has meshes of the run before, and spmd_types asks for the same one
        self.trainer = config.build()
        self.logged: list[tuple[float, ...]] = []
        self.trainer.metrics_processor.log = lambda step, *numbers, **_: self.logged.append(numbers)
        self.balancer = self.trainer.model_parts[0].__dict__.get("_eplb_runtime_balancer")
        if balanced:
            plan_by(self.balancer, plan_shuffle)

    def train(self) -> Run:
        self.trainer.train()
        return self

    @property
    def moved(self) -> int:
        return sum(event.moved_experts for event in self.balancer.events if hasattr(event, "moved_experts"))

    def state(self) -> dict[str, Tensor]:
        """Of this rank, as torchtitan's checkpointer is given it: weights, buffers and the optimizers' state."""
        both = self.trainer.optimizers.state_dict()
        for part in self.trainer.model_parts:
            both |= part.state_dict()
        tensors = {name: value for name, value in both.items() if isinstance(value, Tensor)}
        return {name: (v.to_local() if isinstance(v, DTensor) else v).clone() for name, v in tensors.items()}

    def close(self) -> None:
        if self.balancer is not None:
            self.balancer.close()
        self.trainer.close()


def get_ready() -> None:
    """As torchrun does; and torchtitan's Trainer sleeps two seconds after each training."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    sys.path.insert(0, str(FOLDER))
    load_example("torchtitan_moe")
    import torchtitan.trainer

    torchtitan.trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys() and len(one) > 20
    return [name for name in one if not torch.equal(one[name], other[name])]


def without_state(run: Run) -> Run:
    """The control: weights move, and Adam's state stays behind."""
    run.balancer._runtime.registry._optimizers.clear()
    return run
