"""torchtitan's context parallelism with a balancer: each rank has a part of each text, and its own experts.

Attention is torchtitan's FlexAttention; plain products stand in for its kernel (``launch/examples``). Texts are cut,
keys and values gathered and gradients added up by torchtitan itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from titan import STEPS, Run, get_ready, without_state
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

CONTEXT = 2
LENGTH = 256
"""Of a text: torch cuts masks in blocks of 128, and each rank has whole ones."""
PARTS, SPREAD = "cp 2, ep 2", "dp 2 x cp 2, ep 4"
LAYOUTS = {PARTS: (2, 2), SPREAD: (4, 4)}
"""Ranks, and ranks of an EP group: those of one text, and those of two texts."""
RUNS = [(PARTS, "qwen3"), (PARTS, "deepseek_v3"), (SPREAD, "qwen3")]
TOP_K, TEXTS = 2, 2


def in_parts(config: Any) -> None:
    from torchtitan_on_cpu import with_context_parallelism

    with_context_parallelism(config)
    config.parallelism.context_parallel_degree = CONTEXT
    config.training.seq_len = LENGTH


def trained(rank: int, folder: Path, layout: str) -> dict[str, Any]:
    """Each family, with experts that stay, and with experts that move after each step."""
    get_ready()
    _, ep = LAYOUTS[layout]
    found: dict[str, Any] = {}
    for family in [family for of_layout, family in RUNS if of_layout == layout]:
        run = partial(Run, family, ep, folder, change=in_parts)
        still, moving = run(False).train(), run(True)
        counted = tokens_counted(moving)
        moving.train()
        whole = whole_tensors(still)
        found[family] = {
            "logged": (still.logged, moving.logged),
            "different": different(whole, whole_tensors(moving)),
            "moved": moving.moved,
            "away": moving.balancer.placement.with_epoch(0) != still.balancer.placement.with_epoch(0),
            "counted": counted,
        }
        if (layout, family) == RUNS[0]:
            left = without_state(run(True)).train()
            found["control"] = different(whole, whole_tensors(left))
            alone = run(None).train()
            found["alone"] = alone.logged
            left.close()
            alone.close()
        still.close()
        moving.close()
    return found


def tokens_counted(run: Run) -> list[set[int]]:
    """In each step from now on: how many each layer has counted, over all ranks."""
    from eplb_runtime.events import Event, LoadMeasured

    counted: list[set[int]] = []

    def measured(event: Event) -> None:
        if isinstance(event, LoadMeasured):
            counted.append(set(event.load.sum(axis=-1).reshape(-1).tolist()))

    run.balancer.events.subscribe(measured)
    return counted


def whole_tensors(run: Run) -> dict[str, Tensor]:
    """Weights and Adam's moments, read from what the optimizer steps, whole; experts by their logical ids."""
    whole: dict[str, Tensor] = {}
    states = {parameter: state for one in run.trainer.optimizers.optimizers for parameter, state in one.state.items()}
    for name, parameter in run.trainer.model_parts[0].named_parameters():
        layer = run.balancer.layer_of_parameter.get(name)
        tensors = {"": parameter, **{key: value for key, value in states[parameter].items() if value.numel() > 1}}
        for key, tensor in tensors.items():
            assert isinstance(tensor, DTensor)
            whole[name + key] = tensor.full_tensor().clone() if layer is None else by_expert(run, layer, tensor)
    return whole


def by_expert(run: Run, layer: int, tensor: DTensor) -> Tensor:
    """Rows of all ranks, by the expert that the placement has there: every rank has its own ones here."""
    rows = tensor.to_local().contiguous()
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    experts = run.balancer.placement.physical_to_logical[layer].tolist()
    assert sorted(experts) == list(range(sum(map(len, parts))))
    by_id = torch.empty(len(experts), *rows.shape[1:], dtype=rows.dtype)
    by_id[experts] = torch.cat(parts)
    return by_id


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys() and len(one) > 60
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What the ranks of a layout found."""
    return cache(lambda layout: run_ranks(LAYOUTS[layout][0], trained, tmp_path_factory.mktemp("context"), layout))


@pytest.mark.parametrize(("layout", "family"), RUNS)
def test_trajectories_are_equal_with_every_home_moved_after_each_step(ranks: Any, layout: str, family: str) -> None:
    for found in ranks(layout):
        seen = found[family]
        assert seen["moved"] > 16 * (STEPS - 1) and seen["away"]
        still, moving = seen["logged"]
        assert len(still) == STEPS and still == moving
        assert all(norm > 0.3 for _, _, norm in still), "clipping was not active"
        assert seen["different"] == []


@pytest.mark.parametrize(("layout", "family"), RUNS)
def test_each_token_of_a_text_is_counted_on_one_rank(ranks: Any, layout: str, family: str) -> None:
    texts = TEXTS * LAYOUTS[layout][0] // CONTEXT
    for found in ranks(layout):
        assert found[family]["counted"] == [{texts * LENGTH * TOP_K}] * STEPS


def test_optimizer_state_that_stays_behind_is_noticed(ranks: Any) -> None:
    assert all(found["control"] for found in ranks(PARTS))


def test_the_trajectory_is_that_of_torchtitan_alone_to_rounding(ranks: Any) -> None:
    for found in ranks(PARTS):
        ours, alone = torch.tensor(found["qwen3"]["logged"][0]), torch.tensor(found["alone"])
        assert torch.allclose(ours[0], alone[0], rtol=1e-3)
        assert torch.allclose(ours[:, 0], alone[:, 0], rtol=1e-2)
