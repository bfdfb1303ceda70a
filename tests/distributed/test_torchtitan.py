"""torchtitan's own Trainer with a balancer, against the same with experts that stay, and against torchtitan alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import FOLDER, load_example
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

import eplb_runtime as eplb
from eplb_runtime.planner.shuffle import plan_shuffle

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

FAMILIES = ("qwen3", "deepseek_v3", "gpt_oss")
STEPS = 4
LAYOUTS = {"ep 4": 4, "ep 2 x efsdp 2": 2}


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
        config.checkpoint.enable = options.get("checkpoint", False)
        config.checkpoint.interval = 2
        options.get("change", lambda config: None)(config)
        if balanced is not None:
            policy = "incremental" if balanced else "static"
            balance(config, eplb.BalancerConfig(policy=policy, interval=1, lag=0, gate="always"))
        self.trainer = config.build()
        self.logged: list[tuple[float, ...]] = []
        self.trainer.metrics_processor.log = lambda step, *numbers, **_: self.logged.append(numbers)
        self.balancer = self.trainer.model_parts[0].__dict__.get("_eplb_runtime_balancer")
        if balanced:
            self.balancer._plan_with(plan_shuffle)

    def train(self) -> Run:
        self.trainer.train()
        return self

    @property
    def moved(self) -> int:
        return sum(event.moved_experts for event in self.balancer.events if hasattr(event, "moved_experts"))

    def state(self) -> dict[str, Tensor]:
        """Of this rank, as torchtitan's checkpointer is given it: weights, buffers and the optimizers' state."""
        both = {**self.trainer.model_parts[0].state_dict(), **self.trainer.optimizers.state_dict()}
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
    run.balancer._registry._optimizers.clear()
    return run


def trained(rank: int, folder: Path) -> dict[str, Any]:
    """For each layout and family: experts that stay, and experts that move after each step."""
    get_ready()
    found: dict[str, Any] = {}
    for layout, ep in LAYOUTS.items():
        for family in FAMILIES:
            still, moving = (Run(family, ep, folder, balanced).train() for balanced in (False, True))
            seen = found[f"{layout}, {family}"] = {
                "different": different(still.state(), moving.state()),
                "logged": (still.logged, moving.logged),
                "moved": moving.moved,
                "order": in_order(moving),
            }
            if family == "qwen3":
                left = without_state(Run(family, ep, folder, True)).train()
                alone = Run(family, ep, folder, None).train()
                seen["control"] = different(still.state(), left.state())
                seen["alone"] = alone.logged
                left.close()
                alone.close()
            still.close()
            moving.close()
    return found


def in_order(run: Run) -> list[str]:
    """Expert tensors whose part in the state dict is not what the balancer gathers in logical order."""
    state, wrong = run.trainer.model_parts[0].state_dict(), []
    parameters = dict(run.trainer.model_parts[0].named_parameters())
    for name, layer in run.balancer.layer_of_parameter.items():
        if not torch.equal(state[name].full_tensor(), run.balancer.gather_experts(layer, parameters[name])):
            wrong.append(name)
    return wrong


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, trained, tmp_path_factory.mktemp("torchtitan"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trajectories_are_equal_with_every_home_moved_after_each_step(
    ranks: list[dict[str, Any]], layout: str, family: str
) -> None:
    for found in ranks:
        seen = found[f"{layout}, {family}"]
        assert seen["moved"] > 16 * (STEPS - 1)
        assert seen["different"] == []
        still, moving = seen["logged"]
        assert len(still) == STEPS and still == moving
        assert all(norm > 0.3 for _, _, norm in still), "clipping was not active"
        assert seen["order"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_state_that_stays_behind_is_noticed(ranks: list[dict[str, Any]], layout: str) -> None:
    assert any(found[f"{layout}, qwen3"]["control"] for found in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trajectory_is_that_of_torchtitan_alone_to_rounding(ranks: list[dict[str, Any]], layout: str) -> None:
    for found in ranks:
        seen = found[f"{layout}, qwen3"]
        ours, alone = torch.tensor(seen["logged"][0]), torch.tensor(seen["alone"])
        assert torch.allclose(ours[0], alone[0], rtol=1e-3)
        assert torch.allclose(ours[:, 0], alone[:, 0], rtol=1e-2)
