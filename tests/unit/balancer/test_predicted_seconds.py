"""What a plan is said to save: in seconds of steps that were timed, and not a word before; and what came true of it."""

import json
import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
import torch
from torch import Tensor

from eplb_runtime.balancer.decision import Measurement, PlanMaker
from eplb_runtime.balancer.gradients import norm
from eplb_runtime.balancer.gradients.norm import RangesOfSlots, squares_of_slots
from eplb_runtime.balancer.planner_process import PlannerLost
from eplb_runtime.balancer.rebalancer import Rebalancer, _Pending
from eplb_runtime.config import BalancerConfig, MigrationConfig
from eplb_runtime.distributed.consensus import Verdict
from eplb_runtime.distributed.control_channel import ControlChannel
from eplb_runtime.events import (
    BalancingPaused,
    EventLog,
    GuardFinding,
    LoadMeasured,
    RebalanceAborted,
    RebalanceCommitted,
    RebalancePlanned,
)
from eplb_runtime.migration.engine import MigrationProgress
from eplb_runtime.migration.schedule import Round
from eplb_runtime.observe.start import DecisionLine
from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.planner.cost import CostModel
from eplb_runtime.planner.types import Plan
from eplb_runtime.topology import Topology
from eplb_runtime.utils.worker import Worker

TWO = Topology(2, 1)
LOAD = np.array([[[90, 80, 70, 60, 4, 3, 2, 1]]], dtype=np.int64)


def maker_of(topology: Topology = TWO, **config: Any) -> PlanMaker:
    """A decision maker that plans, without a job."""
    job = SimpleNamespace(ep_size=2, edp_ranks=(0,), stages=(0,), layers_of_stage=(1,), ranks=(0,), is_planner=False)
    counter, chosen = SimpleNamespace(steps_per_bucket=1), BalancerConfig(**{"gate": "always", **config})
    runtime: Any = SimpleNamespace(config=chosen, topology=topology, counter=counter, job=job)
    return PlanMaker(runtime)


def measured(step_seconds: float = 2.0, **more: Any) -> Measurement:
    given = {"placement": Placement.initial(1, 8, 2), "stall_seconds": 0.01, "home_bytes": 1 << 20, **more}
    return Measurement(buckets=Any, earlier=(), step_seconds=step_seconds, **given)


def planned(maker: PlanMaker, load: np.ndarray, of: Measurement) -> tuple[Plan, CostModel, dict[str, Any]]:
    """A plan, what it was told that moves cost, and its summary."""
    asked: list[Any] = []

    def planner(*args: Any, **terms: Any) -> Plan:
        asked[:] = [plan(*args, **terms), terms["cost"]]
        return asked[0]

    maker.planner = planner
    maker.history.extend(load)
    summary = json.loads(maker.plan(of, load))["planned"]
    return *asked, summary


@pytest.mark.parametrize("step_seconds, is_known", [(0.0, False), (2.0, True)])
def test_no_seconds_are_predicted_before_a_step_is_timed(step_seconds: float, is_known: bool) -> None:
    summary = planned(maker_of(), LOAD, measured(step_seconds))[2]
    assert summary["decision"] == "rebalance" and summary["seconds_spent"] > 0
    assert (summary["seconds_saved"] is not None) == is_known


def test_a_longest_pause_bounds_the_busiest_link_and_not_the_sum_over_ranks() -> None:
    load = np.tile([90, 80, 70, 60, 50, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], (1, 6, 1))
    topology = Topology(4, 4, intra_node_bandwidth=1e6)
    of = measured(1e3, placement=Placement.initial(6, 16, 4), stall_seconds=0.0, home_bytes=10**6)
    made, cost, _ = planned(maker_of(topology, migration=MigrationConfig(max_pause_seconds=3.0)), load, of)
    assert 0 < cost.transfer_seconds(made.moves, topology, 4) <= 3.0 < len(made.moves)
    assert cost.transfer_seconds(planned(maker_of(topology), load, of)[0].moves, topology, 4) > 3.0, "control"


