"""What else happens to a process while experts are on their way: what belongs to them is replaced or more of it
registered between two steps, a forward breaks off, a child is forked that ends by itself, a signal's handler closes the
balancer."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from copy import deepcopy
from typing import Any

import pytest
import torch
from beside import Job
from moe_models import batch_of
from ranks import run_ranks
from support.seen import same

from eplb_runtime.events import BalancingPaused, RebalanceAborted, RebalanceCommitted
from eplb_runtime.moe.experts.registry import RegistryError


def until_here(job: Job) -> None:
    """Train until experts of some layers have arrived, and let their forwards wait for the vote."""
    job.until_sent()
    for flight in job.background._flights:
        flight.patience = 10.0
        while flight.posted is None or flight.posted.after is None:
            time.sleep(0.001)


def replaced(rank: int) -> dict[str, Any]:
    job, still = Job(rank, overlap=True), Job(rank, overlap=False)
    job.until(RebalanceCommitted)
    until_here(job)
    job.optimizer.load_state_dict(deepcopy(job.optimizer.state_dict()))  # other tensors, with the same numbers
    before = len(job.balancer.events.of_type(RebalanceAborted))
    job.step()
    job.step()
    causes = [event.cause for event in job.balancer.events.of_type(RebalanceAborted)[before:]]
    job.until(RebalanceCommitted)
    while still.steps < job.steps:
        still.step()
    said = {"causes": causes, "same": job.losses == still.losses and same(job.state(), still.state())}
    for each in (job, still):
        each.balancer.close()
    return said


def registered(rank: int) -> dict[str, Any]:
    """Every expert is given its own number while it is on its way: does it keep it?"""
    job = Job(rank, overlap=True)
    job.until(RebalanceCommitted)
    until_here(job)
    names, balancer = job.balancer.layer_of_parameter, job.balancer
    numbers = {}
    for name, layer in names.items():
        numbers[name] = torch.tensor(balancer.logical_expert_ids(layer), dtype=torch.int16)
        balancer.register(name, "number", numbers[name])

    def kept() -> bool:
        return all(numbers[name].tolist() == balancer.logical_expert_ids(layer) for name, layer in names.items())

    job.step()
    said = {"at once": kept()}
    job.until(RebalanceCommitted)
    said["later"] = kept()
    name = next(iter(names))
    with torch.inference_mode():
        made_for_inference = torch.zeros(3, 2)
    for tensor, why in ((made_for_inference, "inference_mode"), (torch.zeros(3, 1).expand(3, 2), "share memory")):
        with pytest.raises(RegistryError, match=why):
            balancer.register(name, "cannot be written", tensor)
    said["moved"] = job.until(RebalanceCommitted).moved_experts
    balancer.close()
    return said


class MakesItsStateAnew(torch.optim.AdamW):
    """As optimizers do that compute ``state = beta * state + ...``."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        return loss


def made_anew(rank: int) -> dict[str, Any]:
    job = Job(rank, overlap=True, optimizer=MakesItsStateAnew)
    still = Job(rank, overlap=False, optimizer=MakesItsStateAnew)
    said: dict[str, Any] = {"moved": job.until(RebalanceCommitted).moved_experts}
    job.until(RebalanceCommitted)
    said["dropped"] = len(job.balancer.events.of_type(RebalanceAborted))
    while still.steps < job.steps:
        still.step()
    said["same"] = job.losses == still.losses and same(job.state(), still.state())
    for each in (job, still):
        each.balancer.close()
    return said


class TooMuch(Exception):
    """What a forward may break off with."""


def broken_off(rank: int) -> bool:
    """A forward ends before it came to a layer whose experts are here; then somebody writes them."""
    job, still = Job(rank, overlap=True), Job(rank, overlap=False)
    job.until(RebalanceCommitted)
    until_here(job)
    layer = job.background._flights[-1].layer
    while still.steps < job.steps:
        still.step()

    def too_much(*_: Any) -> None:
        raise TooMuch

    for each in (job, still):
        handle = each.model.model.layers[layer].register_forward_pre_hook(too_much)
        with pytest.raises(TooMuch), torch.no_grad():
            each.model(input_ids=batch_of(rank, 0))
        handle.remove()
        with torch.no_grad():
            for name in each.balancer.layer_of_parameter:
                each.model.get_parameter(name).mul_(0.97)
        each.step()
        each.step()
    same_bits = job.losses == still.losses and same(job.state(), still.state())
    for each in (job, still):
        each.balancer.close()
    return same_bits


def forked(rank: int) -> dict[str, Any]:
    job = Job(rank, overlap=True, timeout_seconds=5.0)
    job.until(RebalanceCommitted)
    job.until_sent()
    child = os.fork()
    if not child:  # as a script's helper that calls sys.exit()
        signal.alarm(20)
        job.balancer.close()
        atexit._run_exitfuncs()
        os._exit(0)
    said = {"child": os.waitpid(child, 0)[1]}
    for _ in range(2):
        job.until(RebalanceCommitted)
    said["paused"] = len(job.balancer.events.of_type(BalancingPaused))
    job.balancer.close()
    return said


def closed_by_a_handler(rank: int) -> bool:
    """SIGTERM comes while a forward waits for its experts; the handler closes the balancer, as a scheduler's notice is
    often answered."""
    job = Job(rank, overlap=True, timeout_seconds=5.0)
    job.until(RebalanceCommitted)
    signal.signal(signal.SIGTERM, lambda *_: job.balancer.close())
    resolve = job.background._resolve

    def interrupted(*args: Any) -> None:
        job.background._resolve = resolve
        os.kill(os.getpid(), signal.SIGTERM)
        resolve(*args)

    job.until_sent()
    job.background._resolve = interrupted
    threading.Timer(60.0, os._exit, [1]).start()  # in vain for ever, otherwise
    while not job.balancer.closed:
        job.step()
    still = Job(rank, overlap=False)
    while still.steps < job.steps:
        still.step()
    same_losses = job.losses == still.losses
    still.balancer.close()
    return same_losses


def test_an_optimizers_state_that_is_loaded_while_experts_are_on_their_way() -> None:
    for said in run_ranks(2, replaced):
        assert said["same"]
        assert any("is not what it was" in cause for cause in said["causes"])


def test_an_optimizer_that_makes_its_state_anew_in_each_step_is_balanced_between_steps() -> None:
    for said in run_ranks(2, made_anew):
        assert said["same"] and said["moved"] > 0
        assert said["dropped"] == 1, "the first time it could have been a state that was loaded"


def test_experts_that_are_written_after_a_forward_which_broke_off() -> None:
    assert run_ranks(2, broken_off) == [True, True]


def test_a_forked_child_leaves_the_connections_of_its_parent_alone() -> None:
    for said in run_ranks(2, forked):
        assert said == {"child": 0, "paused": 0}


def test_a_signals_handler_may_close_the_balancer_while_a_forward_waits_for_experts() -> None:
    assert run_ranks(2, closed_by_a_handler) == [True, True]
