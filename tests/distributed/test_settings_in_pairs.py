"""Any two settings together: experts that all change places leave training as it is, or the pair is refused in a line.

Rows in which each pair of values occurs are made by allpairspy; a setting joins by being a field of the config.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flat_settings import NAMES, config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.distributed.transports import nixl_agent
from eplb_runtime.events import RebalanceCommitted
from eplb_runtime.planner.shuffle import shuffled

allpairspy = pytest.importorskip("allpairspy", reason="pip install 'eplb-runtime[test]'")

RANKS, EXPERTS, LAYERS, STEPS, STEPS_BESIDE = 4, 8, 2, 4, 10
ALL = os.environ.get("EPLB_ALL_SETTINGS", "") not in ("", "0")
"""Otherwise every fifth row."""
EVERY = 5
TOLERANCE = 1e-10
"""Where sums are made in another order; float64."""

VALUES: Mapping[str, tuple[Any, ...]] = {
    "interval": (2, 1),
    "window": (None, 3),
    "lag": (1, 0),
    "replica_slots": (0, 1, 2),
    "split": ("water_filling", "even"),
    "split_locality": (True, False),
    "split_least_tokens": (64, 0),
    "policy": ("incremental", "static"),
    "gate": ("payoff", "always"),
    "max_moves": (None, 3),
    "max_pause_seconds": (None, 20.0),
    "horizon_steps": (None, 20),
    "moe_share": (0.5, 0.9),
    "timeout_seconds": (60.0, 90.0),
    "staging_bytes": (256 << 20, 20_000),
    "overlap": (False, True),
    "bytes_per_step": (None, 20_000),
    "transport": ("torch", "auto") if nixl_agent.why_not() else ("torch", "nixl", "auto"),
    "dispatch": ("all_to_all", "hierarchical", "auto"),
    "combine_order": ("logical", "by_rank"),
    "dispatch_sms": (20, 24),
    "kernels": (False, True),
    "dense_gradients": ("allreduce", "host"),
    "move_gradients": (False, True),
    "guard": ("raise", "auto", "warn", "off"),
    "rank_speed": (None, "the last is slow"),
    "initial_placement": (None, "shuffled"),
    "listen": (None, 0),
}
"""Of each field, those that work on a machine without GPUs; the first is the one that others are compared with."""
REASONS: Mapping[str, str] = {
    "copies_by": "others than torch need GPUs: refused below; tests/distributed/test_copies_by.py",
    "dispatch_dtype": "float8 needs a dispatch on GPUs: refused below; tests/distributed/test_deepep.py",
    "low_latency_tokens": "needs DeepEP: refused below; tests/distributed/test_deepep.py",
    "elementwise": "says that an optimizer need not be tried: tests/unit/moe/experts",
    "run": "a folder of rank 0, which changes nothing on others: tests/distributed/test_recording.py",
    "listen_token": "for listeners beyond this machine: tests/unit/observe",
}
"""Why a field has no values above."""
REFUSED: Sequence[Mapping[str, Any]] = (
    {"copies_by": "copy_engine", "replica_slots": 1},
    {"dispatch": "deepep"},
    {"dispatch": "deepep", "combine_order": "by_rank", "dispatch_dtype": "float8"},
    {"dispatch": "deepep", "combine_order": "by_rank", "low_latency_tokens": 4},
    {"transport": "cuda_ipc"},
    {"transport": "nvshmem"},
    {"transport": "deepep"},
)
"""On a machine without GPUs, in a line."""
HOST: Mapping[str, tuple[Any, ...]] = {
    "layout": ("EP 4", "EP 2 x EDP 2"),
    "optimizer": ("AdamW", "AdamW foreach", "AdamW fused", "SGD", "Adagrad", "RMSprop"),
    "dtype": ("float64", "float32", "bfloat16"),
    "accumulation": ("1", "2", "2 no_sync"),
    "recompute": (False, True),
    "clipping": (False, True),
}
TABLE = {**VALUES, **HOST}
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
}
Case = Mapping[str, Any]


def settings_of(case: Case) -> dict[str, Any]:
    """The config's arguments; what ranks or experts have to be known for is filled in."""
    ranks = 4 if case.get("layout", "EP 4") == "EP 4" else 2
    settings = {name: value for name, value in case.items() if name not in HOST}
    if settings.get("rank_speed"):
        settings["rank_speed"] = (1.0,) * (ranks - 1) + (0.5,)
    if settings.get("initial_placement"):
        logical = eplb.Placement.initial(LAYERS, EXPERTS, ranks, settings.get("replica_slots", 0))
        settings["initial_placement"] = shuffled(logical, np.ones((LAYERS, EXPERTS)))
    return settings


def is_exact(case: Case) -> bool:
    return not case.get("replica_slots") and case.get("combine_order", "logical") == "logical"


def could_be(case: Case) -> bool:
    """Whether these values go together, as far as the config knows; it refuses what does not. Sums in another order are
    compared in float64 only."""
    refused = (
        *(
            case.get(name, values[0]) != values[0] and not case.get("replica_slots", 1)
            for name, values in VALUES.items()
            if name.startswith("split")
        ),
        case.get("bytes_per_step") is not None and not case.get("overlap", True),
        case.get("dispatch_sms", 20) != 20 and case.get("dispatch", "auto") != "auto",
        case.get("lag", 0) >= case.get("interval", 2),
        case.get("overlap") and case.get("move_gradients"),
        case.get("combine_order") == "by_rank" and case.get("dispatch") == "all_to_all",
        not is_exact(case) and case.get("dtype", "float64") != "float64",
    )
    return not any(refused)


