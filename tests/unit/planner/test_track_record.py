"""Gains that do not come true are believed less; where a router wanders experts stop moving."""

import json
import os
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplb_runtime.cli import main
from eplb_runtime.load.series import read_series
from eplb_runtime.observe.recording import Recorder
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, PlanError, plan
from eplb_runtime.planner.evaluate import predicted_imbalance
from eplb_runtime.planner.forecast import coarsen, foretell
from eplb_runtime.planner.gate import JUDGED, TrackRecord
from eplb_runtime.topology import Topology
from eplb_runtime.utils.files import FileError

LAYERS, EXPERTS, RANKS = 4, 32, 8
TOPOLOGY = Topology(RANKS, RANKS, intra_node_bandwidth=4e8)


def wandering(seed: int, windows: int, keeps: float) -> np.ndarray:
    """int ``[T, L, E]``: popularities of which each window keeps a part, and draws the rest anew."""
    rng = np.random.default_rng(seed)
    popularity, made = rng.normal(0, 0.7, (LAYERS, EXPERTS)), []
    for _ in range(windows):
        popularity = keeps * popularity + np.sqrt(1 - keeps**2) * rng.normal(0, 0.7, (LAYERS, EXPERTS))
        share = np.exp(popularity) / np.exp(popularity).sum(axis=1, keepdims=True)
        made.append([rng.multinomial(20_000, row) for row in share])
    return np.array(made)


def decided(load: np.ndarray, learns: bool) -> dict[str, float]:
    """Decide at each window on the last four, as a job does; judge each move by the ten windows after it."""
    current, record, history = Placement.initial(LAYERS, EXPERTS, RANKS), TrackRecord(), deque(maxlen=4)
    moves: list[tuple[int, Placement, Placement, float, float]] = []
    for number, window in enumerate(load):
        history.append(window)
        record.observe(window.astype(float))
        cost, trust = CostModel(10**8, 0, 0.2, 0.5, 500, 0.1), record.trust if learns else 1.0
        made = plan(
            np.array(history), TOPOLOGY, slots_per_rank=4, current=current, cost=cost, gate="payoff", trust=trust
        )
        if made.decision == "rebalance":
            record.note(made)
            moves.append((number, current, made.placement, made.seconds_saved, made.seconds_spent))
            current = made.placement
    moves = [move for move in moves if move[0] < len(load) - 1]  # the last one is judged by nothing
    kept = []
    for number, before, after, _, _ in moves:
        came = load[number + 1 : number + 11].astype(float)
        gain = predicted_imbalance(came, before) - predicted_imbalance(came, after)
        kept.append(float(gain.mean()) * 0.5 * 0.2 * 500)
    late = [index for index, move in enumerate(moves) if move[0] >= 10]
    return {
        "moves": len(moves),
        "false": sum(value < move[4] for value, move in zip(kept, moves, strict=True)),
        "promised": sum(moves[index][3] for index in late),
        "kept": sum(kept[index] for index in late),
        "net": sum(kept) - sum(move[4] for move in moves),
    }


def test_a_router_that_wanders_stops_moving_experts() -> None:
    load = wandering(1, 40, keeps=0.85)
    blind, learns = decided(load, False), decided(load, True)
    assert blind["false"] >= 2 and blind["promised"] > 2 * max(blind["kept"], 1.0), "control: it promises much"
    assert learns["false"] < blind["false"] and learns["net"] > blind["net"]
    assert decided(wandering(0, 40, keeps=0.0), False)["moves"] <= 1, "what is noise alone is seen by the gate"


@pytest.fixture
def turned() -> tuple[np.ndarray, Plan]:
    """A load, and a plan that is better by 0.5."""
    load = np.array([[3.0, 3, 1, 1]])
    made = plan(load, Topology(2), slots_per_rank=2, current=Placement.initial(1, 4, 2))
    assert made.imbalance_before - made.imbalance_after == pytest.approx(0.5)
    return load, made


