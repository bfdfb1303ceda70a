"""The planner's process: it plans what the planner plans; dead, late or not ready it is in nobody's way."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_runtime.balancer.planner_process import PlannerLost, PlannerProcess
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.topology import Topology

LOAD = np.random.default_rng(3).lognormal(0.0, 1.0, (6, 2, 16)) * 1000
TERMS: dict[str, Any] = {"slots_per_rank": 5, "policy": "incremental", "layout": "home"}
CURRENT = Placement.initial(2, 16, 4, 1)
COST = CostModel(home_bytes=1000, step_seconds=1.0, crossing_seconds=0.1)


@pytest.fixture
def ready() -> Iterator[PlannerProcess]:
    process = PlannerProcess(60.0)
    assert process.is_ready(300.0)
    yield process
    process.close()


def send(process: PlannerProcess, number: signal.Signals) -> None:
    assert process.process is not None
    os.kill(process.process.pid, number)


def lost(call: Callable[[], Any]) -> str:
    with pytest.raises(PlannerLost) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"current": CURRENT, "cost": COST, "gate": "payoff", "sources": LOAD[:2], "trust": 0.5, "max_bytes": 5000},
        {"current": CURRENT, "declared": LOAD[:3] ** 2, "rank_speed": (1.0, 1.0, 0.5, 1.0), "max_moves": 4},
    ],
)
def test_it_plans_what_the_planner_plans(ready: PlannerProcess, terms: dict[str, Any]) -> None:
    asked, here = (make(LOAD, Topology(4, 2), **TERMS, **terms) for make in (ready.plan, plan))
    for name in (field.name for field in fields(here) if field.name not in ("plan_seconds", "placement", "current")):
        np.testing.assert_equal(getattr(asked, name), getattr(here, name))
    assert asked.placement.digest() == here.placement.digest() and asked.placement.epoch == here.placement.epoch
    assert ready.process is not None
    assert "torch" not in Path(f"/proc/{ready.process.pid}/maps").read_text()
    with pytest.raises(RuntimeError, match="PlanError: 15 experts cannot"):
        ready.plan(LOAD[..., :15], Topology(4), **TERMS)


def test_until_it_is_ready_homes_are_dealt_out_where_ranks_are_alike() -> None:
    process = PlannerProcess(60.0)
    send(process, signal.SIGSTOP)
    made = process.plan(LOAD, Topology(4, 2), **TERMS, current=CURRENT, cost=COST, sources=LOAD[:2])
    assert made.moved_homes and "homes only" in made.reason and (made.placement.replicas_LRK < 0).all()
    assert process.plan(LOAD, Topology(4), **TERMS).moved_homes, "there is no placement yet"
    standing = plan(LOAD, Topology(4), **TERMS, current=CURRENT).placement
    assert (standing.replicas_LRK >= 0).any()
    for terms in ({"current": standing}, {"current": CURRENT, "rank_speed": (1.0, 1.0, 0.5, 1.0)}):
        assert process.plan(LOAD, Topology(4), **TERMS, **terms).decision == "stay"
    send(process, signal.SIGCONT)
    assert process.is_ready(300.0) and "homes only" not in process.plan(LOAD, Topology(4), **TERMS).reason
    process.close()


def test_after_a_late_plan_and_a_death_another_one_plans(ready: PlannerProcess) -> None:
    send(ready, signal.SIGSTOP)
    ready._seconds, began = 0.5, time.monotonic()
    assert lost(lambda: ready.plan(np.ones((99, 9, 999)), Topology(4), **TERMS)) == "the planner took longer than 0.5 s"
    assert time.monotonic() - began < 20.0, "so long a question that it is read while it is sent"
    ready._seconds = 60.0
    assert ready.is_ready(300.0) and ready.plan(LOAD, Topology(4), **TERMS).decision == "rebalance"
    send(ready, signal.SIGSTOP)  # the question is not answered, so that it dies with it
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ready.plan, LOAD, Topology(4), **TERMS)
        send(ready, signal.SIGKILL)
        assert lost(asked.result) == "the planner process ended with status -9"
    assert ready.is_ready(300.0) and ready.plan(LOAD, Topology(4), **TERMS).decision == "rebalance"


def test_closing_ends_a_plan_and_asks_for_no_other_child(ready: PlannerProcess) -> None:
    send(ready, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ready.plan, LOAD, Topology(4), **TERMS)
        ready.close()
        assert lost(asked.result) == "the planner process is closed"
    assert ready.process is None


def test_no_process_thread_or_descriptor_is_left_by_many() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before, children = held(), []
    for _ in range(40):
        process = PlannerProcess(60.0)
        children.append(process.process.pid if process.process is not None else 0)
        process.close()
    assert held() == before
    assert not any(Path(f"/proc/{child}").exists() for child in children)


SCRIPT = """
import os, signal
from eplb_runtime.balancer.planner_process import PlannerProcess
process = PlannerProcess(60.0)
print(process.process.pid, process.is_ready(300.0), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_a_script_that_is_killed_and_holds_none_of_its_pipes() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    child, is_ready = ended.stdout.split()
    assert ended.returncode == -signal.SIGKILL and is_ready == "True"
    try:
        alive = os.pidfd_open(int(child))
    except ProcessLookupError:
        return
    assert select.select([alive], [], [], 60.0)[0], "it lives on"
    os.close(alive)


# -- Compiling ahead of time


AFTER_WARMUP = """
import numpy as np, numba
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.balancer.planner_process import compile_planner
from eplb_runtime.topology import Topology
import eplb_runtime.planner.policies.descent as descent
import eplb_runtime.planner.policies.starts as starts
import eplb_runtime.moe.routing.water_filling as water_filling
compile_planner()
assert descent.descend.signatures
kernels = [descent.descend, starts.deal, starts.add_rings, water_filling._split_layers]
before = [len(kernel.signatures) for kernel in kernels]
cost = CostModel(home_bytes=10, replica_bytes=1, step_seconds=1.0)
for replicas in (0, 2):
    plan(np.ones((3, 2, 64)) + np.arange(64), Topology(8), slots_per_rank=8 + replicas, cost=cost, gate="payoff",
         current=Placement.initial(2, 64, 8, replicas))
    plan(np.ones((3, 2, 64)) + np.arange(64), Topology(8), slots_per_rank=8 + replicas, max_moves=4,
         current=Placement.initial(2, 64, 8, replicas))
plan(np.arange(1.0, 257.0)[None], Topology(256), slots_per_rank=2)
assert [len(kernel.signatures) for kernel in kernels] == before, "a plan compiled again"
"""


def test_after_the_warm_up_no_plan_compiles_anything() -> None:
    subprocess.run([sys.executable, "-c", AFTER_WARMUP], check=True)
