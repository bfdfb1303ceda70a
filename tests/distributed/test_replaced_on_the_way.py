"""What else happens to a process while experts are on their way: what belongs to them is replaced between two steps, a
forward breaks off, a child is forked that ends by itself, a signal's handler closes the balancer."""

import atexit
import os
import signal
import threading
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.beside import Run
from support.moe_models import batch_of
from support.ranks import run_ranks

from eplb_runtime.events import BalancingPaused, RebalanceCommitted

pytestmark = pytest.mark.long


def until_here(job: Run) -> None:
    """Train until experts of some layers have arrived, and let their forwards wait for the vote."""
    job.until(RebalanceCommitted)
    job.until_sent()
    for flight in job.flights:
        flight.patience = 10.0
    job.wait_for_all(lambda flight: flight.posted is not None and flight.posted.after is not None)


def replaced(rank: int) -> tuple[bool, bool]:
    job = Run(rank, overlap=True)
    until_here(job)
    job.optimizer.load_state_dict(deepcopy(job.optimizer.state_dict()))  # other tensors, with the same numbers
    job.until(RebalanceCommitted)
    return job.balancer.rebalancer._overlaps, job.equals(job.still())


def test_an_optimizers_state_that_is_loaded_while_experts_are_on_their_way() -> None:
    assert run_ranks(2, replaced) == [(False, True)] * 2


class MakesItsStateAnew(torch.optim.AdamW):
    """As optimizers do that compute ``state = beta * state + ...``."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["exp_avg"] = state["exp_avg"].clone()
        return loss


def made_anew(rank: int) -> tuple[int, bool]:
    job = Run(rank, overlap=True, optimizer=MakesItsStateAnew)
    for _ in range(2):
        job.until(RebalanceCommitted)
    return len(job.causes()), job.equals(job.still())


def test_an_optimizer_that_makes_its_state_anew_in_each_step_is_balanced_between_steps() -> None:
    assert run_ranks(2, made_anew) == [(0, True)] * 2


class TooMuch(Exception):
    """What a forward may break off with."""


def broken_off(rank: int) -> bool:
    """A forward ends before it came to a layer whose experts are here; then somebody writes them."""
    job = Run(rank, overlap=True)
    until_here(job)
    layer, still = job.flights[-1].layer, job.still()

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
        each.train(2)
    return job.equals(still)


def test_experts_that_are_written_after_a_forward_which_broke_off() -> None:
    assert run_ranks(2, broken_off) == [True, True]


def forked(rank: int) -> tuple[int, int]:
    """The exit status of a child that ends by sys.exit(), and how often its parent lost connections."""
    job = Run(rank, overlap=True, timeout_seconds=5.0)
    job.until(RebalanceCommitted)
    job.until_sent()
    child = os.fork()
    if not child:
        signal.alarm(20)
        job.balancer.close()
        atexit._run_exitfuncs()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    for _ in range(2):
        job.until(RebalanceCommitted)
    job.balancer.close()
    return status, len(job.balancer.events.of_type(BalancingPaused))


def test_a_forked_child_leaves_the_connections_of_its_parent_alone() -> None:
    assert run_ranks(2, forked) == [(0, 0)] * 2


def closed_by_a_handler(rank: int, together: bool) -> bool:
    """SIGTERM comes while a forward waits for its experts; the handler closes the balancer."""
    job = Run(rank, overlap=True, timeout_seconds=5.0)
    job.until(RebalanceCommitted)
    signal.signal(signal.SIGTERM, lambda *_: job.balancer.close())
    resolve = job.background._resolve

    def interrupted(*args: Any) -> None:
        job.background._resolve = resolve
        os.kill(os.getpid(), signal.SIGTERM)
        resolve(*args)

    job.until_sent()
    job.background._resolve = interrupted if rank or together else resolve
    threading.Timer(60.0, os._exit, [1]).start()  # in vain for ever, otherwise
    job.train(2)
    os.kill(os.getpid(), signal.SIGTERM)  # on one rank again
    job.train(2)
    still = job.still()
    still.balancer.close()
    return job.balancer.closed and job.losses == still.losses


@pytest.mark.parametrize("together", [True, False])
def test_a_signals_handler_may_close_the_balancer_while_a_forward_waits_for_experts(together: bool) -> None:
    assert run_ranks(2, closed_by_a_handler, together) == [True, True]