def judged(maker: PlanMaker, *loads: np.ndarray) -> dict[str, Any]:
    """The summary of the last decision of several."""
    return [planned(maker, load, measured())[2] for load in loads][-1]


def test_plans_are_judged_by_what_came() -> None:
    same, other = judged(maker_of(), LOAD, LOAD), judged(maker_of(), LOAD, np.full_like(LOAD, 40))
    assert (same["judged_plans"], same["judged_decisions"]) == (1, 1)
    assert same["true_seconds"] == pytest.approx(same["predicted_seconds"]) and same["predicted_seconds"] > 0
    assert other["true_seconds"] == 0 < other["predicted_seconds"], "control: even load came"


def test_a_plan_that_never_came_is_not_judged_and_the_next_one_is() -> None:
    def late(*_: Any, **__: Any) -> Any:
        raise PlannerLost("too late")

    maker = maker_of()
    maker.planner = late
    maker.history.extend(LOAD)
    with pytest.raises(PlannerLost):
        maker.plan(measured(), LOAD)
    made = judged(maker, LOAD)
    assert made["decision"] == "rebalance" and made["judged_plans"] == 0
    assert judged(maker, LOAD)["judged_plans"] == 1


def test_the_planner_is_told_the_settings_and_what_was_learned() -> None:
    told: dict[str, Any] = {}
    maker = maker_of(gate="payoff", rank_speed=(1.0, 0.5), interval=2, window=6, migration=MigrationConfig(max_moves=2))
    maker._sources = sources = np.ones((2, 1, 8))
    for came in (LOAD, np.full_like(LOAD, 40)):
        maker.planner = lambda load, _, **terms: told.update(terms, windows=len(load)) or plan(load, TWO, **terms)
        maker.history.extend(np.tile(LOAD, (5, 1, 1)))
        maker.plan(measured(1e3), came)
    wanted = {"gate": "payoff", "rank_speed": (1.0, 0.5), "windows": 6, "max_moves": 2, "sources": sources}
    assert {name: told[name] for name in wanted} == wanted and 0 < told["trust"] < 1


def test_a_plan_for_a_declared_load_is_not_judged_by_what_comes_later() -> None:
    maker = maker_of()
    maker.planner = plan
    assert json.loads(maker.plan(measured(declared=LOAD.astype(float)), LOAD))["planned"]["decision"] == "rebalance"
    assert judged(maker, LOAD)["judged_plans"] == 0


# -- Nothing else is in flight, nor on the control group, when experts are moved or ranks compare


INITIAL = Placement.initial(1, 4, 2)


@pytest.fixture
def bare() -> Iterator[Any]:
    """A rebalancer of which nothing works but its channel."""
    rebalancer: Any = Rebalancer.__new__(Rebalancer)
    rebalancer.control = control = ControlChannel.__new__(ControlChannel)
    control.worker, control._seconds = Worker("test"), 30.0
    control._groups = SimpleNamespace(control=None)  # type: ignore[assignment]
    control.reconnecting, control.agreement = False, None  # type: ignore[assignment]
    rebalancer.overlapped = SimpleNamespace(settle=lambda: None, in_flight=False)
    rebalancer._placement, rebalancer._pending = INITIAL, None
    yield rebalancer
    control.worker.close(5.0)


def test_a_move_waits_for_the_decision_in_flight_and_leaves_it_for_later(bare: Any) -> None:
    goes_on, said = Event(), []

    def decide() -> None:
        goes_on.wait(60.0)
        said.append("decided")

    decision: Future[Any] = bare.control.worker.submit(decide)
    bare._pending = pending = _Pending(1, "key", decision, None)
    bare._new_key = lambda _: goes_on.set()  # as late as can be
    bare._engine, bare._get_ready = SimpleNamespace(migrate=lambda *_: said.append("migrated")), None
    bare._handle_progress, bare._maps, bare._after_move = lambda _: None, SimpleNamespace(replicas=None), lambda: None
    bare.migrate_to(INITIAL)
    assert said == ["decided", "migrated"] and bare._pending is pending


