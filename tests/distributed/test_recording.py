"""A recorded load is what the routers chose, whoever records it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from examples import load_example
from moe_models import batch_of, make_model
from numpy.typing import NDArray
from ranks import run_ranks
from support import training
from torch import nn
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.hosts.attaching.description import AttachError
from eplb_runtime.load.series import read_series

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
