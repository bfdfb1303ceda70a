"""A recorded load is what the routers chose, whoever records it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import training
from support.examples import load_example
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import said_by
from torch import nn
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.events import LoadMeasured
from eplb_runtime.load.clock import ExpertClock
from eplb_runtime.load.series import read_series
from eplb_runtime.moe.dispatch.base import _Dispatch
from eplb_runtime.moe.experts.compute import LocalExperts

pytestmark = pytest.mark.long

EXPERTS, STEPS = 8, 7


class Counted:
    """What routers choose, looked at where they say it, and counted without us."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self.steps: list[NDArray[np.int64]] = []
        self.counting = True
        self.real: torch.Tensor | None = None
        self._routers = routers
        self.begin()
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _m, _a, out, layer=layer: self._see(layer, out))

    def begin(self) -> None:
        self.steps.append(np.zeros((len(self._routers), EXPERTS), dtype=np.int64))

    def _see(self, layer: int, out: tuple[torch.Tensor, ...]) -> None:
        if self.counting and torch._C._current_graph_task_id() == -1:
            ids = next(tensor for tensor in out if tensor.dtype == torch.int64)
            ids = ids if self.real is None else ids[self.real]
            self.steps[-1][layer] += np.bincount(ids.reshape(-1).numpy(), minlength=EXPERTS)


def watched(rank: int, run: str = "") -> tuple[list[float], NDArray[np.int64]]:
    """Losses, and what routers chose in each step; with padding, activation checkpointing, and an evaluation."""
    model = make_model("olmoe", experts=EXPERTS)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counted = Counted([layer.mlp.gate for layer in model.model.layers])
    recording = eplb.record(model, run, optimizer, interval=3) if run else None
    losses = []
    for step in range(STEPS):
        model.train()
        ids = batch_of(rank, step)
        mask = torch.ones_like(ids)
        mask[:, : 1 + step] = 0
        counted.real = mask.bool().reshape(-1)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        counted.counting, counted.real = False, None
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
        counted.counting = True
        optimizer.step()
        optimizer.zero_grad()
        counted.begin()
        losses.append(loss.item())
    if recording is not None:
        recording.close()
        recording.close()
        assert not any(layer.mlp.experts._forward_pre_hooks for layer in model.model.layers)
        assert not optimizer._optimizer_step_post_hooks
    return losses, np.stack(counted.steps[:STEPS])


def recorded(rank: int, folder: Path) -> NDArray[np.int64]:
    """What routers chose; and other calls are refused on all ranks."""
    losses, chosen = watched(rank, str(folder / "run"))
    assert losses == watched(rank)[0], "watching changes no bit"
    model = make_model("olmoe", experts=8 if rank == 0 else 4)
    alike = make_model("olmoe", experts=8)
    (folder / "a file").touch()
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    said = {
        "ranks record different models": said_by(lambda: eplb.record(model, folder / "other")),
        "a file cannot be written to: File exists": said_by(lambda: eplb.record(alike, folder / "a file")),
        "no MoE layer": said_by(lambda: eplb.record(nn.Linear(2, 2), folder / "dense")),
        "at least 1": said_by(lambda: eplb.record(alike, folder / "none", interval=0)),
        "a list is no model": said_by(lambda: eplb.record([alike, alike], folder / "none")),
    }
    with eplb.record(alike, folder / "open"):
        said["record is open on this model: close it"] = said_by(lambda: eplb.attach(alike))
    assert all(words in line and "\n" not in line for words, line in said.items()), said
    assert len(torch.distributed.distributed_c10d._world.pg_map) == groups
    return chosen


def test_a_model_that_is_watched_is_recorded_token_by_token(tmp_path: Path) -> None:
    """Without padding, evaluation and the second forward of activation checkpointing; the last steps at close."""
    chosen = sum(run_ranks(2, recorded, tmp_path))
    load, steps, job = read_series(tmp_path / "run")
    assert np.array_equal(load, chosen) and steps == [1] * STEPS
    assert 0 < job.expert_seconds < job.step_seconds, "by this machine's clock"