def test_trust_is_the_share_that_came_true(turned: tuple[np.ndarray, Plan]) -> None:
    load, made = turned
    record = TrackRecord()
    assert record.trust == 1.0
    record.note(made)
    assert record.trust == 1.0, "nothing came yet"
    record.observe(np.zeros_like(load))
    assert record.trust == 1.0, "no tokens say nothing"
    record.observe(load)
    assert record.trust == pytest.approx(1.0)
    record.observe(load[:, ::-1] * 0 + 1)  # even load: nothing gained
    assert record.trust == pytest.approx((0.25 + 0.05) / 0.55, rel=0.03)


def test_a_judgement_says_what_was_promised_and_kept(turned: tuple[np.ndarray, Plan]) -> None:
    load, made = turned
    record = TrackRecord()
    for came in (load, np.ones_like(load), np.ones_like(load)):
        record.note(made)
        record.observe(came)
    judged = record.judgement(2.0)
    assert record.trust < 0.8 and (judged["judged_plans"], judged["judged_decisions"]) == (3, 6)
    assert judged["predicted_seconds"] == 3.0 and judged["true_seconds"] == pytest.approx(1.0 / 3)


def test_a_plan_is_judged_for_as_long_as_it_promised(turned: tuple[np.ndarray, Plan]) -> None:
    """Other loads may come after that, which it did not promise anything for."""
    load, made = turned
    record, control = TrackRecord(horizon=1), TrackRecord(horizon=JUDGED)
    for one in (record, control):
        one.note(made)
        for came in (load, *[np.ones_like(load)] * 5):
            one.observe(came)
    assert record.trust == pytest.approx(1.0) and control.trust < 0.3


def test_a_plan_saves_as_much_as_is_believed_of_its_gain() -> None:
    load, current = np.arange(1.0, 17.0)[None], Placement.initial(1, 16, 4)
    cost = CostModel(10**6, 0, 1.0)

    def ask(**terms: Any) -> Plan:
        return plan(load, Topology(4), slots_per_rank=4, current=current, gate="payoff", cost=cost, **terms)

    whole, half = ask(), ask(trust=0.5)
    assert whole.seconds_saved > 0 and half.placement == whole.placement
    assert half.seconds_saved == pytest.approx(0.5 * whole.seconds_saved)
    nothing = ask(trust=0.0)
    assert nothing.decision == "stay" and not len(nothing.moves)


# -- Forecasts: long memory where load is steady, short where it jumps, ahead where it drifts


MEAN = np.linspace(10, 200, 64).reshape(2, 32)


def noisy(mean: np.ndarray, windows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).poisson(mean, (windows, *mean.shape)).astype(float)


def error(guess: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(guess / guess.sum() - truth / truth.sum()).sum())


def forecast(load: np.ndarray) -> np.ndarray:
    return foretell(load).expected


def test_on_steady_load_the_forecast_is_the_mean_of_all() -> None:
    load = noisy(MEAN, 60, 0)
    assert error(forecast(load), load.mean(axis=0)) < 1e-3
    assert not foretell(load).nonstationary_L.any()


def test_after_a_jump_the_forecast_forgets_what_was_before() -> None:
    load = np.concatenate([noisy(MEAN, 20, 0), noisy(MEAN[:, ::-1], 20, 1)])
    assert error(forecast(load), MEAN[:, ::-1]) < 0.3 * error(load.mean(axis=0), MEAN[:, ::-1])


def test_under_a_steady_drift_the_forecast_is_ahead_of_the_mean() -> None:
    load = np.array([MEAN + t * (MEAN[:, ::-1] - MEAN) / 60 for t in range(40)])
    then = MEAN + 40 * (MEAN[:, ::-1] - MEAN) / 60
    assert error(forecast(load), then) < 0.2 * error(load.mean(axis=0), then)


def test_scenarios_lie_around_the_forecast_and_deviate_farther_than_what_was_seen() -> None:
    load = noisy(10 * MEAN, 8, 0)
    come = foretell(load)
    assert come.scenarios.shape == load.shape and come.mixes.shape[1:] == MEAN.shape
    assert np.allclose(come.scenarios.mean(axis=0), come.expected, rtol=1e-3)
    assert (come.scenarios.std(axis=0) > 1.1 * load.std(axis=0)).mean() > 0.8
    assert 0.8 < come.mixes.std() / come.scenarios.std() < 1.2


