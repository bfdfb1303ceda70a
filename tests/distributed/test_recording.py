"""A recorded load is what the routers chose, whoever records it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import load_example
from moe_models import batch_of, make_model
from numpy.typing import NDArray
from ranks import run_ranks
from support import training
from support.shuffle import plan_by
from torch import nn
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import LoadMeasured
from eplb_runtime.hosts.attaching.description import AttachError
from eplb_runtime.load.clock import ExpertClock
from eplb_runtime.load.series import read_series
from eplb_runtime.moe.dispatch.base import _Dispatch
from eplb_runtime.moe.experts.compute import LocalExperts

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


def train(
    rank: int, run: str, attach: bool, record: bool, world: int = 2
) -> tuple[list[float], list[NDArray[np.int64]]]:
    model = make_model("olmoe", experts=EXPERTS)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    counted = Counted([layer.mlp.gate for layer in model.model.layers])
    balancer = (
        training.attach(model, optimizer, interval=2, gate="always", run=(run or None) if rank == 0 else None, lag=0)
        if attach
        else None
    )
    recording = eplb.record(model, run, optimizer, interval=3) if record else None
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
    if balancer is not None:
        balancer.close()
    return losses, counted.steps[:STEPS]


def refused(rank: int, folder: str) -> list[str]:
    said = []
    model = make_model("olmoe", experts=8 if rank == 0 else 4)
    alike = make_model("olmoe", experts=8)
    dense = nn.Linear(2, 2)
    (Path(folder) / "a file").touch()
    for case in (
        lambda: eplb.record(model, f"{folder}/other"),
        lambda: eplb.record(alike, f"{folder}/a file"),
        lambda: eplb.record(dense, f"{folder}/dense"),
        lambda: eplb.record(alike, f"{folder}/none", interval=0),
        lambda: eplb.record([alike, alike], f"{folder}/none"),
    ):
        with pytest.raises(AttachError) as caught:
            case()
        said.append(str(caught.value))
    with eplb.record(alike, f"{folder}/open"), pytest.raises(AttachError) as caught:
        eplb.attach(alike)
    return [*said, str(caught.value)]


def everything(rank: int, folder: str) -> dict[str, object]:
    return {
        "recorded": train(rank, f"{folder}/recorded", attach=False, record=True),
        "alone": train(rank, "", attach=False, record=False),
        "attached": train(rank, f"{folder}/attached", attach=True, record=False),
        "refused": refused(rank, folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder: Path) -> list[dict]:
    return run_ranks(2, everything, str(folder))


def summed(results: list[dict], way: str) -> NDArray[np.int64]:
    return np.sum([np.stack(result[way][1]) for result in results], axis=0)


def test_a_model_that_is_watched_is_recorded_token_by_token(results: list[dict], folder: Path) -> None:
    """Without padding, evaluation and the second forward of activation checkpointing; the last steps at close."""
    load, steps, _ = read_series(folder / "recorded")
    assert np.array_equal(load, summed(results, "recorded")) and steps == [1] * STEPS


def test_watching_changes_no_bit(results: list[dict]) -> None:
    for result in results:
        assert result["recorded"][0] == result["alone"][0]


def test_seconds_of_expert_work_are_recorded(results: list[dict], folder: Path) -> None:
    """By this machine's clock: some, and less than a step has."""
    for way in ("attached", "recorded"):
        job = read_series(folder / way)[2]
        assert job.expert_seconds > 0, way
    assert job.expert_seconds < job.step_seconds


def test_a_balanced_job_records_what_its_decisions_start_from(results: list[dict], folder: Path) -> None:
    load = read_series(folder / "attached")[0]
    decided = STEPS // 2 * 2
    assert np.array_equal(load, summed(results, "attached")[:decided])


def test_what_cannot_be_recorded_is_refused_on_all_ranks(results: list[dict]) -> None:
    wanted = (
        "ranks record different models",
        "a file cannot be written to: File exists",
        "no MoE layer",
        "at least 1",
        "a list is no model",
        "record is open on this model: close it",
    )
    for mine, other, part in zip(results[0]["refused"], results[1]["refused"], wanted, strict=True):
        assert part in mine and part in other and "\n" not in mine + other


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


