"""A job takes optimizer state out of its optimizer between steps, and puts it back later. Experts that moved meanwhile
would get the state of others then, so they stay where they are, and a line says why. 2 ranks, a small Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from support.seen import heard
from test_rollout_phases import attached, step

import eplb_runtime as eplb

STEPS, KEYS = 4, ("exp_avg", "exp_avg_sq")


def popped(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Take two tensors of each parameter out; what is returned puts copies back."""
    taken = [(state, {key: state.pop(key).clone() for key in KEYS}) for state in optimizer.state.values()]
    return lambda: [state.update(own) for state, own in taken] and None


def cleared(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """As `popped`; nothing of any parameter stays."""
    taken = dict(optimizer.state)
    optimizer.state.clear()
    return lambda: optimizer.state.update(taken)


WAYS: dict[str, Callable[[torch.optim.Optimizer], Callable[[], None]]] = {"popped": popped, "cleared": cleared}


def trained(kind: str, take: Callable[..., Callable[[], None]] | None, **options: Any) -> dict[str, Any]:
    """Between any two steps state is taken out, experts may move, and it is put back; ``take`` None: it stays."""
    with heard() as lines:
        return {**trained_so(kind, take, **options), "lines": lines}


def trained_so(kind: str, take: Callable[..., Callable[[], None]] | None, **options: Any) -> dict[str, Any]:
    model, optimizer, balancer = attached(kind, guard="off", **options)
    losses = []
    for number in range(STEPS):
        losses.append(step(model, optimizer, number))
        back = take(optimizer) if take is not None else lambda: None
        if kind == "overlapped":
            balancer.suspend()
        elif options.get("policy") != "static":
            balancer.rebalance()
        back()
        if kind == "overlapped":
            balancer.resume()
    state, epoch = eplb.logical_state_dict(model, optimizer), balancer.placement.epoch
    if take is not None and kind != "overlapped":  # it is there again
        step(model, optimizer, STEPS)
        balancer.rebalance()
    found = {"losses": losses, "state": state, "epoch": epoch, "later": balancer.placement.epoch}
    balancer.close()
    return found


def everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"static": trained("between steps", None, policy="static")}
    found["stays"] = trained("between steps", None, interval=None)
    found["suspended"] = trained("overlapped", popped)
    for name, take in WAYS.items():
        found[name] = trained("between steps", take, interval=None)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one["state"].keys() == other["state"].keys()
    equal = all(torch.equal(tensor, other["state"][key]) for key, tensor in one["state"].items())
    return equal and one["losses"] == other["losses"]


@pytest.mark.parametrize("way", ["suspended", *WAYS])
def test_experts_stay_while_their_state_is_elsewhere(results: list[dict[str, Any]], way: str) -> None:
    for found in results:
        assert same(found[way], found["static"]) and found[way]["epoch"] == 0
        line = found[way]["lines"][0]
        assert "is not in the optimizer's state any more: load it before experts move" in line and "\n" not in line
        assert way == "suspended" or found[way]["later"] == 1, "they move once it is there again"


def test_experts_move_while_their_state_is_there(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["stays"]["epoch"] == STEPS and same(found["stays"], found["static"])
