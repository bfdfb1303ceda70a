"""Jobs of torchtitan with its own dispatchers: checkpoints after moves, what is refused, what is noticed at attach, and
three experts a token, which DeepEP and HybridEP add up by place: equal to rounding, in float64 to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import titan_dispatch_double
from ranks import run_ranks
from test_torchtitan import balance_of
from titan import SAVED, STEPS, Run, different, without_state
from titan_dispatchers import Job, begin, gathered
from titan_float64 import DoubleRun, OnRanks, compute_in_float64, distance

from eplb_runtime import DispatchConfig
from eplb_runtime.hosts.attaching.description import AttachError

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

SAVING = Job("hybridep", ep=2)
THREE = {"deepep": Job("deepep", top_k=3), "hybridep": Job("hybridep", ep=2, top_k=3)}
"""Jobs with three experts a token."""
of_hybridep = pytest.mark.skipif(
    not titan_dispatch_double.HAS_HYBRIDEP, reason="torchtitan's hybridep is imported with torch 2.14 and newer"
)


def saved(rank: int, folder: Path) -> dict[str, Any]:
    begin()
    run = partial(SAVING.run, folder)
    first = run(True, saves=True).train()
    again = run(True, saves=False, load_step=SAVED).train()
    loaded = run(None, saves=False, load_step=STEPS).train()
    state = gathered(first)
    found = {
        "away": first.balancer.placement.with_epoch(0) != again.balancer._runtime.placement.with_epoch(0),
        "again": (again.logged, different(state, gathered(again))),
        "first": first.logged,
        "loaded by torchtitan alone": different(state, gathered(loaded)),
        "refused": refused(folder),
    }
    for one in (first, again, loaded):
        one.close()
    return found


def set_dispatchers(config: Any, **options: Any) -> None:
    for layer in config.model_spec.model.layers:
        routed = layer.moe.routed_experts
        for name, value in options.items():
            setattr(routed.token_dispatcher, name, value)


def another_class(config: Any) -> None:
    from torchtitan.models.common import token_dispatcher

    class Other(token_dispatcher.HybridEPTokenDispatcher):
        @dataclass(kw_only=True, slots=True)
        class Config(token_dispatcher.HybridEPTokenDispatcher.Config):
            pass

    for layer in config.model_spec.model.layers:
        before = layer.moe.routed_experts.token_dispatcher
        given = {own.name: getattr(before, own.name) for own in fields(before)}
        layer.moe.routed_experts.token_dispatcher = Other.Config(**given)


def other_arguments() -> Any:
    """Of a torchtitan whose dispatchers read ids elsewhere."""
    from torchtitan.models.common.token_dispatcher import HybridEPTokenDispatcher

    def dispatch(self: Any, x_TD: Any, routing_TE: Any) -> Any: ...

    return patch.object(HybridEPTokenDispatcher, "dispatch", dispatch)


MISTAKES: dict[str, tuple[str, Callable[[Any], None], Callable[[], Any] | None]] = {
    "copies": (
        "replica_slots=1 with moe_comm_backend=hybridep: its dispatcher knows one place for an expert; set "
        "replica_slots=0",
        lambda config: balance_of(config, replica_slots=1),
        None,
    ),
    "a dispatcher of ours": (
        "torchtitan's dispatcher carries tokens; leave dispatch out",
        lambda config: balance_of(config, dispatch=DispatchConfig("hierarchical")),
        None,
    ),
    "tokens that are dropped": (
        "non_blocking_capacity_factor=0.5: HybridEP drops tokens",
        lambda config: set_dispatchers(config, non_blocking_capacity_factor=0.5),
        None,
    ),
    "another dispatcher": ("moe_comm_backend=Other: nothing has been run with it", another_class, None),
    "other arguments": ("takes x_TD, routing_TE, and not x_TD", lambda config: None, other_arguments),
}
"""What is otherwise -> what is said, what does it to the config, and what to the process."""
GRAPHS = "disable_cuda_graphs=False: a CUDA graph of forward and backward would begin no forward"


def refused(folder: Path) -> dict[str, str]:
    """What each mistake ends with."""
    said = {}
    for mistake, (_, make, around) in MISTAKES.items():
        with ExitStack() as stack:
            if around is not None:
                stack.enter_context(around())
            said[mistake] = attached(SAVING, folder, make)
    said["graphs"] = attached(
        replace(SAVING, capacity=1.0), folder, lambda config: setattr(config.training, "disable_cuda_graphs", False)
    )
    return said


def attached(job: Job, folder: Path, mistake: Callable[[Any], None]) -> str:
    try:
        job.run(folder / "refused", False, mistake=mistake).close()
    except (AttachError, RuntimeError) as error:
        return str(error)
    return "nothing"


def with_three(rank: int, folder: Path) -> dict[str, Any]:
    begin()
    compute_in_float64()
    found: dict[str, Any] = {}
    for name, job in THREE.items():
        if job.backend == "hybridep" and not titan_dispatch_double.HAS_HYBRIDEP:
            found[name] = attached(job, folder, lambda config: None)
            continue

        def run(balanced: bool, job: Job = job) -> Run:
            return DoubleRun(job.family, job.ep, folder, balanced, OnRanks(), change=job.change)

        still, moving, left = run(False).train(), run(True).train(), without_state(run(True)).train()
        state = gathered(still)
        apart, control = (distance(gathered(one), state) for one in (moving, left))
        found[name] = {"moved": moving.moved, "apart": apart, "control": control}
        for one in (still, moving, left):
            one.close()
    return found


@pytest.fixture(scope="module")
def saving_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, saved, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def ranks_with_three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, with_three, tmp_path_factory.mktemp("three"))


@of_hybridep
def test_torchtitans_checkpoint_is_read_back_after_moves_with_us_and_without(
    saving_ranks: list[dict[str, Any]],
) -> None:
    for found in saving_ranks:
        assert found["away"]
        assert found["again"] == (found["first"][SAVED:], [])
        assert found["loaded by torchtitan alone"] == []


@of_hybridep
@pytest.mark.parametrize("mistake", [*MISTAKES, "graphs"])
def test_what_would_go_wrong_is_refused_in_one_line(saving_ranks: list[dict[str, Any]], mistake: str) -> None:
    said = [found["refused"][mistake] for found in saving_ranks]
    assert all("\n" not in line for line in said)
    assert all((MISTAKES[mistake][0] if mistake in MISTAKES else GRAPHS) in line for line in said)


@pytest.mark.parametrize("name", THREE)
def test_with_three_experts_a_token_training_is_equal_to_rounding(
    ranks_with_three: list[dict[str, Any]], name: str
) -> None:
    for found in ranks_with_three:
        seen = found[name]
        if isinstance(seen, str):
            assert "moe_comm_backend='hybridep' is not imported with torch 2.13" in seen
            continue
        assert seen["moved"] > 16 * (STEPS - 1)
        assert 0 < seen["apart"] < 1e-10 and seen["control"] > 1e-3