def test_notices_to_other_ranks_are_sent_before_the_control_group_is_used_again(bare: Any) -> None:
    goes_on, said = Event(), []

    def notice(agreement: Any) -> None:
        goes_on.wait(60.0)
        said.append("the notice")

    def check_equal(*_: Any) -> Verdict:
        said.append("compared")
        return Verdict(True)

    bare.control.broadcast_notice(notice)
    bare.control.agreement = SimpleNamespace(check_equal=check_equal)
    bare.overlapped.settle = goes_on.set  # as late as can be
    assert bare.compare(bytes(16), "it", "it").commit
    assert said == ["the notice", "compared"]


def test_a_notice_that_is_never_sent_means_that_ranks_are_lost(bare: Any) -> None:
    bare.control._seconds = -0.99
    goes_on, lost = Event(), []
    bare.control.broadcast_notice(lambda agreement: goes_on.wait(60.0))
    bare._pause = lost.append
    verdict = bare.compare(bytes(16), "it", "it")
    goes_on.set()
    assert not verdict.commit and verdict.connections_broken and len(lost) == 1


def test_a_pause_is_no_part_of_a_step_what_is_fixed_of_it_is_learned_and_counts_keep_their_placement(bare: Any) -> None:
    bare._initial, bare._moved_L, bare._pause_seconds, bare._earlier = INITIAL, np.zeros(1, dtype=bool), 0.0, []
    bare._counter, bare.clock, slots = SimpleNamespace(buckets=3), Mock(), np.array([[2, 1, 0, 3]])
    rounds, seconds = (Round(0, np.zeros((0, 4)), (), ()),), {"prepare": 0.5, "transfer": 4.0, "vote": 0.25}
    moved = Placement(slots, 4, 2, slots)
    bare._handle_progress(MigrationProgress(moved, rounds=rounds, pause_seconds=5.0, seconds=seconds))
    assert bare.clock.mock_calls == [call.exclude(5.0), call.stalled(0.75)]
    assert bare._earlier == [(3, INITIAL)] and bare.placement() is moved and bare._moved_L.all()


@pytest.mark.parametrize("share, sampled", [(None, [6, 7, 8, 16, 17, 18]), (0.5, [])])
def test_expert_work_is_timed_before_a_decision_unless_its_share_is_given(bare: Any, share: Any, sampled: Any) -> None:
    bare._config = BalancerConfig(interval=10, migration=MigrationConfig(moe_share=share))
    bare._expert_clock, bare._next_sampled = SimpleNamespace(steps=()), 0
    assert [step for step in range(20) if bare._is_sampled(step)] == sampled


# -- Events and a balancer in words: tables of 80 columns, and lines in the log for decisions and rebalances


PLANNED = RebalancePlanned(60, 3, 4, "rebalance", "saves 5 s for 0.1 s", 1.9, 1.2, 0.01, 1.1, 5.0, 0.1)
COMMITTED = RebalanceCommitted(60, 3, "ab" * 16, 4, 3 * 2**20, 0.025)
STAYS = RebalancePlanned(120, 4, 0, "stay", "the planner is still being compiled", 0.0, 0.0, 0.0)


def log() -> EventLog:
    events = EventLog()
    events.emit(LoadMeasured(60, 50, ((1.5, 2.5), (1.0, 2.0))))
    events.emit(PLANNED)
    events.emit(COMMITTED)
    events.emit(RebalanceAborted(120, 3, "staged", "rank 2 has waited 30 s for rank 1: " + "a long story " * 20))
    events.emit(BalancingPaused(120, "connection lost"))
    events.emit(GuardFinding(130, "ranks differ in lm_head"))
    return events


