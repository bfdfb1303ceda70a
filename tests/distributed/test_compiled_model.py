"""torch.compile of an attached model: no graph break, no new graph at a commit, the bits of the model without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import nn
from torch._dynamo.utils import counters

import eplb_runtime as eplb
from eplb_runtime.config import config_from_settings
from eplb_runtime.distributed.step_tag import OutOfStepError
from eplb_runtime.moe import custom_ops, layer
from eplb_runtime.planner.shuffle import plan_shuffle

STEPS = 2
HOMES = {"moved": True}
KEPT = {"moved": True, "slots": 1}
SHARED = {"moved": True, "slots": 1, "shared": True}


def train(
    rank: int,
    compiled: str = "",
    *,
    moved: bool = False,
    slots: int = 0,
    shared: bool = False,
    whole: bool = True,
    caller: bool = False,
    checkpointing: bool = False,
    before: bool = False,
    micro_batches: int = 1,
) -> dict[str, Any]:
    """Losses, what evaluation gives, counts, weights and optimizer state of a few steps, and what dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    model = make_model("olmoe", layers=1)
    model.set_experts_implementation("grouped_mm")
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    options = {"backend": compiled, "fullgraph": True}
    if before:
        model.compile(**options)
        model(input_ids=batch_of(rank, 0), use_cache=False).logits.sum().backward()
        model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = eplb.BalancerConfig(
        dense_gradients="allreduce",
        interval=1 if moved else 1000,
        replica_slots=slots,
        shared_between_layers=shared,
        migration=eplb.MigrationConfig(lag=0),
    )
    balancer = eplb.attach(model, optimizer, config=config)
    balancer._plan_with(plan_shuffle)
    balancer._wait_until_compiled()
    run = model
    if caller:
        run = torch.compile(lambda **batch: model(**batch), **options)
    elif compiled and not before:
        for module in [model] if whole else model.model.layers:
            module.compile(**options)
    counters.clear()
    numbers, loads, graphs = [], [], []
    for step in range(STEPS):
        for micro_batch in range(micro_batches):
            ids = batch_of(rank, step * micro_batches + micro_batch)
            mask = torch.ones_like(ids)
            mask[:, ids.shape[1] - rank - step :] = 0  # of another number of tokens on each rank and in each step
            loss = run(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
            last = micro_batch == micro_batches - 1
            with contextlib.nullcontext() if last else balancer.no_sync():
                loss.backward()
            numbers.append(loss.item())
        loads.append(balancer._counted.tolist())
        optimizer.step()
        optimizer.zero_grad()
        numbers.append(_evaluated(model, run, batch_of(rank, 100)))
        graphs.append(counters["stats"]["unique_graphs"])
    found = {
        "numbers": numbers,
        "loads": loads,
        "state": eplb.logical_state_dict(model, optimizer),
        "epoch": balancer.placement.epoch,
        "breaks": sum(counters["graph_break"].values()),
        "graphs": graphs,
    }
    balancer.close()
    return found


def _evaluated(model: nn.Module, run: Callable[..., Any], ids: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        logits = run(input_ids=ids, use_cache=False).logits
    model.train()
    return float(logits.double().sum())


JOBS: dict[str, dict[str, Any]] = {
    "homes": {**HOMES},
    "homes, compiled": {"compiled": "aot_eager", "caller": True, **HOMES},
    "homes, compiled, static": {"compiled": "aot_eager"},
    "homes, layers": {"compiled": "aot_eager", "whole": False, **HOMES},
    "homes, before": {"compiled": "aot_eager", "before": True, **HOMES},
    "homes, checkpointing": {"compiled": "aot_eager", "checkpointing": True, "micro_batches": 2, **HOMES},
    "homes, micro-batches": {"micro_batches": 2, **HOMES},
    "kept": {"micro_batches": 2, **KEPT},
    "kept, compiled": {"compiled": "aot_eager", "micro_batches": 2, **KEPT},
    "shared": {"micro_batches": 2, **SHARED},
    "shared, compiled": {"compiled": "aot_eager", "micro_batches": 2, **SHARED},
}


def _all(rank: int) -> dict[str, Any]:
    trained = {name: train(rank, **options) for name, options in JOBS.items()}
    return {**trained, "in turn": _two_batches(rank, at_once=False), "at once": _two_batches(rank, at_once=True)}


def _two_batches(rank: int, at_once: bool) -> dict[str, Any]:
    """Training steps of two micro-batches, whose graphs are compiled before two run at once."""
    torch._dynamo.reset()
    model = make_model("olmoe", layers=1).train()
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = eplb.BalancerConfig(dense_gradients="allreduce", interval=1, migration=eplb.MigrationConfig(lag=0))
    balancer = eplb.attach(model, optimizer, config=config)
    balancer._plan_with(plan_shuffle)
    balancer._wait_until_compiled()
    model.compile(backend="aot_eager", fullgraph=True)
    numbers = []
    for step in range(STEPS + 1):
        loss_of = [partial(_loss, model, batch_of(rank, step, seed=seed)) for seed in (1, 2)]
        losses = balancer.at_once(*loss_of) if at_once and step else [loss() for loss in loss_of]
        for loss in losses:
            loss.backward()
        numbers += [loss.item() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
    found = {"numbers": numbers, "state": eplb.logical_state_dict(model, optimizer), "epoch": balancer.placement.epoch}
    balancer.close()
    return found


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


@cache
def results() -> list[dict[str, Any]]:
    """Of each rank, by job."""
    return run_ranks(2, _all)


def same_bits(one: str, other: str) -> bool:
    return all(
        rank[one]["numbers"] == rank[other]["numbers"]
        and rank[one]["state"].keys() == rank[other]["state"].keys()
        and all(
            torch.equal(tensor, rank[other]["state"][name])
            for name, tensor in rank[one]["state"].items()
            if isinstance(tensor, torch.Tensor)
        )
        for rank in results()
    )


@pytest.mark.parametrize("name", [name for name in JOBS if JOBS[name].get("compiled")])
def test_there_is_no_graph_break_and_no_new_graph_at_a_commit(name: str) -> None:
    for rank in results():
        assert rank[name]["breaks"] == 0
        assert rank[name]["graphs"][0] > 0 and len(set(rank[name]["graphs"])) == 1, rank[name]["graphs"]
        assert (rank[name]["epoch"] > 0) == bool(JOBS[name].get("moved"))


@pytest.mark.parametrize(
    ("plain", "compiled"),
    [
        ("homes", "homes, compiled"),
        ("homes", "homes, layers"),
        ("homes", "homes, before"),
        ("homes, micro-batches", "homes, checkpointing"),
        ("kept", "kept, compiled"),
        ("shared", "shared, compiled"),
    ],
)
def test_graphs_train_evaluate_and_count_as_the_model_without(plain: str, compiled: str) -> None:
    assert same_bits(plain, compiled)
    assert all(rank[plain]["loads"] == rank[compiled]["loads"] for rank in results())


def test_moving_experts_changes_no_bit_of_a_compiled_model() -> None:
    assert same_bits("homes, compiled", "homes, compiled, static")


def test_two_batches_at_once_have_the_bits_of_one_after_the_other() -> None:
    assert same_bits("in turn", "at once") and results()[0]["at once"]["epoch"] == STEPS + 1


def test_control_other_batches_are_noticed() -> None:
    assert not same_bits("homes", "homes, micro-batches")
    assert results()[0]["homes"]["loads"] != results()[0]["homes, micro-batches"]["loads"]


def _by_one_function(rank: int, compiled: bool, **config: Any) -> tuple[list[float], dict[str, Any], int]:
    """Forward, backward, clipping and the optimizer's step in one function: losses, state, and how many graphs a
    second round of steps has made."""
    torch._dynamo.reset()
    counters.clear()
    model = make_model("olmoe", layers=1).train()
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    config = {"interval": 1, "lag": 0, "dense_gradients": "allreduce", **config}
    balancer = eplb.attach(model, optimizer, config=config_from_settings(config))
    balancer._plan_with(plan_shuffle)
    balancer._wait_until_compiled()

    def step(*batches: torch.Tensor) -> torch.Tensor:
        for ids in batches[:-1]:
            with balancer.no_sync():
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        loss = model(input_ids=batches[-1], labels=batches[-1], use_cache=False).loss
        loss.backward()
        balancer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.compile(step, backend="aot_eager") if compiled else step
    losses, graphs = [], []
    for number in range(6):
        losses.append(run(*(batch_of(rank, number + 10 * part) for part in range(number % 2 + 1))).item())
        graphs.append(counters["stats"]["unique_graphs"])
    state = eplb.logical_state_dict(model, optimizer)
    assert balancer.placement.epoch == 6
    balancer.close()
    return losses, state, graphs[-1] - graphs[3]


def _by_one_function_and_not(rank: int) -> list[tuple[Any, Any]]:
    configs: tuple[dict[str, Any], ...] = ({}, {"replica_slots": 1})
    return [(_by_one_function(rank, False, **more), _by_one_function(rank, True, **more)) for more in configs]


def test_a_whole_training_step_is_compiled_and_the_balancer_is_left_out() -> None:
    for with_homes_and_copies in run_ranks(2, _by_one_function_and_not):
        for (losses, state, _), (compiled, of_compiled, new_graphs) in with_homes_and_copies:
            assert losses == compiled and len(set(losses)) == 6
            assert new_graphs == 0
            for name, tensor in state.items():
                assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor, of_compiled[name]), name


def _one_of_two(rank: int, **options: Any) -> dict[str, Any]:
    return train(rank, "aot_eager" if rank == 0 else "", **options)


def _homes_and_copies_on_one_of_two(rank: int) -> tuple[list[float], str]:
    numbers = _one_of_two(rank, **HOMES)["numbers"]
    with pytest.raises(OutOfStepError) as refused:
        _one_of_two(rank, **KEPT)
    return numbers, str(refused.value)


def test_a_rank_that_is_not_compiled_goes_along_and_with_copies_is_named() -> None:
    for rank, (numbers, refused) in enumerate(run_ranks(2, _homes_and_copies_on_one_of_two)):
        assert numbers == results()[rank]["homes"]["numbers"]
        assert "rank 0 in the forward of MoE layer 0 in training in a graph of torch.compile" in refused


def _without_operators(rank: int) -> str:
    layer.in_graphs = custom_ops.in_graphs = lambda: False
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        train(rank, "eager")
    return str(refused.value)


def test_control_without_operators_graphs_break() -> None:
    assert all("torch.compiler.disable" in refused for refused in run_ranks(2, _without_operators))
