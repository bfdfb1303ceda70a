"""What people do to an attached model from outside: right, or refused in one line; never wrong without a word."""

import copy
import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import training
from support.job import Job, Run, alone, mean_over_ranks, of_family
from support.moe_models import make_model
from support.ranks import run_ranks
from support.seen import heard
from support.shuffle import plan_shuffle
from torch import nn

import eplb_runtime as eplb

EXPERTS = 8


def attached(rank: int, *, moving: bool = False, **settings: Any) -> Run:
    planner = plan_shuffle if moving else None
    return Run(rank, Job(planner=planner, settings={"interval": 2, "lag": 1, **settings})).attach()


def refused(kind: type[Exception], words: str, work: Callable[[], object]) -> None:
    with pytest.raises(kind) as said:
        work()
    assert words in str(said.value) and "\n" not in str(said.value), said.value


def new_memory(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def other_memory(rank: int) -> None:
    for change in (new_memory, nn.Module.bfloat16):
        job = attached(rank, replica_slots=1).train(1)
        change(job.model)
        refused(RuntimeError, "lie in other memory", job.step)
        job.balancer.close()
    # Without copies the Parameters alone count, wherever they lie.
    plain, moved = attached(rank), attached(rank)
    new_memory(moved.model)
    assert moved.train(4).losses == plain.train(4).losses


def test_experts_that_got_other_memory_are_refused_where_copies_are_read_from_the_old() -> None:
    run_ranks(2, other_memory)


def no_copies(rank: int) -> None:
    job = attached(rank)
    model, balancer = job.model, job.balancer
    for work in (
        lambda: copy.deepcopy(model),
        lambda: torch.optim.swa_utils.AveragedModel(model),
        lambda: torch.save(model, io.BytesIO()),
        lambda: copy.deepcopy(model.model.layers[0].mlp.experts),
    ):
        refused(TypeError, "cannot be copied or pickled", work)
    job.step()
    rows = balancer.runtime.registry.parameters()[0]
    with balancer.loop.uninterrupted("a schedule"):
        gather = partial(balancer.gather_experts, 0, rows)
        refused(RuntimeError, "gather_experts() inside a schedule", gather)
    rows.untyped_storage().resize_(0)
    refused(RuntimeError, "memory is freed", gather)
    balancer.close()
    with heard(logging.INFO) as lines:
        for width in (32, 36):
            config = eplb.BalancerConfig(replica_slots=1)
            eplb.attach(make_model("olmoe", experts=EXPERTS, width=width), config=config).close()
    assert sum("last bits" in line for line in lines) == (rank == 0), "what each rank would say is said once"


def test_a_model_cannot_be_copied_nor_experts_gathered_in_a_schedule_or_without_memory() -> None:
    run_ranks(2, no_copies)


def inside_a_step(rank: int) -> None:
    job = attached(rank, moving=True, interval=100)
    balancer = job.balancer
    job.backward(job.forward())
    inside = "between a backward pass and the optimizer's step"
    refused(RuntimeError, inside, balancer.rebalance)
    refused(RuntimeError, inside, lambda: balancer.load_state_dict(balancer.state_dict()))
    job.update()
    assert balancer.rebalance()
    job.forward()  # a forward alone, since the last decision: no mistake that a guard would find
    assert not balancer.rebalance() and balancer.placement.epoch == 1
    balancer.close()


def test_no_rebalance_happens_inside_a_step() -> None:
    run_ranks(2, inside_a_step)


def copied() -> eplb.Placement:
    """Each rank holds copies of two experts of the other."""
    plain = eplb.Placement.initial(2, EXPERTS, 2, 2)
    map_ = np.array(plain.physical_to_logical).reshape(2, 2, -1)
    map_[:, 0, -2:], map_[:, 1, -2:] = [4, 5], [0, 1]
    return eplb.Placement(map_.reshape(2, -1), EXPERTS, 2, plain.home)


def abandoned(rank: int) -> None:
    """A backward pass raises half way, on all ranks, and the loop goes on: the next gradients beside the right ones."""
    gradients = []
    for abandons in (False, True):
        job = attached(rank, replica_slots=2, initial_placement=copied())
        if abandons:

            def stop(gradient: torch.Tensor) -> None:
                raise ValueError("out of memory, say")

            handle = job.model.model.layers[0].mlp.register_forward_hook(
                lambda module, args, out: out.register_hook(stop) and None
            )
            with pytest.raises(ValueError):
                job.backward(job.forward())
            handle.remove()
            job.optimizer.zero_grad()
        job.backward(job.forward())
        job.balancer.reduce_gradients()
        gradients.append([p.grad.clone() for p in job.balancer.runtime.registry.parameters()])
        job.balancer.close()
    for one, other in zip(*gradients, strict=True):
        assert (one - other).abs().max() < 1e-6 * one.abs().max()


def test_a_backward_pass_that_broke_off_leaves_nothing_in_the_next_gradients() -> None:
    run_ranks(2, abandoned)


def saved_by_the_library(rank: int, folder: Path) -> None:
    job = attached(rank, moving=True, timeout_seconds=training.DEADLINE).train(5)
    model, balancer = job.model, job.balancer
    assert balancer.placement.epoch
    whole = eplb.logical_state_dict(model)
    if rank == 0:
        late = f"to save_pretrained of an attached model within {training.DEADLINE:g} s: it is collective"
        refused(RuntimeError, late, lambda: model.save_pretrained(folder / "alone"))
    torch.distributed.barrier()
    model.save_pretrained(folder / "together", is_main_process=rank == 0)
    refused(ValueError, "does not take state_dict", lambda: model.save_pretrained(folder, state_dict=whole))
    read = type(model).from_pretrained(folder / "together").state_dict()
    assert all(torch.equal(tensor, whole[f"model.{name}"]) for name, tensor in read.items()) and len(read) == len(whole)
    balancer.close()


def test_save_pretrained_writes_the_whole_model_from_all_ranks_and_waits_for_no_rank_for_ever(tmp_path: Path) -> None:
    run_ranks(2, saved_by_the_library, tmp_path)
    assert not (tmp_path / "alone").exists()


def in_bfloat16(rank: int, moving: bool) -> tuple[list[float], int]:
    """A float32 model that is trained where new tensors are bfloat16."""
    job = attached(rank, moving=moving, interval=1, lag=0)
    assert moving or job.balancer.rebalancer.decisions.process is None, "what never moves compiles nothing"
    torch.set_default_dtype(torch.bfloat16)
    try:
        job.train(4)
    finally:
        torch.set_default_dtype(torch.float32)
        job.balancer.close()
    assert {parameter.dtype for parameter in job.model.parameters()} == {torch.float32}
    return job.losses, job.balancer.placement.epoch


def with_shared_experts(job: Job) -> Any:
    """An experts module with two parents."""
    model = of_family(job)
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts
    return model


def shared_by_two_layers(rank: int, moving: bool) -> tuple[list[float], int]:
    """Beside one process with all batches."""
    job = Job(model=with_shared_experts, planner=plan_shuffle if moving else None)
    run, plain = Run(rank, job).attach().train(4), alone(job, 2).train(4)
    assert mean_over_ranks(run.losses) == pytest.approx(plain.losses, abs=1e-5)
    assert run.balancer.placement.num_layers == 1
    run.balancer.close()
    return run.losses, run.balancer.placement.epoch


@pytest.mark.long
@pytest.mark.parametrize("job", [in_bfloat16, shared_by_two_layers])
def test_it_trains_to_the_same_bits_wherever_experts_are(job: Callable[..., object]) -> None:
    for still, moving in zip(run_ranks(2, job, False), run_ranks(2, job, True), strict=True):
        assert still == (moving[0], 0) and moving[1] == 4