def test_windows_without_tokens_are_left_out_of_that_layer_alone() -> None:
    load = noisy(MEAN, 6, 0)
    load[[1, 4], 0] = 0
    expected = forecast(load)
    assert error(expected[0], load[[0, 2, 3, 5], 0].mean(axis=0)) < 0.02
    assert np.allclose(expected[1], load[:, 1].mean(axis=0), rtol=0.05)
    load[:, 0] = 0
    assert not foretell(load).scenarios[:, 0].any()


def test_a_long_history_is_merged_into_means_that_keep_the_newest() -> None:
    load = np.arange(130.0).reshape(130, 1, 1)
    merged = coarsen(load)
    assert len(merged) <= 64
    assert merged[-1, 0, 0] == pytest.approx(np.mean([127, 128, 129]))


# -- Questions to the planner that cannot be answered, or whose answer would be wrong in silence: one line each


SIZES = ["--ranks", "4", "--ranks-per-node", "4", "--slots-per-rank", "2"]
LOAD = np.arange(1.0, 17.0).reshape(2, 8)


def asked(**terms: Any) -> Any:
    given: dict[str, Any] = {"load": LOAD, "topology": Topology(4), "slots_per_rank": 2, **terms}
    return plan(given.pop("load"), given.pop("topology"), **given)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a number for a topology": ({"topology": 4}, "topology is a int: give a Topology"),
    "a dict for costs": ({"cost": {"home_bytes": 1}}, "cost is a dict: give a CostModel"),
    "a list of policies": ({"policy": ["static"]}, "is unknown; choose one of"),
    "ragged speeds": ({"rank_speed": [1, 1, 1, [2]]}, "rank_speed is not an array"),
    "speeds that are trained": ({"rank_speed": torch.ones(4, requires_grad=True)}, "rank_speed is not an array"),
    "numbers beyond float64": ({"load": [[10**400] * 8] * 2}, "load is not an array of numbers"),
    "masked counts": ({"load": np.ma.masked_less(LOAD, 3.0)}, "masked entries: fill them in"),
    "three speeds": ({"rank_speed": [1.0] * 3}, "each of 4 ranks"),
    "a rank that stands still": ({"rank_speed": [1.0, 1.0, 1.0, 0.0]}, "above 0"),
    "speeds for free": ({"rank_speed": [1.0, 1.0, 1.0, 2.0], "policy": "free"}, "equally fast"),
    "no layers": ({"load": LOAD[0]}, "shape"),
    "experts that ranks do not divide": ({"load": LOAD[:, :6]}, "evenly"),
    "letters": ({"load": [["a"] * 8]}, "numbers"),
    "no number": ({"load": LOAD * [1, float("nan"), *[1] * 6]}, "layer 0, expert 1"),
    "no end": ({"load": LOAD * [1, 1, float("inf"), *[1] * 5]}, "layer 0, expert 2"),
    "less than nothing": ({"load": LOAD - 2}, "layer 0, expert 0"),
    "complex counts": ({"load": LOAD * 1j}, "not an array of numbers"),
    "nan moves": ({"max_moves": float("nan")}, "max_moves=nan: give a whole number"),
    "half a move": ({"max_moves": 2.5}, "max_moves=2.5: give a whole number"),
    "moves from nothing": ({"max_moves": 3}, "limit moves from a current placement"),
    "a list of experts": ({"current": [[0, 1, 2, 3]]}, "current is a list: give a Placement"),
    "slots as a float": ({"slots_per_rank": 2.0}, "slots_per_rank=2.0: give a whole number"),
    "loads whose squares overflow": ({"load": LOAD * 1e155}, "too much to add up"),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_line_says_what_is_wrong(case: str) -> None:
    terms, expected = WRONG[case]
    with pytest.raises(PlanError) as raised:
        asked(**terms)
    assert expected in str(raised.value) and "\n" not in str(raised.value)