# -- A resumed job foresees what it would have foreseen: the load that was measured is saved with the placement


RESUMED_INTERVAL, SAVED_AT, RESUMED_STEPS = 4, 10, 13


def train_and_save(rank: int, first: int, saved: str | None, ranks: int) -> tuple[str, list[list]]:
    """Steps ``first`` to 13 of a model that does not change: the state after step 10, and what planners were given."""
    if rank >= ranks:
        return "", []
    model = make_model("olmoe", experts=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balancer = training.attach(
        model, optimizer, ranks=Ranks(job=tuple(range(ranks))), interval=RESUMED_INTERVAL, policy="static"
    )
    seen: list[list] = []

    def planner(load: np.ndarray, *arguments: Any, **options: Any) -> eplb.Plan:
        seen.append(load.tolist())
        return eplb.plan(load, *arguments, **options)

    plan_by(balancer, planner)
    if saved is not None:
        try:
            balancer.load_state_dict(json.loads(saved))
        except eplb.placement.PlacementError:
            assert ranks == 1, "only another number of ranks keeps the placement from being taken over"
    model.train()
    state = ""
    for step in range(first, RESUMED_STEPS + 1):
        training.step(
            model, optimizer, torch.cat([batch_of(share, step) for share in range(2) if share % ranks == rank])
        )
        if step == SAVED_AT:
            state = json.dumps(balancer.state_dict())
    balancer.close()
    return state, seen


def test_a_forecast_after_a_resume_is_what_it_would_have_been() -> None:
    (state, whole), (other, _) = run_ranks(2, train_and_save, 1, None, 2)
    assert state == other, "every rank saves the same"
    (_, resumed), _ = run_ranks(2, train_and_save, SAVED_AT + 1, state, 2)
    assert [len(load) for load in whole] == [4, 8, 12]
    assert resumed == whole[2:], "steps 1 to 8 of the history, 9 and 10 counted before, 11 and 12 after"
    without = json.loads(state)
    del without["load"]
    (_, forgotten), _ = run_ranks(2, train_and_save, SAVED_AT + 1, json.dumps(without), 2)
    assert forgotten != resumed, "control: without the saved load the forecast is another"


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


def train_measured(
    rank: int, run: str | None, options: dict[str, Any], checkpointing: bool = False, rollouts: bool = False
) -> dict[str, Any]:
    time = FakeTime()
    time.install()
    model = make_model("olmoe")
    assert len(model.model.layers) == LAYERS
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    interval = None if rollouts else MEASURED_INTERVAL
    balancer = training.attach(model, optimizer, interval=interval, policy="static", run=run, **options)
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
    found = run_ranks(2, train_measured, run, {})
    for of_rank in found:
        assert of_rank["marked"] == of_rank["sampled"], "nothing is marked in other steps"
        assert 2 <= len(of_rank["sampled"]) <= 3 and set(of_rank["sampled"]) <= {4, 5, 6}
        assert of_rank["shares"] == [(pytest.approx(0.2), "measured")] * len(of_rank["shares"])
        assert len(of_rank["shares"]) >= 2, "the second decision keeps the share"
    job = read_series(Path(run))[2]
    assert job.expert_seconds > 0, "the run's record has it, for assess"


def test_forwards_that_are_repeated_are_expert_work() -> None:
    """Activation checkpointing: 2 s more of each step on each rank, 16 of 64 s."""
    found = run_ranks(2, train_measured, None, {}, True)
    for of_rank in found:
        assert of_rank["shares"][0] == (pytest.approx(16 / 64), "measured")


def test_rollouts_between_steps_are_no_part_of_a_step() -> None:
    """Without an interval: the three steps after a decision, each from its first forward in training."""
    found = run_ranks(2, train_measured, None, {}, False, True)
    for of_rank in found:
        assert of_rank["sampled"] == [1, 2, 3], "the first begins ahead of the first step's end"
        assert of_rank["shares"] == [(pytest.approx(0.2), "measured")]
