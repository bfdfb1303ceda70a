"""Rollouts between training steps: the balancer is suspended while weights, gradients and optimizer state are freed,
keeps no memory meanwhile, and no bit of training changes. 2 ranks, a small Qwen3-MoE."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from examples import load_example
from ranks import run_ranks
from support import training
from support.seen import digests, said_by
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled
from torch import Tensor, nn

import eplb_runtime as eplb

STEPS, LONGER, CYCLES, SEEN = 3, 6, 9, (3, 6, 8)
KINDS: dict[str, dict[str, Any]] = {
    "between steps": {},
    "overlapped": {"overlap": True},
    "replicas": {"replica_slots": 1},
    "overlapped replicas": {"overlap": True, "replica_slots": 1},
}
WAYS = [("overlapped", "data"), ("replicas", "resize")]
SMALL = 64 << 10
"""Bytes of maps, counters and samples: far less than one expert tensor."""


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
    chosen = {"interval": 1, "gate": "always", "dense_gradients": "allreduce", **KINDS[kind], **options}
    if chosen["interval"] is not None:
        chosen["migration"] = eplb.MigrationConfig(lag=0)
    config = eplb.BalancerConfig(**chosen)
    balancer = eplb.attach(model, optimizer, config=config)
    if config.policy != "static":
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    return model, optimizer, balancer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    torch.manual_seed(100 * number + int(os.environ["RANK"]))
    tokens = torch.randint(0, 64, (4, 16))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(kind: str, by: str, each: int = 0, **options: Any) -> dict[str, Any]:
    """Losses, state, moves, and bytes that are held while all is freed; ``by`` empty: without phases.

    Args:
        each: steps between phases; 0: one, and three with overlap, as many as a migration takes.
    """
    each = each or (3 if "overlapped" in kind else 1)
    model, optimizer, balancer = attached(kind, **options)
    losses, freed = [], []
    for number in range(LONGER if "overlapped" in kind else STEPS):
        losses.append(step(model, optimizer, number))
        if by and number % each == each - 1:
            phases = Phases(model, optimizer, by)
            freed.append(balancer.suspend())
            phases.free()
            phases.load()
            balancer.resume()
    moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
    state = digests(eplb.logical_state_dict(model, optimizer))
    balancer.close()
    return {"losses": losses, "state": state, "moved": moved, "freed": freed}


def held_bytes(known: list[Tensor]) -> int:
    """Bytes of all tensors of this process but these."""
    gc.collect()
    of_all = storages([one for one in gc.get_objects() if isinstance(one, Tensor) and one.device.type == "cpu"])
    return sum(nbytes for key, nbytes in of_all.items() if key not in storages(known))


def cycles(kind: str) -> list[tuple[int, int, int]]:
    """Bytes held, threads and descriptors while suspended, in some cycles; a step and moves in some."""
    before = held_bytes([])
    model, optimizer, balancer = attached(kind)
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


def while_suspended() -> dict[str, Any]:
    """What calls say, and an export and an evaluation, which are right."""
    model, optimizer, balancer = attached("between steps")
    losses, found = [step(model, optimizer, 0)], {}
    tokens = torch.arange(16).reshape(1, 16)
    with torch.no_grad():
        before = model(input_ids=tokens).logits
    balancer.suspend()
    found["again"] = balancer.suspend()
    with torch.no_grad():
        found["evaluation"] = torch.equal(before, model(input_ids=tokens).logits)
    found["export"] = len(dict(balancer.named_logical_tensors()))
    found["declared"] = said_by(lambda: balancer.declare(torch.ones(2, 8)))
    for name, call in {
        "rebalance()": balancer.rebalance,
        "load_state_dict()": lambda: balancer.load_state_dict({}),
        "logical_order()": lambda: balancer.logical_order().__enter__(),
        "a forward in training": lambda: model(input_ids=tokens),
        "optimizer.step()": optimizer.step,
    }.items():
        found[name] = said_by(call)
    phases = Phases(model, optimizer, "resize")
    phases.free()
    found["export, freed"] = said_by(balancer.named_logical_tensors)
    found["resume, freed"] = said_by(balancer.resume)
    if os.environ["RANK"] == "1":
        phases.load()
    found["resume, freed on rank 0"] = said_by(balancer.resume)
    if os.environ["RANK"] == "0":
        phases.load()
    found["resume"] = said_by(balancer.resume)
    losses.append(step(model, optimizer, 1))
    found["losses"] = losses
    found["standing"] = [type(event).__name__ for event in balancer.events if "Suspen" in type(event).__name__]
    balancer.close()
    return found


def alone() -> dict[str, Any]:
    """What a rank hears that suspends, or resumes, alone; then training goes on."""
    model, optimizer, balancer = attached("overlapped", timeout_seconds=training.DEADLINE)
    found = {"losses": [step(model, optimizer, 0)]}
    first = os.environ["RANK"] == "0"
    found["suspend"] = said_by(balancer.suspend) if first else ""
    torch.distributed.barrier()
    found["losses"].append(step(model, optimizer, 1))
    balancer.suspend()
    found["resume"] = said_by(balancer.resume) if first else ""
    torch.distributed.barrier()
    balancer.resume()
    found["losses"].append(step(model, optimizer, 2))
    balancer.close()
    return found


def without_memory() -> dict[str, Any]:
    """What ranks hear if one has no memory at resume, and whether they move before and after it is there."""
    model, optimizer, balancer = attached("between steps", interval=None)
    step(model, optimizer, 0)
    moved = balancer.rebalance()
    balancer.suspend()
    transport, empty = balancer.rebalancer._engine.executor._transport, None
    if os.environ["RANK"] == "1":
        empty = transport.empty

        def fails(nbytes: int) -> Tensor:
            if nbytes:
                raise RuntimeError("out of memory")
            return empty(nbytes)

        transport.empty = fails
    balancer.resume()
    found: dict[str, Any] = {"moved": [moved], "said": []}
    for number in (1, 2):
        step(model, optimizer, number)
        found["moved"].append(balancer.rebalance())
        dropped = [event.cause for event in balancer.events if type(event).__name__ == "RebalanceAborted"]
        found["said"].append(dropped)
        if empty is not None:
            transport.empty = empty
    balancer.close()
    return found


def closed() -> dict[str, Any]:
    """What a suspension says after one rank has freed its weights, and whether an evaluation gives the same after a
    close while replicas have no memory."""
    model, optimizer, balancer = attached("replicas")
    step(model, optimizer, 0)
    tokens, phases = torch.arange(16).reshape(1, 16), Phases(model, optimizer, "data")
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        frees = os.environ["RANK"] == "1"
        if frees:
            phases.free()
        found = {"freed first": said_by(balancer.suspend)}
        if frees:
            phases.load()
        balancer.suspend()
        found["forward"] = said_by(lambda: model(input_ids=tokens))
        balancer.close()
        found["same"] = torch.equal(before, model(input_ids=tokens).logits)
    return {**found, "trains": said_by(lambda: step(model, optimizer, 1))}


def closed_while_freed() -> dict[str, Any]:
    """A close while weights have no memory, and what it takes to compute and train after it."""
    model, optimizer, balancer = attached("replicas")
    step(model, optimizer, 0)
    tokens, phases = torch.arange(16).reshape(1, 16), Phases(model, optimizer, "data")
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        balancer.suspend()
        phases.free()
        balancer.close()
        found = {"too early": said_by(balancer.resume)}
        phases.load()
        found["forward"] = said_by(lambda: model(input_ids=tokens))
        balancer.resume()
        found["same"] = torch.equal(before, model(input_ids=tokens).logits)
    found["again"] = said_by(balancer.resume)
    return {**found, "trains": said_by(lambda: step(model, optimizer, 1))}


def late() -> dict[str, Any]:
    """Weights are freed and loaded again after a rank has come too late to resume(); then state is left out once."""
    model, optimizer, balancer = attached("replicas", timeout_seconds=training.DEADLINE)
    step(model, optimizer, 0)
    tokens, phases = torch.arange(16).reshape(1, 16), Phases(model, optimizer, "resize")
    with torch.no_grad():
        before = model(input_ids=tokens).logits
    balancer.suspend()
    found = {"resume": said_by(balancer.resume) if os.environ["RANK"] == "0" else ""}
    torch.distributed.barrier()
    phases.free()
    found["held"] = held_bytes(phases.own())
    phases.load()
    state = {parameter: optimizer.state.pop(parameter) for parameter in list(optimizer.state)}
    found["without state"] = said_by(balancer.resume)
    optimizer.state.update(state)
    found["with state"] = said_by(balancer.resume)
    with torch.no_grad():
        found["same"] = torch.equal(before, model(input_ids=tokens).logits)
    step(model, optimizer, 1)
    balancer.close()
    return found


def runs(rank: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {kind: trained(kind, "", policy="static") for kind in ("between steps", "overlapped")}
    for kind, by in [*WAYS, ("replicas", "")]:
        found[kind, by] = trained(kind, by)
    return {**found, "each step": trained("overlapped", "data", each=1)}


def calls(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"cycles": cycles("overlapped replicas"), "suspended": while_suspended()}
    found["closed while freed"] = closed_while_freed()
    return {**found, "alone": alone(), "closed": closed(), "late": late(), "without memory": without_memory()}


@pytest.fixture(scope="module")
def trainings() -> list[dict[Any, Any]]:
    return run_ranks(2, runs)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, calls)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one["state"].keys() == other["state"].keys()
    return [key for key, digest in one["state"].items() if digest != other["state"][key]]


@pytest.mark.parametrize("way", WAYS, ids=" by ".join)
def test_phases_between_all_steps_change_no_bit(trainings: list[dict[Any, Any]], way: tuple[str, str]) -> None:
    for found in trainings:
        phases, wanted = found[way], found[("replicas", "") if way[0] == "replicas" else way[0]]
        assert phases["losses"] == wanted["losses"] and differing(phases, wanted) == []
        assert phases["moved"] > 0 and min(phases["freed"]) > SMALL


def test_a_migration_beside_training_is_brought_to_its_end_by_a_suspension(trainings: list[dict[Any, Any]]) -> None:
    for found in trainings:
        phases, wanted = found["each step"], found["overlapped"]
        assert phases["moved"] > 0
        assert phases["losses"] == wanted["losses"] and differing(phases, wanted) == []


def test_nothing_is_held_while_suspended_nor_grows_over_cycles(results: list[dict[str, Any]]) -> None:
    for found in results:
        nbytes, threads, descriptors = zip(*found["cycles"], strict=True)
        print(nbytes, threads, descriptors)
        assert max(nbytes) < SMALL and nbytes[-1] <= nbytes[1]
        assert threads[-1] <= threads[0] and descriptors[-1] <= descriptors[0]


def test_calls_that_cannot_work_while_suspended_say_so(results: list[dict[str, Any]]) -> None:
    for found in results:
        for call in (
            "rebalance()",
            "load_state_dict()",
            "logical_order()",
            "a forward in training",
            "optimizer.step()",
        ):
            said = found["suspended"][call]
            assert said.startswith(f"{call} while the balancer is suspended: ") and "\n" not in said
            assert "balancer.resume()" in said


def test_what_moves_nothing_works_while_suspended(results: list[dict[str, Any]]) -> None:
    for found in results:
        suspended = found["suspended"]
        assert suspended["evaluation"] and suspended["export"] > 0 and suspended["declared"] == ""
        assert suspended["again"] == 0
        assert suspended["losses"] == found["alone"]["losses"][:2]
        assert suspended["standing"] == ["Suspended", "SuspensionEnded"]


def test_a_rank_without_weights_keeps_all_suspended_until_they_are_loaded(results: list[dict[str, Any]]) -> None:
    for found in results:
        suspended = found["suspended"]
        for call in ("export, freed", "resume, freed", "resume, freed on rank 0"):
            assert "memory is freed" in suspended[call] and "\n" not in suspended[call], call
        assert "rank 0" in suspended["resume, freed on rank 0"]
        assert suspended["resume"] == ""


def test_homes_are_where_they_were_after_a_close_while_suspended(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert "balancer.resume()" in found["closed"]["forward"] and found["closed"]["same"]
        assert found["closed"]["trains"] == ""


def test_a_model_closed_while_its_weights_are_freed_computes_after_resume(results: list[dict[str, Any]]) -> None:
    for found in results:
        closed = found["closed while freed"]
        assert "memory is freed" in closed["too early"] and "balancer.resume() first" in closed["forward"]
        assert closed["same"] and closed["trains"] == ""
        assert "resume() after close()" in closed["again"]


def test_a_resume_that_a_rank_missed_leaves_all_of_it_suspended(results: list[dict[str, Any]]) -> None:
    assert f"rank 1 did not come to resume() within {training.DEADLINE:g} s" in results[0]["late"]["resume"]
    for found in results:
        assert found["late"]["held"] < 64 << 10
        assert found["late"]["with state"] == "" and found["late"]["same"]


def test_state_that_is_not_loaded_yet_is_named(results: list[dict[str, Any]]) -> None:
    """Put back after homes have moved it would be that of other experts."""
    for found in results:
        said = found["late"]["without state"]
        assert "is not in the optimizer's state any more: load it first" in said and "\n" not in said


def test_weights_that_replicas_lie_behind_are_freed_after_the_suspension_alone(results: list[dict[str, Any]]) -> None:
    for found in results:
        said = found["closed"]["freed first"]
        assert "rank 1" in said and "memory is freed" in said and "after suspend() alone" in said and "\n" not in said


def test_a_rank_that_suspends_or_resumes_alone_hears_of_it(
    results: list[dict[str, Any]], trainings: list[dict[Any, Any]]
) -> None:
    for call in ("suspend", "resume"):
        assert f"rank 1 did not come to {call}() within {training.DEADLINE:g} s" in results[0]["alone"][call]
    for found, right in zip(results, trainings, strict=True):
        assert found["alone"]["losses"] == right["between steps"]["losses"]


def test_a_rank_that_gets_no_memory_keeps_all_from_moving_until_it_does(results: list[dict[str, Any]]) -> None:
    for found in results:
        before, without, after = found["without memory"]["moved"]
        assert before and not without and after
        at_resume, at_rebalance = found["without memory"]["said"][0]
        for line in (at_resume, at_rebalance):
            assert "rank 1" in line and "out of memory" in line and "\n" not in line
        assert "no rank rebalances until" in at_resume
        assert len(found["without memory"]["said"][1]) == 2
