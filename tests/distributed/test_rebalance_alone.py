"""Without an interval, decisions come from rebalance() alone: rollouts and training in turn, saved and resumed. A
decision may be begun ahead of it and made beside what the job does: a rollout, in which all memory is freed, or a
training step."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job, Run
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import heard, said_by, same
from support.shuffle import plan_by, wait_until_compiled
from test_rollout_phases import Phases

import eplb_runtime as eplb
from eplb_runtime.events import LoadMeasured, RebalanceAborted, RebalanceCommitted, RebalancePlanned
from eplb_runtime.load.series import read_series

pytestmark = pytest.mark.long

RANKS, LAYERS, EXPERTS = 2, 2, 8
STEPS = (1, 3, 2, 2)
"""Training steps of each round."""


class Loop(Run):
    """A rollout declares what its tokens chose, experts move, and some steps train; again."""

    def __init__(self, rank: int, first_batch: int = 0, **settings: Any) -> None:
        super().__init__(rank, Job(planner=eplb.plan, settings={"interval": None, "lag": 1, **settings}))
        self.history, self.steps = self.attach().balancer.rebalancer.decisions.history, first_batch

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

    def seen(self) -> dict[str, Any]:
        of_type = self.balancer.events.of_type
        found = {
            "losses": [loss.hex() for loss in self.losses],
            "state": eplb.logical_state_dict(self.model),
            "moved": sum(event.moved_experts for event in of_type(RebalanceCommitted)),
            "planned": [event.step for event in of_type(RebalancePlanned)],
            "horizon": [event.horizon_steps for event in of_type(RebalancePlanned)],
            "measured": [event.steps for event in of_type(LoadMeasured)],
            "dropped": [event.cause for event in of_type(RebalanceAborted)],
            "history": [row.tolist() for row in self.history],
            "digest": self.balancer.placement.digest(),
            "table": str(self.balancer),
        }
        self.balancer.close()
        return found


GAPS = [2, 12, 3]


def forecast_alone(rank: int, run: str) -> dict[str, Any]:
    loop = Loop(rank, window=2, run=run)
    for steps in GAPS:
        loop.train(steps)
        loop.balancer.rebalance()
    loop.balancer.rebalance()  # without a step between: nothing was counted
    return {**loop.seen(), "tokens": [int(row.sum()) for row in loop.history]}


def test_a_window_is_what_lies_between_two_calls_however_long(tmp_path: Path) -> None:
    tokens = sum(batch_of(rank, 0).numel() for rank in range(RANKS)) * 2 * LAYERS
    for seen in run_ranks(RANKS, forecast_alone, str(tmp_path)):
        assert seen["tokens"] == [steps * tokens for steps in GAPS[1:]], "window=2 counts decisions"
        assert seen["measured"] == seen["horizon"] == GAPS
        assert seen["dropped"] == ["no token was counted in the last 0 steps"]
    load, steps, _ = read_series(tmp_path)
    assert load.sum(axis=(1, 2)).tolist() == [gap * tokens for gap in GAPS] and steps == GAPS


def save_and_resume(rank: int) -> dict[str, Any]:
    """A job that declares in rounds, and one that decides every four steps; each is saved with steps untaken."""
    found: dict[str, Any] = {}
    with heard() as found["warnings"]:
        for name, settings in (("rounds", {}), ("interval", {"interval": 4, "lag": 1, "policy": "static"})):
            whole = Loop(rank, **settings)
            whole.round(0)
            whole.round(1)
            whole.train(2 if settings else 0)
            saved = json.loads(json.dumps(whole.balancer.state_dict()))
            tensors = eplb.logical_state_dict(whole.model, whole.optimizer)
            resumed = Loop(rank, whole.steps, **settings)
            resumed.balancer.load_state_dict(saved)
            eplb.load_logical_state_dict(resumed.model, resumed.optimizer, tensors)
            for loop in (whole, resumed):
                loop.round(2)
                loop.round(3)
                loop.balancer.rebalance()
            found[name] = whole.seen(), resumed.seen(), saved["load"]
    other = Loop(rank)
    other.balancer.load_state_dict(saved)  # counted otherwise: forecasts start from scratch there
    found["elsewhere"] = len(other.history)
    other.balancer.close()
    return found


def test_each_call_decides_and_a_resumed_job_goes_on_with_the_load_and_the_gap_that_were_saved() -> None:
    for seen in run_ranks(RANKS, save_and_resume):
        for whole, resumed, _ in (seen["rounds"], seen["interval"]):
            after = len(resumed["losses"])
            assert resumed["losses"] == whole["losses"][-after:] and same(resumed["state"], whole["state"])
            assert resumed["history"] == whole["history"] and resumed["digest"] == whole["digest"]
        whole, resumed, load = seen["rounds"]
        assert (load["steps_per_bucket"], load["open_steps"]) == (0, 3)
        assert whole["planned"] == [0, 1, 4, 6, 8], "one decision for each call, and no other"
        assert whole["horizon"] == [1, 1, 3, 2, 2], "before the first step 1, then the last gap"
        assert whole["measured"] == [1, 3, 2, 2]
        for what, before in {"planned": 2, "horizon": 2, "measured": 1}.items():
            assert resumed[what] == whole[what][before:]
        assert "decisions by rebalance() alone" in whole["table"]
        assert whole["moved"] > 0 and not whole["dropped"] and not seen["warnings"]
        assert len(seen["interval"][0]["history"]) > 4 and seen["elsewhere"] == 0


# -- A decision that is begun ahead of rebalance() ---------------------------------------------------------------------


ROUNDS = 3


def watched(loop: Loop) -> tuple[threading.Event, list[int]]:
    """The planner of rank 0 waits for the event that is returned first; bytes of an expert in each decision."""
    go_on, decisions = threading.Event(), loop.balancer.rebalancer.decisions
    planner, add_up, nbytes = decisions.planner, decisions.add_up, []

    def plans(*arguments: Any, **options: Any) -> eplb.Plan:
        assert go_on.wait(60)
        return planner(*arguments, **options)

    def adds_up(measurement: Any, *arguments: Any) -> Any:
        nbytes.append(measurement.home_bytes)
        return add_up(measurement, *arguments)

    decisions.planner, decisions.add_up = plans, adds_up  # type: ignore[method-assign]
    return go_on, nbytes


def rounds(rank: int, ahead: bool) -> dict[str, Any]:
    loop = Loop(rank)
    balancer, digests = loop.balancer, []
    wait_until_compiled(balancer)
    go_on, nbytes = watched(loop)
    for number in range(ROUNDS):
        balancer.suspend()
        phases = Phases(loop.model, loop.optimizer, "data") if number else None  # there is no state before a step
        if phases is not None:
            phases.free()
        balancer.declare(loop.replayed(number))
        go_on.clear()
        before = balancer.placement.digest()
        if ahead:
            balancer.plan_ahead()
        assert balancer.placement.digest() == before
        go_on.set()
        if phases is not None:
            phases.load()
        balancer.resume()
        balancer.rebalance()
        digests.append(balancer.placement.digest())
        loop.train(2)
    return {"digests": digests, "bytes": nbytes, **loop.seen()}


def fails(*arguments: Any, **options: Any) -> eplb.Plan:
    raise ValueError("no plan")


def beside_a_step(rank: int) -> dict[str, Any]:
    """Decisions beside a step, across an export in logical order, and dropped by a planner that fails."""
    loop = Loop(rank, timeout_seconds=20)
    balancer, found = loop.balancer, {}
    wait_until_compiled(balancer)

    def begin(number: int) -> None:
        balancer.declare(loop.replayed(number))
        balancer.plan_ahead()

    loop.train(1)
    begin(0)
    found["again"] = said_by(balancer.plan_ahead)
    found["declare"] = said_by(lambda: balancer.declare(loop.replayed(1)))
    before = balancer.placement.digest()
    loop.train(2)
    found["no boundary moves"] = balancer.placement.digest() == before
    found["moves"] = [balancer.rebalance()]
    begin(1)
    with balancer.logical_order():
        found["inside"] = said_by(balancer.plan_ahead)
    found["moves"].append(balancer.rebalance())
    planner = balancer.rebalancer.decisions.planner
    plan_by(balancer, fails)
    begin(0)
    found["moves"].append(balancer.rebalance())
    plan_by(balancer, planner)
    balancer.declare(loop.replayed(0))
    found["moves"].append(balancer.rebalance())
    loop.train(1)
    begin(1)
    balancer.load_state_dict(balancer.state_dict())
    declared = balancer.rebalancer.declared
    found["declared still"] = declared is not None and len(declared) == len(loop.replayed(1))
    balancer.plan_ahead()
    balancer.close()  # with a decision in flight
    found["closed"] = said_by(balancer.plan_ahead)
    return found


def all_ahead(rank: int) -> dict[str, Any]:
    static = Loop(rank, policy="static")
    static.train(2 * ROUNDS)
    ahead = {"static": static.seen(), "ahead": rounds(rank, True), "at once": rounds(rank, False)}
    return {**ahead, "beside": beside_a_step(rank)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(RANKS, all_ahead)


def test_what_is_planned_during_a_rollout_is_what_rebalance_would_have_planned(results: list[dict[str, Any]]) -> None:
    for found in results:
        ahead, at_once, static = found["ahead"], found["at once"], found["static"]
        assert ahead["digests"] == at_once["digests"] and len(set(ahead["digests"])) == ROUNDS
        assert ahead["moved"] == at_once["moved"] > 0 and not ahead["dropped"]
        assert ahead["losses"] == at_once["losses"] == static["losses"] and same(static["state"], ahead["state"])
        assert ahead["bytes"][1:] == at_once["bytes"][1:], "an expert has its bytes of when its state is loaded"
        assert 0 < at_once["bytes"][0] < at_once["bytes"][1], "control: state counts"


def test_rebalance_alone_acts_on_it(results: list[dict[str, Any]]) -> None:
    for found in (of_rank["beside"] for of_rank in results):
        assert found["no boundary moves"] and found["moves"] == [True, True, False, True]
        assert found["again"] == "plan_ahead() was called before: rebalance() acts on that decision first"
        assert "declare() after plan_ahead()" in found["declare"] and "inside logical_order()" in found["inside"]
        assert "plan_ahead() after close()" in found["closed"]
        assert found["declared still"], "after load_state_dict(), which dropped the decision for it"
