"""torchtitan's context parallelism with a balancer: each rank has a part of each text, and its own experts.

Attention is torchtitan's FlexAttention; plain products stand in for its kernel (``launch/examples``). Texts are cut,
keys and values gathered and gradients added up by torchtitan itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_torchtitan import balance_of
from test_torchtitan_copies import distance_of_logs, sums_forgotten
from titan import Run, get_ready
from titan_float64 import DoubleRun, OnRanks, compute_in_float64, distance
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

CONTEXT = 2
LENGTH = 256
"""Of a text: torch cuts masks in blocks of 128, and each rank has whole ones."""
PARTS = "cp 2, ep 2"
STAGES = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
LAYOUTS = {
    PARTS: ({}, 1, 2, "qwen3"),
    "dp 2 x cp 2, ep 4": ({}, 2, 4, "qwen3"),
    "tp 2 x cp 2, ep 2 x efsdp 2": ({"tensor_parallel_degree": 2}, 1, 2, "qwen3"),
    "dp 2 x cp 2, ep 2 x efsdp 2, sinks and windows": ({}, 2, 2, "gpt_oss"),
    **({"pp 2 x cp 2, ep 2": (STAGES, 1, 2, "deepseek_v3")} if torch.__version__ >= "2.14" else {}),
}
"""What is set besides, data-parallel ranks (each has texts of its own), ranks of an EP group, family. Schedules
of torch 2.13 cut batches themselves, and masks cannot be cut."""
TOP_K, TEXTS, STEPS = 2, 2, 2


def in_parts(options: Mapping[str, Any], config: Any) -> None:
    from torchtitan_on_cpu import with_context_parallelism

    with_context_parallelism(config)
    config.parallelism.context_parallel_degree = CONTEXT
    config.training.seq_len = LENGTH
    for name, value in options.items():
        setattr(config.parallelism, name, value)


def trained(rank: int, folder: Path, layouts: Sequence[str]) -> dict[str, Any]:
    """With experts that stay, and with experts that move after each step."""
    get_ready()
    found: dict[str, Any] = {}
    for layout in layouts:
        options, _, ep, family = LAYOUTS[layout]
        run = partial(Run, family, ep, folder, steps=STEPS, change=partial(in_parts, options))
        still, moving = run(False).train(), run(True)
        counted = tokens_counted(moving)
        moving.train()
        whole = whole_tensors(still)
        found[layout] = {
            "logged": (still.logged, moving.logged),
            "different": different(whole, whole_tensors(moving)),
            "moved": moving.moved,
            "away": moving.balancer.placement.with_epoch(0) != still.balancer.placement.with_epoch(0),
            "counted": counted,
        }
        if layout == PARTS:
            alone = run(None).train()
            found["alone"] = alone.logged
            alone.close()
        still.close()
        moving.close()
    if PARTS in layouts:
        found["copies"] = with_copies(folder)
    return found


def with_copies(folder: Path) -> dict[str, Any]:
    """In float64 from here on, against torchtitan alone on the same ranks."""
    compute_in_float64()
    run = partial(DoubleRun, "qwen3", 2, folder, job=OnRanks(1), steps=STEPS, change=partial(in_parts, {}))
    alone = run(balanced=None).train()
    whole, found = alone.whole_state(), {}
    for name, damage in {"distance": nullcontext, "control": sums_forgotten}.items():
        with damage():
            ours = run(balanced=True, mistake=partial(balance_of, replica_slots=1)).train()
        found[name] = max(distance(ours.whole_state(), whole), distance_of_logs(ours.logged, alone.logged))
        found["copies"] = int((ours.balancer.placement.copy_count > 1).sum())
        ours.close()
    alone.close()
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
    """Weights and Adam's moments, read from what the optimizers step, whole, of all stages; experts by logical ids."""
    dense, rows = {}, {}
    states = {parameter: state for one in run.trainer.optimizers.optimizers for parameter, state in one.state.items()}
    for name, parameter in run.trainer.model_parts[0].named_parameters():
        layer = run.balancer.layer_of_parameter.get(name)
        tensors = {"": parameter, **{key: value for key, value in states[parameter].items() if value.numel() > 1}}
        for key, tensor in tensors.items():
            assert isinstance(tensor, DTensor)
            if layer is None:
                dense[name + key] = tensor.full_tensor().clone()
            else:
                rows[name + key] = (experts_here(run, layer), tensor.to_local().clone())
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (dense, rows))
    whole: dict[str, Tensor] = {}
    for dense, rows in everywhere:
        whole |= dense
        for name, (experts, tensor) in rows.items():
            count = run.balancer.placement.num_experts
            whole.setdefault(name, tensor.new_full((count, *tensor.shape[1:]), float("nan")))[experts] = tensor
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def experts_here(run: Run, layer: int) -> list[int]:
    """FSDP divides the experts of an EP rank over the ranks of ``efsdp``, in their order."""
    meshes = run.trainer.parallel_dims
    of_all = run.balancer.placement.physical_to_logical[layer].tolist()
    ep, efsdp = meshes.get_mesh("ep"), meshes.get_mesh("efsdp")
    count = len(of_all) // ep.size() // efsdp.size()
    first = (ep.get_local_rank() * efsdp.size() + efsdp.get_local_rank()) * count
    return of_all[first : first + count]


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys() and len(one) > 60
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """What two ranks found in `PARTS`, and four in the others."""
    run = cache(lambda count, layouts: run_ranks(count, trained, tmp_path_factory.mktemp("context"), layouts))
    others = tuple(layout for layout in LAYOUTS if layout != PARTS)
    return lambda layout: run(2, (PARTS,)) if layout == PARTS else run(4, others)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trajectories_are_equal_with_every_home_moved_after_each_step(ranks: Any, layout: str) -> None:
    for found in ranks(layout):
        seen = found[layout]
        assert seen["moved"] > 16 * (STEPS - 1) and seen["away"]
        still, moving = seen["logged"]
        assert len(still) == STEPS and still == moving
        assert all(norm > 0.3 for _, _, norm in still), "clipping was not active"
        assert seen["different"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_of_a_text_is_counted_on_one_rank(ranks: Any, layout: str) -> None:
    _, data_ranks, _, _ = LAYOUTS[layout]
    for found in ranks(layout):
        assert found[layout]["counted"] == [{data_ranks * TEXTS * LENGTH * TOP_K}] * STEPS


def test_the_trajectory_is_that_of_torchtitan_alone_to_rounding(ranks: Any) -> None:
    for found in ranks(PARTS):
        ours, alone = torch.tensor(found[PARTS]["logged"][0]), torch.tensor(found["alone"])
        assert torch.allclose(ours[0], alone[0], rtol=1e-3)
        assert torch.allclose(ours[:, 0], alone[:, 0], rtol=1e-2)


def test_training_with_copies_is_torchtitan_alone_to_rounding(ranks: Any) -> None:
    for found in ranks(PARTS):
        assert found["copies"]["copies"] >= 4
        assert found["copies"]["distance"] < 1e-10
