"""Rollouts between training steps: the balancer is suspended while weights, gradients and optimizer state are freed,
keeps no memory meanwhile, and no bit of training changes. 2 ranks, a small Qwen3-MoE."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import training
from support.job import Job, Run, Trace
from support.ranks import run_ranks
from support.seen import differing, said_by
from support.shuffle import plan_shuffle
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted

KINDS: dict[str, dict[str, Any]] = {
    "between steps": {},
    "overlapped": {"overlap": True},
    "replicas": {"replica_slots": 1},
    "overlapped replicas": {"overlap": True, "replica_slots": 1},
}
SIZES: dict[str, Any] = {"family": "qwen3_moe", "width": 64, "implementation": "eager"}
CYCLES, SEEN = 9, (3, 6, 8)
SMALL = 64 << 10
"""Bytes of maps, counters and samples: far less than one expert tensor."""
TOKENS = torch.arange(16).reshape(1, 16)


def storages(tensors: list[Tensor]) -> dict[int, int]:
    held = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in held}


class Phases:
    """Frees what a job trains, and loads it again; all of it is in other memory then. ``by``: ``"resize"`` frees the
    storages of weights, ``"data"`` puts empty tensors in their places."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, by: str) -> None:
        self._parameters, self._optimizer, self._by = list(model.parameters()), optimizer, by
        self._saved: list[Tensor] = []
        self._state: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    def free(self) -> None:
        self._saved = [parameter.detach().clone() for parameter in self._parameters]
        for parameter in self._parameters:
            if self._by == "data":
                parameter.data = torch.empty(0)
            else:
                parameter.untyped_storage().resize_(0)
        for state in self._optimizer.state.values():
            self._state.append((state, {key: state.pop(key) for key in ("exp_avg", "exp_avg_sq")}))

    def load(self) -> None:
        for parameter, saved in zip(self._parameters, self._saved, strict=True):
            if self._by == "data":
                parameter.data = saved.clone()
            else:
                parameter.untyped_storage().resize_(saved.nbytes)
                parameter.data.copy_(saved)
        for state, kept in self._state:
            state.update({key: value.clone() for key, value in kept.items()})
        self._saved, self._state = [], []

    def own(self) -> list[Tensor]:
        """What the job itself holds while it is freed."""
        return [*self._saved, *(value for _, kept in self._state for value in kept.values())]


def started(rank: int, kind: str, planner: Any = plan_shuffle, **settings: Any) -> Run:
    return Run(rank, Job(**SIZES, planner=planner, settings={**KINDS[kind], **settings})).attach()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def trained(rank: int, kind: str, by: str, each: int, planner: Any = plan_shuffle) -> tuple[Trace, list[int]]:
    """The trace, and bytes that are held while all is freed, every so many steps; ``by`` empty: never."""
    job, freed = started(rank, kind, planner), []
    for number in range(6 if kind == "overlapped" else 3):
        job.step()
        if by and number % each == each - 1:
            phases = Phases(job.model, job.optimizer, by)
            freed.append(job.balancer.suspend())
            phases.free()
            phases.load()
            job.balancer.resume()
    return job.end(), freed


def with_and_without_phases(rank: int) -> None:
    """With overlap after three steps, as many as a migration takes; and after each, which ends what is on its way."""
    wanted, _ = trained(rank, "overlapped", "", 1, None)
    copied, _ = trained(rank, "replicas", "", 1)
    for kind, by, each in (("overlapped", "data", 3), ("overlapped", "data", 1), ("replicas", "resize", 1)):
        found, freed = trained(rank, kind, by, each)
        assert differing(found.bits, (copied if kind == "replicas" else wanted).bits) == [], (kind, each)
        assert found.commits > 0 and ((kind, each) == ("overlapped", 1) or min(freed) > SMALL), (kind, each)


def test_phases_between_all_steps_change_no_bit() -> None:
    run_ranks(2, with_and_without_phases)


def held_bytes(known: list[Tensor]) -> int:
    """Bytes of all tensors of this process but these."""
    gc.collect()
    of_all = storages([one for one in gc.get_objects() if isinstance(one, Tensor) and one.device.type == "cpu"])
    return sum(nbytes for key, nbytes in of_all.items() if key not in storages(known))