@cache
def cases() -> list[Case]:
    """Rows in which each pair of values that go together occurs."""
    names = list(TABLE)
    pairs = allpairspy.AllPairs(
        list(TABLE.values()), filter_func=lambda row: could_be(dict(zip(names, row, strict=False)))
    )
    rows = [dict(zip(names, row, strict=True)) for row in pairs]
    chance = random.Random(0)
    for (one, values), (other, others) in combinations(TABLE.items(), 2):
        for pair in product(values, others):  # the library passes over some
            wanted = dict(zip((one, other), pair, strict=True))
            if could_be(wanted) and not any(wanted.items() <= row.items() for row in rows):
                drawn = ({name: chance.choice(all_) for name, all_ in TABLE.items()} | wanted for _ in range(1000))
                rows += [row for row in drawn if could_be(row)][:1]
    return rows


def parameters_outside(balancer: eplb.Balancer, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if name not in balancer.layer_of_parameter]


def train(rank: int, case: Case, moving: bool) -> dict[str, Any]:
    """The state after four steps (ten with overlap), or the line in which it is refused."""
    model = make_model("olmoe", experts=EXPERTS, layers=LAYERS, width=64).to(getattr(torch, case["dtype"]))
    if case["dtype"] == "float64":
        model.set_experts_implementation("eager")
    if case["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = OPTIMIZERS[case["optimizer"]](model.parameters())
    group = None
    if case["layout"] != "EP 4":
        group = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    settings = settings_of(case)
    if not moving:
        settings = {"policy": "static", "dense_gradients": settings["dense_gradients"], "guard": "off"}
    try:
        balancer = eplb.attach(model, optimizer, config=config_from_settings(settings), ep_group=group)
    except (ValueError, RuntimeError) as error:
        return {"refused": str(error)}
    if moving:
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    model.train()
    batches = 1 if case["accumulation"] == "1" else 2
    steps = STEPS_BESIDE if case["overlap"] else STEPS
    for step in range(steps):
        for batch in range(batches):
            ids = batch_of(rank, 2 * step + batch)
            last = batch == batches - 1
            if case["accumulation"] == "2 no_sync" and not last:
                with balancer.no_sync():
                    (model(input_ids=ids, labels=ids).loss / batches).backward()
            else:
                (model(input_ids=ids, labels=ids).loss / batches).backward()
        if case["dense_gradients"] == "host":
            for parameter in parameters_outside(balancer, model):
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= RANKS
        if case["clipping"]:
            balancer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    moved = [balancer._rebalancer.has_moved(layer) for layer in range(LAYERS)]
    committed = len(balancer.events.of_type(RebalanceCommitted))
    state = eplb.logical_state_dict(model, optimizer)
    digest = balancer.placement.digest()
    balancer.close()
    return {"refused": "", "state": state, "moved": all(moved), "committed": committed, "digest": digest}


def run_cases(rank: int, rows: list[Case]) -> list[dict[str, Any]]:
    """Of each case: what differs from the static run, and whether experts moved."""
    said = []
    for case in rows:
        one = train(rank, case, moving=True)
        if not one["refused"]:
            wanted = train(rank, case, moving=False)["state"]
            state = one.pop("state")
            one["differs"] = [name for name in wanted if not equal(state.get(name), wanted[name], case)]
            del state, wanted  # experts stay where somebody holds their rows
        said.append(one)
    return said


def equal(one: torch.Tensor | None, other: torch.Tensor, case: Case) -> bool:
    if one is None or is_exact(case):
        return one is not None and torch.equal(one, other)
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_each_field_has_values_to_try_or_a_reason() -> None:
    assert set(VALUES) | set(REASONS) == NAMES, "give each field values, or say why it has none"
    assert not set(VALUES) & set(REASONS)
    assert all(len(values) > 1 for values in VALUES.values()) and all(REASONS.values())


@pytest.mark.long
@pytest.mark.parametrize("offset", range(EVERY if ALL else 1))
def test_settings_in_pairs_leave_training_as_it_is(offset: int) -> None:
    chosen = cases()[offset::EVERY]
    for result in (results := run_ranks(RANKS, run_cases, chosen)):
        wrong = []
        for case, one, first in zip(chosen, result, results[0], strict=True):
            if one["refused"]:
                if "\n" in one["refused"] or not first["refused"]:
                    wrong.append((case, one["refused"]))
            elif one["differs"] or not one["committed"] or (not case["overlap"] and not one["moved"]):
                wrong.append((case, one["differs"][:4], one["committed"], one["moved"]))
            elif one["digest"] != first["digest"]:
                wrong.append((case, "ranks have parted"))
        assert not wrong, f"{len(wrong)} of {len(chosen)}: {wrong[:3]}"
    refused = sum(bool(one["refused"]) for one in results[0])
    assert refused <= len(chosen) // 4, [one["refused"] for one in results[0] if one["refused"]]


def refuse(rank: int) -> list[str]:
    """What attach says to settings that need a GPU, or a package for GPUs; empty: nothing."""
    usual = {name: values[0] for name, values in TABLE.items()}
    return [train(rank, {**usual, **settings}, moving=True)["refused"] for settings in REFUSED]


def test_what_needs_a_gpu_is_refused_in_a_line_by_all_ranks() -> None:
    for lines in run_ranks(RANKS, refuse):
        for settings, line in zip(REFUSED, lines, strict=True):
            assert line and "\n" not in line, settings
