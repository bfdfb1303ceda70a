"""Without an interval, decisions come from rebalance() alone: rollouts and training in turn, saved and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from examples import load_example
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import heard, same

import eplb_runtime as eplb
from eplb_runtime.cli import main
from eplb_runtime.events import LoadMeasured, RebalanceAborted, RebalanceCommitted, RebalancePlanned
from eplb_runtime.load.series import read_series

RANKS, LAYERS, EXPERTS, ROUNDS = 2, 2, 8, 4
STEPS = (1, 3, 2, 2)
"""Training steps of each round."""


class Loop:
    """A rollout declares what its tokens chose, experts move, and some steps train; again."""

    def __init__(self, rank: int, first_batch: int = 0, **settings: Any) -> None:
        self.rank, self.batches = rank, first_batch
        self.model = make_model("olmoe", experts=EXPERTS, layers=LAYERS)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        flat = {"interval": None, "gate": "always", "dense_gradients": "allreduce", **settings}
        self.balancer = eplb.attach(self.model, self.optimizer, config=config_from_settings(flat))
        self.model.train()
        self.losses: list[float] = []

    def replayed(self, number: int) -> list[torch.Tensor]:
        """For two micro-batches int64 ``[N, L, K]``: most tokens choose experts of one rank; the last are padding."""
        generator = torch.Generator().manual_seed(10 * number + self.rank)
        heavy = EXPERTS // 2 * (number % 2)
        found = []
        for tokens in (24, 40):
            scores = torch.rand(tokens, LAYERS, EXPERTS, generator=generator)
            scores[:, :, heavy : heavy + 2] += 0.6
            ids = scores.topk(2, dim=-1).indices
            ids[-4:] = -1
            found.append(ids)
        return found

    def round(self, number: int) -> None:
        if self.balancer.config.policy != "static":
            self.balancer.declare(self.replayed(number))
            self.balancer.rebalance()
        self.train(STEPS[number])

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.losses.append(training.step(self.model, self.optimizer, batch_of(self.rank, self.batches)))
            self.batches += 1

    def events(self, kind: type) -> list[Any]:
        return [event for event in self.balancer.events if isinstance(event, kind)]

    def seen(self) -> dict[str, Any]:
        planned = self.events(RebalancePlanned)
        found = {
            "losses": [loss.hex() for loss in self.losses],
            "state": eplb.logical_state_dict(self.model),
            "moved": sum(event.moved_experts for event in self.events(RebalanceCommitted)),
            "planned": [event.step for event in planned],
            "horizon": [event.horizon_steps for event in planned],
            "measured": [event.steps for event in self.events(LoadMeasured)],
            "dropped": self.events(RebalanceAborted),
            "digest": self.balancer.placement.digest(),
            "table": str(self.balancer),
        }
        self.balancer.close()
        return found


def in_turn(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with heard() as warnings:
        for name, first, policy in (("static", 0, "static"), ("moving", 0, "incremental"), ("control", 9, "static")):
            loop = Loop(rank, first, policy=policy)
            for number in range(ROUNDS):
                loop.round(number)
            found[name] = loop.seen()
    return {**found, "warnings": warnings}


def test_rollouts_and_training_in_turn_decide_when_asked_and_change_no_bit() -> None:
    for seen in run_ranks(RANKS, in_turn):
        static, moving, control = seen["static"], seen["moving"], seen["control"]
        assert moving["losses"] == static["losses"] and same(moving["state"], static["state"])
        assert static["losses"] != control["losses"] and not same(static["state"], control["state"])
        assert moving["moved"] > 0 == static["moved"]
        assert moving["planned"] == [0, 1, 4, 6], "one decision for each call, and no other"
        assert moving["horizon"] == [1, 1, 3, 2], "before the first step 1, then the last gap"
        assert moving["measured"] == [1, 3, 2] and not static["planned"] and not static["measured"]
        assert "decisions by rebalance() alone" in moving["table"]
        assert not moving["dropped"] and not seen["warnings"]


def begun_by_a_forward(loop: Loop) -> list[bool]:
    """Whether a step's clock begins with a forward without gradients, and with one with them."""
    ids, clock, found = batch_of(loop.rank, 0), loop.balancer.rebalancer.clock, []
    for with_gradients in (False, True):
        with torch.set_grad_enabled(with_gradients):
            loop.model(input_ids=ids)
        found.append(clock._has_begun)
    return found