def cycles(rank: int) -> list[tuple[int, int, int]]:
    """Bytes held, threads and descriptors while suspended, in some cycles; a step and moves in some."""
    before = held_bytes([])
    job = started(rank, "overlapped replicas")
    found = []
    for number in range(CYCLES):
        if number % 5 < 2:
            job.step()
        phases = Phases(job.model, job.optimizer, "data")
        job.balancer.suspend()
        phases.free()
        if number in SEEN:
            held = held_bytes(phases.own()) - before
            found.append((held, threading.active_count(), len(os.listdir("/proc/self/fd"))))
        phases.load()
        job.balancer.resume()
    job.balancer.close()
    return found


@pytest.mark.long
def test_nothing_is_held_while_suspended_nor_grows_over_cycles() -> None:
    for found in run_ranks(2, cycles):
        nbytes, threads, descriptors = zip(*found, strict=True)
        assert max(nbytes) < SMALL and nbytes[-1] <= nbytes[1], nbytes
        assert threads[-1] <= threads[0] and descriptors[-1] <= descriptors[0], (threads, descriptors)


def while_suspended(rank: int) -> None:
    job = started(rank, "between steps")
    job.step()
    before = logits(job.model)
    job.balancer.suspend()
    assert job.balancer.suspend() == 0
    assert torch.equal(before, logits(job.model)) and dict(job.balancer.named_logical_tensors())
    job.balancer.declare(torch.ones(2, 8))
    for name, call in {
        "rebalance()": job.balancer.rebalance,
        "load_state_dict()": lambda: job.balancer.load_state_dict({}),
        "logical_order()": lambda: job.balancer.logical_order().__enter__(),
        "a forward in training": lambda: job.model(input_ids=TOKENS),
        "optimizer.step()": job.optimizer.step,
    }.items():
        said = said_by(call)
        assert said.startswith(f"{name} while the balancer is suspended: ") and "\n" not in said, said
        assert "balancer.resume()" in said
    phases = Phases(job.model, job.optimizer, "resize")
    phases.free()
    for call in (job.balancer.named_logical_tensors, job.balancer.resume):
        assert "memory is freed" in (said := said_by(call)) and "\n" not in said, said
    if rank == 1:
        phases.load()
    said = said_by(job.balancer.resume)
    assert "memory is freed" in said and "rank 0" in said
    if rank == 0:
        phases.load()
    job.balancer.resume()
    job.step()
    named = [type(event).__name__ for event in job.balancer.events]
    assert [name for name in named if "Suspen" in name] == ["Suspended", "SuspensionEnded"]
    job.balancer.close()


def test_what_moves_nothing_works_while_suspended_and_other_calls_say_what_to_do() -> None:
    """A rank without weights keeps all suspended until they are loaded."""
    run_ranks(2, while_suspended)


def alone(rank: int) -> None:
    """A rank suspends, or resumes, alone; then training goes on, as if it had not."""
    job = started(rank, "overlapped", timeout_seconds=training.DEADLINE)
    for call, name in ((job.balancer.suspend, "suspend"), (job.balancer.resume, "resume")):
        job.step()
        if name == "resume":
            job.balancer.suspend()
        if rank == 0:
            assert f"rank 1 did not come to {name}() within {training.DEADLINE:g} s" in said_by(call)
        dist.barrier()
    job.balancer.resume()
    job.step()
    job.balancer.close()
    assert job.losses == trained(rank, "between steps", "", 1, None)[0].losses


def late(rank: int) -> None:
    """Weights are freed and loaded again after a rank has come too late to resume(); then state is left out once, which
    put back after homes have moved would be that of other experts."""
    job = started(rank, "replicas", timeout_seconds=training.DEADLINE)
    job.step()
    phases, before = Phases(job.model, job.optimizer, "resize"), logits(job.model)
    with job.balancer.no_sync():
        job.forward().backward()
    job.optimizer.zero_grad()
    job.balancer.suspend()
    if rank == 0:
        assert f"rank 1 did not come to resume() within {training.DEADLINE:g} s" in said_by(job.balancer.resume)
    dist.barrier()
    phases.free()
    assert held_bytes(phases.own()) < SMALL, "all of it is suspended"
    phases.load()
    state = {parameter: job.optimizer.state.pop(parameter) for parameter in list(job.optimizer.state)}
    said = said_by(job.balancer.resume)
    assert "is not in the optimizer's state any more: load it first" in said and "\n" not in said
    job.optimizer.state.update(state)
    job.balancer.resume()
    job.balancer.reduce_gradients()
    assert torch.equal(before, logits(job.model))
    job.step()
    if rank == 0:
        assert f"rank 1 did not come to close() within {training.DEADLINE:g} s" in said_by(job.balancer.close)
    dist.barrier()
    job.balancer.close()


