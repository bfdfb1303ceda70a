"""What people do to an attached model from outside: right, or refused in one line; never wrong without a word."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import heard
from support.shuffle import plan_by, plan_shuffle
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.planner.shuffle import shuffled

EXPERTS = 8


def attached(**options: object) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"interval": 2, "lag": 1, "policy": "incremental" if options.get("moving") else "static", **options}
    return model, optimizer, training.attach(model, optimizer, gate="always", **settings)


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    return [training.step(model, optimizer, batch_of(rank, step)) for step in range(steps)]


def refusal(kind: type[Exception], work: Callable[[], object]) -> str:
    with pytest.raises(kind) as refused:
        work()
    return str(refused.value)


def new_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def as_one_vector(model: nn.Module) -> None:
    parameters = list(model.parameters())
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters), parameters)


WAYS: dict[str, Callable[[nn.Module], object]] = {
    ".data =": new_memory,
    "vector_to_parameters": as_one_vector,
    "bfloat16": lambda model: model.bfloat16(),
}


def memory(rank: int) -> dict[str, str]:
    said = {}
    for way, change in WAYS.items():
        model, optimizer, balancer = attached(replica_slots=1)
        train(rank, model, optimizer)
        change(model)
        said[way] = refusal(RuntimeError, partial(train, rank, model, optimizer))
        balancer.close()
    # Without copies the Parameters alone count, wherever they lie.
    plain, moved = attached(), attached()
    first = train(rank, *plain[:2], 4)
    new_memory(moved[0])
    assert train(rank, *moved[:2], 4) == first
    return said


def test_experts_that_got_other_memory_are_refused_where_copies_are_read_from_the_old() -> None:
    for said in run_ranks(2, memory):
        assert len(said) == 3 and all("lie in other memory" in line for line in said.values())


def copies(rank: int) -> list[str]:
    model, optimizer, balancer = attached()
    said = [
        refusal(TypeError, lambda: copy.deepcopy(model)),
        refusal(TypeError, lambda: torch.optim.swa_utils.AveragedModel(model)),
        refusal(TypeError, lambda: torch.save(model, io.BytesIO())),
        refusal(TypeError, lambda: copy.deepcopy(model.model)),
        refusal(TypeError, lambda: copy.deepcopy(model.model.layers[0].mlp.experts)),
    ]
    train(rank, model, optimizer)
    balancer.close()
    return said


def test_a_copy_of_an_attached_model_is_refused_in_one_line() -> None:
    for said in run_ranks(2, copies):
        assert len(said) == 5
        assert all("cannot be copied or pickled" in line and "\n" not in line for line in said)


def rebalances(rank: int) -> dict[str, object]:
    model, optimizer, balancer = attached()
    train(rank, model, optimizer)
    rebalancer, engine = balancer.rebalancer, balancer.rebalancer._engine

    def moves() -> bool:
        before = balancer.placement
        rebalancer._migrate(shuffled(before, np.ones((2, EXPERTS))).with_epoch(before.epoch + 1))
        return balancer.placement is not before

    def fail(phase: object, subject: object) -> None:
        if rank == 1:
            raise ValueError("made to fail")

    engine.probe, probe = fail, engine.probe
    moved = [moves()]
    engine.probe = probe
    moved += [moves(), moves()]
    ids = batch_of(rank, 1)
    model(input_ids=ids, labels=ids).loss.backward()
    said = [
        refusal(RuntimeError, balancer.rebalance),
        refusal(RuntimeError, lambda: balancer.load_state_dict(balancer.state_dict())),
    ]
    optimizer.step()
    plan_by(balancer, plan_shuffle)
    moved.append(balancer.rebalance())
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids)  # a forward alone, since the last decision: no mistake that a guard would find
    assert not balancer.rebalance()
    epoch = balancer.placement.epoch
    balancer.close()
    return {"moved": moved, "said": said, "epoch": epoch}


def test_each_rebalance_is_decided_for_itself_and_none_happens_inside_a_step() -> None:
    for result in run_ranks(2, rebalances):
        assert result["moved"] == [False, True, True, True] and result["epoch"] == 3
        assert all("between a backward pass and the optimizer's step" in line for line in result["said"])


def abandoned(rank: int) -> float:
    """A backward pass raises half way, on all ranks, and the loop goes on: the next gradients beside the right ones."""
    gradients = []
    for abandons in (False, True):
        model, optimizer, balancer = attached(replica_slots=2, split_least_tokens=0, initial_placement=copied())
        ids = batch_of(rank, 0)
        if abandons:

            def stop(gradient: torch.Tensor) -> None:
                raise ValueError("out of memory, say")

            handle = model.model.layers[0].mlp.register_forward_hook(
                lambda module, args, out: out.register_hook(stop) and None
            )
            with pytest.raises(ValueError):
                model(input_ids=ids, labels=ids).loss.backward()
            handle.remove()
            optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        balancer.reduce_gradients()
        gradients.append([p.grad.clone() for p in balancer.runtime.registry.parameters()])
        balancer.close()
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*gradients, strict=True))


def copied() -> eplb.Placement:
    """Each rank holds copies of two experts of the other."""
    plain = eplb.Placement.initial(2, EXPERTS, 2, 2)
    map_ = np.array(plain.physical_to_logical).reshape(2, 2, -1)
    map_[:, 0, -2:], map_[:, 1, -2:] = [4, 5], [0, 1]
    return eplb.Placement(map_.reshape(2, -1), EXPERTS, 2, plain.home)


def test_a_backward_pass_that_broke_off_leaves_nothing_in_the_next_gradients() -> None:
    assert max(run_ranks(2, abandoned)) < 1e-6


def saved_by_the_library(rank: int, folder: str) -> list[str]:
    model, optimizer, balancer = attached(timeout_seconds=training.DEADLINE)
    plan_by(balancer, plan_shuffle)
    train(rank, model, optimizer, 5)
    assert balancer.placement.epoch
    whole = eplb.logical_state_dict(model)
    said = []
    if rank == 0:
        said.append(refusal(RuntimeError, lambda: model.save_pretrained(Path(folder) / "alone")))
    torch.distributed.barrier()
    model.save_pretrained(Path(folder) / "together", is_main_process=rank == 0)
    said.append(refusal(ValueError, lambda: model.save_pretrained(folder, state_dict=model.state_dict())))
    read = type(model).from_pretrained(Path(folder) / "together").state_dict()
    assert all(torch.equal(tensor, whole[f"model.{name}"]) for name, tensor in read.items()) and len(read) == len(whole)
    balancer.close()
    return said


def test_save_pretrained_writes_the_whole_model_from_all_ranks_and_waits_for_no_rank_for_ever(tmp_path: Path) -> None:
    first, second = run_ranks(2, saved_by_the_library, str(tmp_path))
    assert f"to save_pretrained of an attached model within {training.DEADLINE:g} s: it is collective" in first[0]
    assert first[1] == second[0] and "does not take state_dict" in first[1]
    assert not (tmp_path / "alone").exists()


def in_bfloat16(rank: int, moving: bool) -> tuple[list[float], int, object]:
    """A float32 model that is trained where new tensors are bfloat16."""
    model, optimizer, balancer = attached(moving=moving, interval=1, lag=0)
    assert moving or balancer.rebalancer.decisions.process is None, "what never moves compiles nothing"
    torch.set_default_dtype(torch.bfloat16)
    try:
        losses, dtypes = train(rank, model, optimizer, 4), {p.dtype for p in model.parameters()}
    finally:
        torch.set_default_dtype(torch.float32)
        balancer.close()
    return losses, balancer.placement.epoch, dtypes


def shared_by_two_layers(rank: int, moving: bool) -> tuple[list[float], int, object]:
    """An experts module with two parents; beside one process with all batches."""
    plain = make_model("olmoe", experts=EXPERTS)
    plain.model.layers[1].mlp.experts = plain.model.layers[0].mlp.experts
    model = copy.deepcopy(plain)
    of_plain, optimizer = (torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (plain, model))
    balancer = training.attach(model, optimizer, moving=moving, interval=1, lag=0)
    losses, off = train(rank, model, optimizer, 4), 0.0
    for step in range(4):
        mine = [plain(input_ids=ids, labels=ids).loss for ids in (batch_of(0, step), batch_of(1, step))]
        (sum(mine) / 2).backward()
        of_plain.step()
        of_plain.zero_grad()
        off = max(off, abs(float(mine[rank].detach()) - losses[step]))
    assert off < 1e-5, off
    balancer.close()
    return losses, balancer.placement.epoch, balancer.placement.num_layers


@pytest.mark.parametrize(("job", "kept"), [(in_bfloat16, {torch.float32}), (shared_by_two_layers, 1)])
def test_it_trains_to_the_same_bits_wherever_experts_are(job: Callable[..., object], kept: object) -> None:
    for still, moving in zip(run_ranks(2, job, False), run_ranks(2, job, True), strict=True):
        assert still == (moving[0], 0, kept) and moving[1:] == (4, kept)


def freed(rank: int) -> tuple[str, str]:
    _model, _, balancer = attached()
    rows = next(iter(balancer.runtime.registry.parameters()))
    with balancer.loop.uninterrupted("a schedule"):
        within = refusal(RuntimeError, lambda: balancer.gather_experts(0, rows))
    rows.untyped_storage().resize_(0)
    freed = refusal(RuntimeError, lambda: balancer.gather_experts(0, rows))
    balancer.close()
    return within, freed


def test_experts_are_not_gathered_in_a_schedule_or_without_memory() -> None:
    for within, freed_rows in run_ranks(2, freed):
        assert within.startswith("gather_experts() inside a schedule") and "memory is freed" in freed_rows


def lines_of_attach(rank: int) -> list[str]:
    with heard(logging.INFO) as lines:
        for width in (32, 36):
            config = eplb.BalancerConfig(replica_slots=1)
            eplb.attach(make_model("olmoe", experts=EXPERTS, width=width), config=config).close()
    return lines


def test_what_each_rank_would_say_is_said_once() -> None:
    first, second = run_ranks(2, lines_of_attach)
    assert second == [] and sum("last bits" in line for line in first) == 1
