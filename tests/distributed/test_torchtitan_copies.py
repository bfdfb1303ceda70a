"""torchtitan's own Trainer with copies of experts, in float64, against torchtitan alone in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_torchtitan import balance_of
from titan import SAVED, different, get_ready
from titan_float64 import DoubleRun, OnRanks, compute_in_float64, distance

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

RANKS = 4


@dataclass(frozen=True)
class Job:
    """A training by torchtitan on four ranks.

    Args:
        recomputed: torchtitan's way to compute activations again.
        replicas: of the model (HSDP).
        validated: whether there is an evaluation between any two steps.
        damage: what is broken on purpose, inside.
    """

    family: str
    ep: int
    replica_slots: int = 1
    micro_batches: int = 1
    recomputed: str = ""
    replicas: int = 1
    validated: bool = False
    damage: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def change(self, config: Any) -> None:
        from torchtitan.distributed import activation_checkpoint

        config.parallelism.data_parallel_replicate_degree = self.replicas
        if self.recomputed:
            config.activation_checkpoint = getattr(activation_checkpoint, self.recomputed).Config()
        if self.validated:
            validated(config)

    def copies(self, config: Any) -> None:
        balance_of(config, replica_slots=self.replica_slots)

    def run(self, folder: Path, balanced: bool | None = True, **options: Any) -> DoubleRun:
        mistake = None if balanced is None else self.copies
        options |= {} if mistake is None else {"mistake": mistake}
        on_ranks = OnRanks(RANKS, self.micro_batches)
        return DoubleRun(self.family, self.ep, folder, balanced, on_ranks, change=self.change, **options)


def validated(config: Any) -> None:
    """After each step, on batches of the same kind."""
    from torchtitan.components.validate import Validator

    config.validator = Validator.Config(enable=True, freq=1, steps=1, dataloader=config.dataloader)


@contextlib.contextmanager
def sums_forgotten() -> Any:
    from eplb_runtime.replicas.sharded import ShardedReplicas

    before = ShardedReplicas.collect
    ShardedReplicas.collect = lambda self, gradients, edges: None
    try:
        yield
    finally:
        ShardedReplicas.collect = before


RIGHT = {
    "ep 4, validated": Job("qwen3", 4, validated=True),
    "ep 4, selective recompute": Job("gpt_oss", 4, recomputed="SelectiveAC"),
    "ep 2 x efsdp 2, two slots, full recompute": Job("gpt_oss", 2, replica_slots=2, recomputed="FullAC"),
    "ep 2 x efsdp 2, accumulated": Job("qwen3", 2, micro_batches=2),
    "ep 2 x efsdp 2, expert bias": Job("deepseek_v3", 2),
    "ep 2, two replicas of the model": Job("gpt_oss", 2, replicas=2),
    "ep 2, two replicas of the model, no copies": Job("qwen3", 2, replica_slots=0, replicas=2),
}
SAVING = Job("qwen3", 2)
PARTS = (tuple(RIGHT)[:3], tuple(RIGHT)[3:5], tuple(RIGHT)[5:])
"""What runs in one go."""


def alone(rank: int, folder: Path) -> None:
    """One process, without us, on all ranks' batches; what comes of it is left in the folder."""
    get_ready()
    compute_in_float64()
    for job in {name_of(job): job for job in RIGHT.values()}.values():
        run = DoubleRun(job.family, 1, folder, None, OnRanks(RANKS, job.micro_batches, together=True)).train()
        torch.save((run.logged, run.whole_state()), folder / name_of(job))
        run.close()


def name_of(job: Job) -> str:
    return f"{job.family}-{job.micro_batches}"


def trained(rank: int, folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    get_ready()
    compute_in_float64()
    found: dict[str, Any] = {}
    for name in names:
        job = RIGHT[name]
        logged, whole = torch.load(folder / name_of(job), weights_only=False)
        run = job.run(folder).train()
        found[name] = {
            "distance": max(distance(run.whole_state(), whole), distance_of_logs(run.logged, logged)),
            "copies": int((run.balancer.placement.copy_count > 1).sum()),
            "moved": run.moved,
        }
        run.close()
    return found


def distance_of_logs(ours: list[Any], whole: list[Any]) -> float:
    """Of losses and gradient norms."""
    assert len(ours) == len(whole) and all(norm > 0.3 for _, _, norm in ours), "clipping was not active"
    return max(abs(a[at] - b[at]) / b[at] for a, b in zip(ours, whole, strict=True) for at in (0, 2))


def saved(rank: int, folder: Path) -> dict[str, Any]:
    """By torchtitan's checkpointer while there are copies, taken up with us and without."""
    get_ready()
    compute_in_float64()
    whole = torch.load(folder / name_of(SAVING), weights_only=False)[1]
    first = SAVING.run(folder / "saved", saves=True).train()
    again = SAVING.run(folder / "saved", saves=False, load_step=SAVED).train()
    alone = SAVING.run(folder / "saved", None, saves=False, load_step=len(first.logged)).train()
    other = replace(SAVING, ep=4).run(folder / "saved", saves=False, load_step=SAVED).train()
    found = {
        "first": distance(first.whole_state(), whole),
        "again": distance(again.whole_state(), whole),
        "other": distance(other.whole_state(), whole),
        "alone": different(first.whole_state(), alone.whole_state()),
        "refreshed": loaded_in_the_middle(again),
    }
    for run in (first, again, alone, other):
        run.close()
    return found


def loaded_in_the_middle(run: DoubleRun) -> bool:
    """A state dict that comes back between steps, and one step more."""
    part = run.trainer.model_parts[0]
    part.load_state_dict({name: value.clone() for name, value in part.state_dict().items()})
    try:
        run.trainer.train_step(run.trainer.batch_generator(run.trainer.dataloader))
    except RuntimeError as error:
        return "were written since" not in str(error)
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what torchtitan alone came to."""
    folder = tmp_path_factory.mktemp("copies")
    run_ranks(1, alone, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Callable[[str], list[dict[str, Any]]]:
    """What the ranks found in a training."""
    of_part = cache(lambda part: run_ranks(RANKS, trained, folder, part))
    return lambda name: [found[name] for found in of_part(next(part for part in PARTS if name in part))]


@pytest.mark.parametrize("name", RIGHT)
def test_training_with_copies_is_torchtitan_alone_in_one_process(ranks: Any, name: str) -> None:
    for found in ranks(name):
        assert found["moved"] > 60
        assert (found["copies"] >= 4) == bool(RIGHT[name].replica_slots)
        assert found["distance"] < 1e-10


def test_checkpoints_hold_no_copies_and_go_on_with_them_or_without(folder: Path) -> None:
    for seen in run_ranks(RANKS, saved, folder):
        assert max(seen["first"], seen["again"], seen["other"]) < 1e-10
        assert seen["alone"] == [] and seen["refreshed"]