@pytest.mark.long
@pytest.mark.parametrize("job", [alone, late])
def test_a_rank_that_suspends_resumes_or_closes_alone_hears_of_it(job: Any) -> None:
    run_ranks(2, job)


def after_a_load(rank: int, folder: str) -> None:
    """A step after a load is not among those at which a job notes state by itself, whose number is a power of two."""
    job = started(rank, "between steps").train(4)
    eplb.checkpoint.save(folder, job.model, job.optimizer)
    job.balancer.close()
    job = started(rank, "between steps")
    eplb.checkpoint.load(folder, job.model, job.optimizer)
    job.step()
    job.balancer.suspend()
    job.optimizer.state.clear()
    assert "is not in the optimizer's state any more: load it first" in (said := said_by(job.balancer.resume)), said
    job.balancer.close()


def test_state_that_is_left_out_after_a_load_is_noticed(tmp_path: Path) -> None:
    run_ranks(2, after_a_load, str(tmp_path))


def without_memory(rank: int) -> None:
    """One rank has no memory after a rollout: none moves until it has."""
    job = started(rank, "between steps", interval=None, lag=1)
    job.step()
    assert job.balancer.rebalance()
    job.balancer.suspend()
    transport = job.engine.executor.transport
    empty = transport.empty

    def fails(nbytes: int) -> Tensor:
        if nbytes:
            raise RuntimeError("out of memory")
        return empty(nbytes)

    if rank == 1:
        transport.empty = fails
    job.balancer.resume()
    job.step()
    assert not job.balancer.rebalance()
    (line,) = (event.cause for event in job.balancer.events.of_type(RebalanceAborted))
    assert "rank 1" in line and "out of memory" in line and "\n" not in line
    transport.empty = empty
    job.step()
    assert job.balancer.rebalance()
    job.balancer.close()


@pytest.mark.long
def test_a_rank_that_gets_no_memory_keeps_all_from_moving_until_it_does() -> None:
    run_ranks(2, without_memory)


def closed(rank: int) -> None:
    """One rank has freed its weights ahead of suspend(). A close without memory of replicas leaves homes there."""
    job = started(rank, "replicas")
    job.step()
    phases, before = Phases(job.model, job.optimizer, "data"), logits(job.model)
    if rank == 1:
        phases.free()
    said = said_by(job.balancer.suspend)
    assert "rank 1" in said and "memory is freed" in said and "after suspend() alone" in said and "\n" not in said
    if rank == 1:
        phases.load()
    job.balancer.suspend()
    assert "balancer.resume()" in said_by(lambda: logits(job.model))
    job.balancer.close()
    torch.testing.assert_close(logits(job.model), before)  # replicas take no rows any more
    job.step()


def closed_while_freed(rank: int) -> None:
    """A close while weights have no memory, and what it takes to compute and train after it."""
    job = started(rank, "replicas")
    job.step()
    phases, before = Phases(job.model, job.optimizer, "data"), logits(job.model)
    job.balancer.suspend()
    phases.free()
    job.balancer.close()
    assert "memory is freed" in said_by(job.balancer.resume)
    phases.load()
    assert "balancer.resume() first" in said_by(lambda: logits(job.model))
    job.balancer.resume()
    torch.testing.assert_close(logits(job.model), before)  # replicas take no rows any more
    job.step()


@pytest.mark.long
@pytest.mark.parametrize("job", [closed, closed_while_freed])
def test_a_model_that_is_closed_while_suspended_computes_once_its_weights_are_there(job: Any) -> None:
    run_ranks(2, job)
