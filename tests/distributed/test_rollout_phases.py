"""Rollouts between training steps: the balancer is suspended while weights, gradients and optimizer state are freed,
keeps no memory meanwhile, and no bit of training changes. 2 ranks, a small Qwen3-MoE."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import training
from support.examples import load_example
from support.ranks import run_ranks
from support.seen import differing, digests, said_by
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted

KINDS: dict[str, dict[str, Any]] = {
    "between steps": {},
    "overlapped": {"overlap": True},
    "replicas": {"replica_slots": 1},
    "overlapped replicas": {"overlap": True, "replica_slots": 1},
}
CYCLES, SEEN = 9, (3, 6, 8)
SMALL = 64 << 10
"""Bytes of maps, counters and samples: far less than one expert tensor."""
TOKENS = torch.arange(16).reshape(1, 16)


def storages(tensors: list[Tensor]) -> dict[int, int]:
    held = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in held}


class Phases:
    """Frees what a job trains, and loads it again; all of it is in other memory then.

    Args:
        by: ``"resize"`` frees the storages of weights, ``"data"`` puts empty tensors in their places.
    """

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


def attached(kind: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model, optimizer = load_example("rollouts").make()
    chosen = {"interval": 1, "gate": "always", **KINDS[kind], **options}
    if chosen["interval"] is not None:
        chosen["lag"] = 0
    balancer = training.attach(model, optimizer, **chosen)
    if chosen.get("policy") != "static":
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    return model, optimizer, balancer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(100 * number + int(os.environ["RANK"]))
    return training.step(model, optimizer, torch.randint(0, 64, (4, 16)))


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def trained(kind: str, by: str, each: int, **options: Any) -> dict[str, Any]:
    """Losses, state, moves, and bytes that are held while all is freed, every so many steps; ``by`` empty: never."""
    model, optimizer, balancer = attached(kind, **options)
    losses, freed = [], []
    for number in range(6 if kind == "overlapped" else 3):
        losses.append(step(model, optimizer, number))
        if by and number % each == each - 1:
            phases = Phases(model, optimizer, by)
            freed.append(balancer.suspend())
            phases.free()
            phases.load()
            balancer.resume()
    moved = sum(event.moved_experts for event in balancer.events.of_type(RebalanceCommitted))
    bits = {"losses": losses, **digests(eplb.logical_state_dict(model, optimizer))}
    balancer.close()
    return {"bits": bits, "moved": moved, "freed": freed}


def with_and_without_phases(rank: int) -> None:
    """With overlap after three steps, as many as a migration takes; and after each, which ends what is on its way."""
    wanted = {"overlapped": trained("overlapped", "", 1, policy="static"), "replicas": trained("replicas", "", 1)}
    for kind, by, each in (("overlapped", "data", 3), ("overlapped", "data", 1), ("replicas", "resize", 1)):
        found = trained(kind, by, each)
        assert differing(found["bits"], wanted[kind]["bits"]) == [] and found["moved"] > 0, (kind, each)
        assert (kind, each) == ("overlapped", 1) or min(found["freed"]) > SMALL


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
    model, optimizer, balancer = attached("overlapped replicas")
    found = []
    for number in range(CYCLES):
        if number % 5 < 2:
            step(model, optimizer, number)
        phases = Phases(model, optimizer, "data")
        balancer.suspend()
        phases.free()
        if number in SEEN:
            held = held_bytes(phases.own()) - before
            found.append((held, threading.active_count(), len(os.listdir("/proc/self/fd"))))
        phases.load()
        balancer.resume()
    balancer.close()
    return found


@pytest.mark.long
def test_nothing_is_held_while_suspended_nor_grows_over_cycles() -> None:
    for found in run_ranks(2, cycles):
        nbytes, threads, descriptors = zip(*found, strict=True)
        assert max(nbytes) < SMALL and nbytes[-1] <= nbytes[1], nbytes
        assert threads[-1] <= threads[0] and descriptors[-1] <= descriptors[0], (threads, descriptors)


def while_suspended(rank: int) -> None:
    model, optimizer, balancer = attached("between steps")
    step(model, optimizer, 0)
    before = logits(model)
    balancer.suspend()
    assert balancer.suspend() == 0
    assert torch.equal(before, logits(model)) and dict(balancer.named_logical_tensors())
    balancer.declare(torch.ones(2, 8))
    for name, call in {
        "rebalance()": balancer.rebalance,
        "load_state_dict()": lambda: balancer.load_state_dict({}),
        "logical_order()": lambda: balancer.logical_order().__enter__(),
        "a forward in training": lambda: model(input_ids=TOKENS),
        "optimizer.step()": optimizer.step,
    }.items():
        said = said_by(call)
        assert said.startswith(f"{name} while the balancer is suspended: ") and "\n" not in said, said
        assert "balancer.resume()" in said
    phases = Phases(model, optimizer, "resize")
    phases.free()
    for call in (balancer.named_logical_tensors, balancer.resume):
        assert "memory is freed" in (said := said_by(call)) and "\n" not in said, said
    if rank == 1:
        phases.load()
    said = said_by(balancer.resume)
    assert "memory is freed" in said and "rank 0" in said
    if rank == 0:
        phases.load()
    balancer.resume()
    step(model, optimizer, 1)
    named = [type(event).__name__ for event in balancer.events]
    assert [name for name in named if "Suspen" in name] == ["Suspended", "SuspensionEnded"]
    balancer.close()


def test_what_moves_nothing_works_while_suspended_and_other_calls_say_what_to_do() -> None:
    """A rank without weights keeps all suspended until they are loaded."""
    run_ranks(2, while_suspended)


def alone(rank: int) -> None:
    """A rank suspends, or resumes, alone; then training goes on, as if it had not."""
    static, losses = attached("between steps", policy="static"), []
    model, optimizer, balancer = attached("overlapped", timeout_seconds=training.DEADLINE)
    for number, (call, name) in enumerate([(balancer.suspend, "suspend"), (balancer.resume, "resume")]):
        losses.append(step(model, optimizer, number))
        if name == "resume":
            balancer.suspend()
        if rank == 0:
            assert f"rank 1 did not come to {name}() within {training.DEADLINE:g} s" in said_by(call)
        dist.barrier()
    balancer.resume()
    losses.append(step(model, optimizer, 2))
    balancer.close()
    assert losses == [step(*static[:2], number) for number in range(3)]
    static[2].close()


def late(rank: int) -> None:
    """Weights are freed and loaded again after a rank has come too late to resume(); then state is left out once, which
    put back after homes have moved would be that of other experts."""
    model, optimizer, balancer = attached("replicas", timeout_seconds=training.DEADLINE)
    step(model, optimizer, 0)
    phases, before = Phases(model, optimizer, "resize"), logits(model)
    balancer.suspend()
    if rank == 0:
        assert f"rank 1 did not come to resume() within {training.DEADLINE:g} s" in said_by(balancer.resume)
    dist.barrier()
    phases.free()
    assert held_bytes(phases.own()) < SMALL, "all of it is suspended"
    phases.load()
    state = {parameter: optimizer.state.pop(parameter) for parameter in list(optimizer.state)}
    said = said_by(balancer.resume)
    assert "is not in the optimizer's state any more: load it first" in said and "\n" not in said
    optimizer.state.update(state)
    balancer.resume()
    assert torch.equal(before, logits(model))
    step(model, optimizer, 1)
    balancer.close()


@pytest.mark.long
@pytest.mark.parametrize("job", [alone, late])
def test_a_rank_that_suspends_or_resumes_alone_hears_of_it(job: Any) -> None:
    run_ranks(2, job)


def after_a_load(rank: int, folder: str) -> None:
    """A step after a load is not among those at which a job notes state by itself, whose number is a power of two."""
    model, optimizer, balancer = attached("between steps")
    for number in range(4):
        step(model, optimizer, number)
    eplb.checkpoint.save(folder, model, optimizer)
    balancer.close()
    model, optimizer, balancer = attached("between steps")
    eplb.checkpoint.load(folder, model, optimizer)
    step(model, optimizer, 4)
    balancer.suspend()
    optimizer.state.clear()
    assert "is not in the optimizer's state any more: load it first" in (said := said_by(balancer.resume)), said
    balancer.close()


def test_state_that_is_left_out_after_a_load_is_noticed(tmp_path: Path) -> None:
    run_ranks(2, after_a_load, str(tmp_path))


def without_memory(rank: int) -> None:
    """One rank has no memory after a rollout: none moves until it has."""
    model, optimizer, balancer = attached("between steps", interval=None)
    step(model, optimizer, 0)
    assert balancer.rebalance()
    balancer.suspend()
    transport = balancer.rebalancer._engine.executor._transport
    empty = transport.empty

    def fails(nbytes: int) -> Tensor:
        if nbytes:
            raise RuntimeError("out of memory")
        return empty(nbytes)

    if rank == 1:
        transport.empty = fails
    balancer.resume()
    step(model, optimizer, 1)
    assert not balancer.rebalance()
    (line,) = (event.cause for event in balancer.events.of_type(RebalanceAborted))
    assert "rank 1" in line and "out of memory" in line and "\n" not in line
    transport.empty = empty
    step(model, optimizer, 2)
    assert balancer.rebalance()
    balancer.close()


@pytest.mark.long
def test_a_rank_that_gets_no_memory_keeps_all_from_moving_until_it_does() -> None:
    run_ranks(2, without_memory)


def closed(rank: int) -> None:
    """One rank has freed its weights ahead of suspend(). A close while replicas have no memory leaves homes where they
    were."""
    model, optimizer, balancer = attached("replicas")
    step(model, optimizer, 0)
    phases, before = Phases(model, optimizer, "data"), logits(model)
    if rank == 1:
        phases.free()
    said = said_by(balancer.suspend)
    assert "rank 1" in said and "memory is freed" in said and "after suspend() alone" in said and "\n" not in said
    if rank == 1:
        phases.load()
    balancer.suspend()
    assert "balancer.resume()" in said_by(lambda: logits(model))
    balancer.close()
    assert torch.equal(before, logits(model))
    step(model, optimizer, 1)


def closed_while_freed(rank: int) -> None:
    """A close while weights have no memory, and what it takes to compute and train after it."""
    model, optimizer, balancer = attached("replicas")
    step(model, optimizer, 0)
    phases, before = Phases(model, optimizer, "data"), logits(model)
    balancer.suspend()
    phases.free()
    balancer.close()
    assert "memory is freed" in said_by(balancer.resume)
    phases.load()
    assert "balancer.resume() first" in said_by(lambda: logits(model))
    balancer.resume()
    assert torch.equal(before, logits(model))
    assert "resume() after close()" in said_by(balancer.resume)
    step(model, optimizer, 1)


@pytest.mark.long
@pytest.mark.parametrize("job", [closed, closed_while_freed])
def test_a_model_that_is_closed_while_suspended_computes_once_its_weights_are_there(job: Any) -> None:
    run_ranks(2, job)