def test_bytes_that_the_layout_does_not_count_are_no_limit_and_refused() -> None:
    current = plan(LOAD, Topology(4), slots_per_rank=3, policy="free").placement
    terms: dict[str, Any] = {"policy": "free", "slots_per_rank": 3, "current": current, "max_bytes": 0}
    with pytest.raises(PlanError, match="replica_bytes"):
        asked(**terms, cost=CostModel(home_bytes=100))
    assert len(asked(**terms, load=LOAD[:, ::-1], cost=CostModel(replica_bytes=10)).moves) == 0


def test_what_is_nearly_a_load_is_one() -> None:
    slots = asked().placement.physical_to_logical.tolist()
    tensor = torch.tensor(LOAD, dtype=torch.bfloat16, requires_grad=True)
    for load in (np.ma.array(LOAD, mask=False), tensor, [tensor]):
        assert asked(load=load).placement.physical_to_logical.tolist() == slots


def test_a_share_is_no_more_than_the_step() -> None:
    assert CostModel(moe_share=1.0).moe_share == 1.0
    with pytest.raises(ValueError, match=r"moe_share=1\.5: give a share of the step"):
        CostModel(moe_share=1.5)
    with pytest.raises(ValueError, match="give all three for one step"):
        CostModel(step_seconds=1e-310, crossing_seconds=1.0)


def test_plain_python_plans_what_compiled_code_does() -> None:
    """``NUMBA_DISABLE_JIT=1`` is how one debugs the planner."""
    script = (
        "import numpy as np; from eplb_runtime import Placement, Topology, plan; "
        "load = 1e3 * np.random.default_rng(0).lognormal(0, 0.8, (3, 1, 6)); current = Placement.initial(1, 6, 3, 1); "
        "made = [plan(load, Topology(3), slots_per_rank=3, current=current, max_moves=most) for most in (None, 2)]; "
        "print([one.placement.physical_to_logical.tolist() for one in made])"
    )
    run = partial(subprocess.run, [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    plain, compiled = (run(env={**os.environ, "NUMBA_DISABLE_JIT": off}) for off in ("1", "0"))
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout == compiled.stdout != ""


@pytest.mark.parametrize("steps", [0, -3, 2.5, True, "7", 10**30])
def test_a_window_is_of_whole_steps(tmp_path: Path, steps: Any) -> None:
    record(tmp_path, np.ones((2, 1, 4), dtype=np.int64))
    file = next(tmp_path.rglob("*.jsonl"))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[-1]["steps"] = steps
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(FileError, match=r"steps is .*: a window is of 1 or more training steps"):
        read_series(tmp_path)


def record(folder: Path, load: np.ndarray) -> None:
    series = Recorder(folder, load.shape[1], load.shape[2])
    series.write(load, 5)
    series.close()


@pytest.mark.parametrize("command", [["plan"], ["simulate", "--every", "2"]])
def test_a_load_without_tokens_is_not_balanced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    np.savez(tmp_path / "none.npz", load=np.zeros((6, 2, 8)))
    assert main([*command, str(tmp_path / "none.npz"), *SIZES]) == 2
    assert "no token was counted" in capsys.readouterr().err


def test_windows_without_tokens_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = np.random.default_rng(0).gamma(1.0, size=(12, 2, 8)).round(3) * 1000
    gaps = np.concatenate([load[:8], np.zeros((6, 2, 8)), load[8:]])
    found = []
    for name, of in (("load", load), ("gaps", gaps)):
        np.savez(tmp_path / f"{name}.npz", load=of)
        given = [str(tmp_path / f"{name}.npz"), *SIZES, "--every", "2", "--policies", "static", "--json"]
        assert main(["simulate", *given]) in (None, 0)
        said = capsys.readouterr()
        found.append(json.loads(said.out))
    assert "6 of 18 windows have no tokens and are left out" in said.err
    one, other = ([run["imbalance"] for run in each["policies"]] for each in found)
    assert one == other