def test_each_decision_and_each_rebalance_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog()
    events.called_at_once.append(DecisionLine())
    with caplog.at_level(logging.INFO, "eplb_runtime"):
        for event in log():
            events.emit(event)
        events.emit(COMMITTED)  # without a plan before it, as restoring does
        for seconds in (3, 4, 5):
            events.emit(replace(STAYS, reason=f"nothing to gain in {seconds} s"))
        events.emit(replace(STAYS, reason="the ranks wait for a checkpoint " * 5))
        costs = "would save 0.1 s, less than 1.2 x the 1 s it costs; forecast imbalance 1.900 -> 1.200, worst layer 2.5"
        events.emit(replace(STAYS, reason=f"{costs} -> 1.3, by moves in 3 of 4 layers"))
    assert [record.getMessage() for record in caplog.records] == [
        "step 60: rebalance: saves 5 s for 0.1 s, forecast imbalance 1.900 -> 1.200",
        "step 60: epoch 3: 4 experts moved, 3.0 MiB came here, 25.0 ms pause, to save 5 s for 0.1 s",
        "step 60: epoch 3: 4 experts moved, 3.0 MiB came here, 25.0 ms pause",
        "step 120: stay: nothing to gain in 3 s",
        f"step 120: stay: {'the ranks wait for a checkpoint ' * 3}the ...",
        "step 120: stay: would save 0.1 s, less than 1.2 x the 1 s it costs; forecast imbalance 1.900 -> 1.200",
    ]


# -- The squared norm of an expert does not depend on where its gradient is cut


LENGTH = 1000
CUTS = (0, 1, 63, 64, 65, 500, 704, 999, LENGTH)
CPU = torch.device("cpu")


def squares(monkeypatch: pytest.MonkeyPatch, gradients: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """By two ranks on threads, of which each has one side of each cut."""
    ranges = tuple(((0, cut), (cut, LENGTH)) for cut in cuts)
    here, given = Barrier(2), dict[int, Tensor]()

    def reduce(values: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
        given[id(values)] = values.clone()
        here.wait(60)
        both = torch.stack(list(given.values()))
        here.wait(60)
        given.clear()
        values.copy_(both.sum(0) if op is torch.distributed.ReduceOp.SUM else both.amax(0))
        here.wait(60)

    def of_rank(place: int) -> Tensor:
        kept = [one[slice(*own[place])] for one, own in zip(gradients, ranges, strict=True)]
        layers = [RangesOfSlots([one if one.numel() else None for one in kept], ranges)]
        return squares_of_slots(layers, place, None, CPU)[0]  # type: ignore[arg-type]

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    with ThreadPoolExecutor(2) as ranks:
        found, other = ranks.map(of_rank, range(2))
    torch.testing.assert_close(found, other, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("chunk", [norm._CHUNK, 128])
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
def test_no_cut_changes_a_bit(monkeypatch: pytest.MonkeyPatch, chunk: int, size: float) -> None:
    monkeypatch.setattr(norm, "_CHUNK", chunk)
    gradient = torch.randn(LENGTH, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, LENGTH) * size
    found = squares(monkeypatch, gradient.expand(len(CUTS), LENGTH), CUTS)
    assert len(set(found.tolist())) == 1
    assert float(found[0]) == pytest.approx(float(gradient.double().square().sum()), rel=1e-12, abs=0)


@pytest.mark.parametrize("value", [0.0, torch.inf, torch.nan])
def test_what_is_not_finite_stays(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    gradient = torch.zeros(LENGTH)
    gradient[640] = value
    found = squares(monkeypatch, gradient.expand(len(CUTS), LENGTH), CUTS)
    torch.testing.assert_close(found, torch.full_like(found, value), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("norm_type", [1.0, 3.0, torch.inf])
def test_experts_make_one_norm_of_any_type(monkeypatch: pytest.MonkeyPatch, norm_type: float) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    gradient, rows = torch.arange(-5.0, 7.0).view(4, 3), torch.tensor([[2, 0, 1, 3]])
    (power,) = norm.powers_of_experts([(0, gradient)], rows, 4, SimpleNamespace(rows=None), None, norm_type)
    wanted = gradient.abs().max() if norm_type == torch.inf else gradient.abs().pow(norm_type).sum()
    assert float(power) == pytest.approx(float(wanted))


def test_a_gradient_of_another_length_is_refused() -> None:
    layers = [RangesOfSlots([torch.ones(3)], (((0, 4), (4, 8)),))]
    with pytest.raises(RuntimeError, match="3 elements, and 4 of its expert are stepped on this rank"):
        squares_of_slots(layers, 0, None, CPU)  # type: ignore[arg-type]