def test_a_list_of_experts_is_recorded_as_it_is(tmp_path: Path) -> None:
    """In one process, without torch.distributed and without stacking."""
    ours = load_example("any_module")
    torch.manual_seed(0)
    model = ours.Model()
    seen = [np.zeros((ours.LAYERS, ours.EXPERTS), dtype=np.int64) for _ in range(3)]
    with eplb.record(model, tmp_path, layers=ours.LAYERS_TO_BALANCE, interval=2) as recording:
        for step in range(3):
            ids = ours.batch(0, step)
            functional.cross_entropy(model(ids[:-1]), ids[1:]).backward()
            recording.step()
    load, _, job = read_series(tmp_path)
    assert load.shape == (3, *seen[0].shape) and (load.sum(axis=2) == (len(ids) - 1) * ours.TOP_K).all()
    assert all("run" not in vars(module) for module in model.modules())
    assert job.expert_seconds > 0


# -- The share of a step in expert work is measured in a few steps, agreed on by all ranks, shown and recorded


MEASURED_INTERVAL, MEASURED_STEPS, LAYERS = 8, 16, 2
FORWARD, BACKWARD = 1.0, 2.0
"""Seconds of a layer's expert work; everything else in a step takes REST."""
REST = {0: 14.0, 1: 34.0}


class FakeTime:
    """Passes where expert work runs, and between."""

    def __init__(self) -> None:
        self.now = 0.0
        self.marks = 0

    def mark(self, clock: ExpertClock) -> float:
        self.marks += 1
        return self.now

    def install(self) -> None:
        compute, combine_gradients = LocalExperts.__call__, _Dispatch.backward

        def slow(*arguments: Any) -> torch.Tensor:
            self.now += FORWARD
            return compute(*arguments)

        def slow_backward(*arguments: Any) -> Any:
            self.now += BACKWARD
            return combine_gradients(*arguments)

        ExpertClock.mark = lambda clock: self.mark(clock)  # type: ignore[method-assign]
        LocalExperts.__call__ = slow  # type: ignore[method-assign]
        _Dispatch.backward = staticmethod(slow_backward)  # type: ignore[method-assign]


def train_measured(rank: int, run: str | None, rollouts: bool = False) -> dict[str, Any]:
    """With ``rollouts`` between steps there is no interval, and activation checkpointing."""
    time = FakeTime()
    time.install()
    model = make_model("olmoe")
    assert len(model.model.layers) == LAYERS
    if rollouts:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    interval = None if rollouts else MEASURED_INTERVAL
    balancer = training.attach(model, optimizer, interval=interval, policy="static", run=run)
    clock = balancer.runtime.expert_clock
    model.train()
    sampled, marked = [], []
    for step in range(MEASURED_STEPS):
        sampled += [step] if clock.on else []
        marks = time.marks
        ids = batch_of(rank, step)
        if rollouts:
            with torch.no_grad():
                model.eval()(input_ids=ids)
            model.train()
            time.now += 100.0
        model(input_ids=ids, labels=ids).loss.backward()
        time.now += REST[rank]
        marked += [step] if time.marks > marks else []
        optimizer.step()
        optimizer.zero_grad()
    balancer.rebalance()
    shares = [(event.moe_share, event.moe_share_source) for event in balancer.events.of_type(LoadMeasured)]
    balancer.close()
    return {"sampled": sampled, "marked": marked, "shares": shares}


def test_the_share_is_what_the_clock_says_on_every_rank(tmp_path: Path) -> None:
    """6 s of expert work in steps of 20 s and of 40 s: of 60 s, 12 s."""
    run = str(tmp_path / "run")
    found = run_ranks(2, train_measured, run)
    for of_rank in found:
        assert of_rank["marked"] == of_rank["sampled"], "nothing is marked in other steps"
        assert 2 <= len(of_rank["sampled"]) <= 3 and set(of_rank["sampled"]) <= {4, 5, 6}
        assert of_rank["shares"] == [(pytest.approx(0.2), "measured")] * len(of_rank["shares"])
        assert len(of_rank["shares"]) >= 2, "the second decision keeps the share"
    job = read_series(Path(run))[2]
    assert job.expert_seconds > 0, "the run's record has it, for assess"


def test_forwards_that_are_repeated_are_expert_work_and_rollouts_between_steps_no_part_of_a_step() -> None:
    """Activation checkpointing: 2 s more of each step on each rank, 16 of 64 s. Without an interval: the three steps
    after a decision, each from its first forward in training."""
    for of_rank in run_ranks(2, train_measured, None, True):
        assert of_rank["sampled"] == [1, 2, 3], "the first begins ahead of the first step's end"
        assert of_rank["shares"] == [(pytest.approx(16 / 64), "measured")]