def forecast_alone(rank: int, run: str) -> dict[str, Any]:
    loop = Loop(rank, window=2, run=run)
    for steps in (2, 40, 3):
        loop.train(steps)
        loop.balancer.rebalance()
    loop.balancer.rebalance()  # without a step between: nothing was counted
    history = loop.balancer.rebalancer.decisions.history
    periodic = Loop(rank, interval=50)
    begun = [begun_by_a_forward(one) for one in (loop, periodic)]
    periodic.balancer.close()
    return {**loop.seen(), "tokens": [int(row.sum()) for row in history], "begun": begun}


def test_a_window_is_what_lies_between_two_calls_however_long(tmp_path: Path) -> None:
    tokens = sum(batch_of(rank, 0).numel() for rank in range(RANKS)) * 2 * LAYERS
    for seen in run_ranks(RANKS, forecast_alone, str(tmp_path)):
        assert seen["tokens"] == [40 * tokens, 3 * tokens], "window=2 counts decisions"
        assert seen["measured"] == seen["horizon"] == [2, 40, 3]
        assert [event.cause for event in seen["dropped"]] == ["no token was counted in the last 0 steps"]
        assert seen["begun"] == [[False, True], [False, False]], "the clock of periodic decisions runs on"
    load, steps, _ = read_series(tmp_path)
    assert load.sum(axis=(1, 2)).tolist() == [2 * tokens, 40 * tokens, 3 * tokens] and steps == [2, 40, 3]
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["assess", str(tmp_path)]) == 0


def save_and_resume(rank: int) -> dict[str, Any]:
    whole = Loop(rank)
    for number in range(ROUNDS):
        whole.round(number)
        if number == 1:
            saved = json.loads(json.dumps(whole.balancer.state_dict()))
            tensors = eplb.logical_state_dict(whole.model, whole.optimizer)
            batches = whole.batches
    whole.balancer.rebalance()
    found = {"whole": whole.seen()}
    resumed = Loop(rank, batches)
    resumed.balancer.load_state_dict(saved)
    eplb.load_logical_state_dict(resumed.model, resumed.optimizer, tensors)
    for number in range(2, ROUNDS):
        resumed.round(number)
    resumed.balancer.rebalance()
    found["resumed"] = resumed.seen()
    other = Loop(rank, interval=50)
    other.balancer.load_state_dict(saved)  # counted otherwise: forecasts start from scratch there
    found["elsewhere"] = len(other.balancer.rebalancer.decisions.history)
    other.balancer.close()
    return {**found, "saved": saved["load"]}


def test_a_resumed_job_goes_on_with_the_load_and_the_gap_that_were_saved() -> None:
    for seen in run_ranks(RANKS, save_and_resume):
        whole, resumed = seen["whole"], seen["resumed"]
        assert (seen["saved"]["steps_per_bucket"], seen["saved"]["open_steps"]) == (0, 3)
        assert resumed["planned"] == whole["planned"][2:] == [4, 6, 8]
        assert resumed["horizon"] == whole["horizon"][2:] == [3, 2, 2]
        assert resumed["measured"] == whole["measured"][1:] == [3, 2, 2]
        assert resumed["digest"] == whole["digest"] and resumed["losses"] == whole["losses"][4:]
        assert same(resumed["state"], whole["state"])
        assert seen["elsewhere"] == 0


# -- Generating and training in turn on one model: the rollout's routing is declared, and moving changes no bit


GENERATED = 4


def both(rank: int) -> list[tuple]:
    """Losses, logical state, experts moved: first with fixed experts, then moved by what is declared."""
    found = []
    for policy in ("static", "incremental"):
        config = eplb.BalancerConfig(policy=policy, interval=None, gate="always", dense_gradients="allreduce")
        losses, balancer, model = load_example("rollouts").train(config, GENERATED, rank)
        moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
        found.append((losses, eplb.logical_state_dict(model), moved))
        balancer.close()
    return found


def test_rollouts_plan_the_experts_and_change_no_bit() -> None:
    for static, moving in run_ranks(2, both):
        assert static[2] == 0 < moving[2]
        assert moving[0] == static[0]
        assert moving[1].keys() == static[1].keys()
        assert all(torch.equal(moving[1][name], tensor) for name, tensor in static[1].items())
