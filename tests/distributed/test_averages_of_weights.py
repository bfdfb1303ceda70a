"""Averages of weights that a loop keeps for itself: they move with the experts, or experts stay where they are."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import eplb_runtime as eplb
from eplb_runtime.moe.experts.matching import matched
from eplb_runtime.moe.experts.outside import Outside
from eplb_runtime.planner.shuffle import plan_shuffle

EXPERTS, STEPS = 8, 6


@dataclass(frozen=True)
class Loop:
    """What a loop keeps besides the model, made before the loop begins, and what it does with it."""

    make: Callable[[nn.Module], Any]
    after_step: Callable[[Any, nn.Module, int], object] = lambda kept, model, step: None
    before_step: Callable[[Any, nn.Module], object] = lambda kept, model: None
    sharded_first: bool = False
    give: Callable[[torch.optim.Optimizer, Any], object] = lambda optimizer, kept: None


def clones(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}


@torch.no_grad()
def lerp(kept: dict[str, Tensor], model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        kept[name].lerp_(parameter.to(kept[name].dtype), 0.1)


def lerp_state(kept: dict[str, Tensor], model: nn.Module, step: int) -> None:
    for name, value in model.state_dict().items():
        kept[name].lerp_(value, 0.1)


def lerp_arrays(kept: list[np.ndarray], model: nn.Module, step: int) -> None:
    for array, parameter in zip(kept, model.parameters(), strict=True):
        array *= np.float32(0.9)
        array += np.float32(0.1) * parameter.detach().numpy()


def lerp_vector(kept: Tensor, model: nn.Module, step: int) -> None:
    kept.lerp_(parameters_to_vector(model.parameters()).detach(), 0.1)


@torch.no_grad()
def look_ahead(kept: list[Tensor], model: nn.Module, step: int) -> None:
    for slow, parameter in zip(kept, model.parameters(), strict=True):
        if step % 3 == 2:
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


@torch.no_grad()
def pull_to_start(kept: list[Tensor], model: nn.Module) -> None:
    for start, parameter in zip(kept, model.parameters(), strict=True):
        parameter.grad.add_(parameter - start, alpha=0.1)


def mask_rows(kept: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.grad.mul_(kept[name])


def masks(model: nn.Module) -> dict[str, Tensor]:
    """The second expert of each rank is frozen."""
    made = {name: torch.ones_like(p) for name, p in model.named_parameters() if ".experts." in name}
    for mask in made.values():
        mask[1] = 0.0
    return made


def per_expert(model: nn.Module) -> list[list[Tensor]]:
    return [[row.clone() for row in p.detach()] for name, p in model.named_parameters() if "experts" in name]


class Shadow:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = clones(model)


LOOPS = {
    "by name": Loop(clones, lerp),
    "by state": Loop(lambda model: {k: v.clone() for k, v in model.state_dict().items()}, lerp_state),
    "of 16 bits": Loop(lambda model: clones(model, torch.bfloat16), lerp),
    "of numpy": Loop(lambda model: [p.detach().numpy().copy() for p in model.parameters()], lerp_arrays),
    "as a vector": Loop(lambda model: parameters_to_vector(model.parameters()).detach().clone(), lerp_vector),
    "lookahead": Loop(lambda model: list(clones(model).values()), look_ahead),
    "distance to the start": Loop(lambda model: list(clones(model).values()), before_step=pull_to_start),
    "masks": Loop(masks, before_step=mask_rows),
    "AveragedModel": Loop(
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        lambda kept, model, step: kept.update_parameters(model),
        sharded_first=True,
    ),
    "deepcopy": Loop(
        deepcopy, before_step=lambda kept, m: pull_to_start(list(kept.parameters()), m), sharded_first=True
    ),
}


def experts_of(model: nn.Module) -> list[Tensor]:
    return [p.detach() for name, p in model.named_parameters() if ".experts." in name]


def mask_broadcast(kept: list[Tensor], model: nn.Module) -> None:
    grads = [p.grad for name, p in model.named_parameters() if ".experts." in name]
    for gradient, mask in zip(grads, kept, strict=True):
        gradient.mul_(mask)


def broadcast_masks(model: nn.Module) -> list[Tensor]:
    """The second expert of each rank is frozen."""
    made = [torch.ones(len(p), 1, 1) for p in experts_of(model)]
    for mask in made:
        mask[1] = 0.0
    return made


def buffers(model: nn.Module) -> None:
    for number, one in enumerate(experts_of(model)):
        model.register_buffer(f"start_{number}", one.clone())


def in_a_group(optimizer: torch.optim.Optimizer, kept: list[Tensor]) -> None:
    optimizer.param_groups[0]["start"] = kept


def stacked(model: nn.Module) -> Tensor:
    return torch.stack([p.detach() for name, p in model.named_parameters() if name.endswith("experts.down_proj")])


OTHERWISE = {
    "flattened": Loop(lambda model: [one.flatten().clone() for one in experts_of(model)]),
    "flattened, of numpy": Loop(lambda model: [one.flatten().numpy().copy() for one in experts_of(model)]),
    "as matrices": Loop(lambda model: [one.flatten(1).clone() for one in experts_of(model)]),
    "turned": Loop(lambda model: [one.mT.contiguous() for one in experts_of(model)]),
    "of all layers": Loop(stacked),
    "broadcast masks": Loop(broadcast_masks, before_step=mask_broadcast),
    "buffers": Loop(buffers),
    "in a group": Loop(lambda model: [one.clone() for one in experts_of(model)], give=in_a_group),
}
"""Found, but `register_all` cannot tell what belongs where."""
HOLDERS = {"buffers": "model in run()"}
PASSIVE = ("by name", "by state", "of 16 bits", "of numpy", "as a vector")
"""They only read the model."""


def heard() -> tuple[logging.handlers.BufferingHandler, Callable[[], list[str]]]:
    handler = logging.handlers.BufferingHandler(10000)
    handler.setLevel(logging.WARNING)
    logging.getLogger("eplb_runtime").addHandler(handler)
    return handler, lambda: [record.getMessage() for record in handler.buffer]


def run(rank: int, loops: dict[str, Loop], register: bool, move: bool, steps: int = STEPS) -> dict[str, Any]:
    """One loop, or several that leave the model alone."""
    model = make_model("olmoe", experts=EXPERTS)
    kept: dict[str, Any] = {}
    if any(loop.sharded_first for loop in loops.values()):
        eplb.shard_experts(model)
        kept = {name: loop.make(model) for name, loop in loops.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"policy": "incremental" if move else "static", "interval": 2, "gate": "always"}
    balancer = eplb.attach(model, optimizer, config=config_from_settings({"dense_gradients": "allreduce", **settings}))
    balancer._wait_until_compiled()
    if move:
        balancer._plan_with(plan_shuffle)
    kept = kept or {name: loop.make(model) for name, loop in loops.items()}
    for name, loop in loops.items():
        loop.give(optimizer, kept[name])
    if register:
        for name, one in kept.items():
            balancer.register_all(name, one)
    handler, lines = heard()
    for step in range(steps):
        ids = batch_of(rank, step)
        model(input_ids=ids, labels=ids).loss.backward()
        balancer.reduce_gradients()
        for name, loop in loops.items():
            loop.before_step(kept[name], model)
        optimizer.step()
        optimizer.zero_grad()
        for name, loop in loops.items():
            loop.after_step(kept[name], model, step)
    logging.getLogger("eplb_runtime").removeHandler(handler)
    state = eplb.logical_state_dict(model)
    for name, layer in balancer.layer_of_parameter.items():
        rows = state[f"model.{name}"][balancer.logical_expert_ids(layer)]
        assert torch.equal(dict(model.named_parameters())[name], rows)
    for own, one in kept.items() if register or not move else ():
        for name, tensor in matched(one, dict(model.named_parameters()), list(balancer.layer_of_parameter)).items():
            state[f"{own} {name}"] = balancer.gather_experts(balancer.layer_of_parameter[name], tensor)
        if own == "by state" and (register or not move):
            model.load_state_dict(one)
    result = {"state": state, "epoch": balancer.placement.epoch, "said": lines()}
    balancer.close()
    return result


def loops(rank: int) -> dict[str, Any]:
    together = {name: loop for name, loop in LOOPS.items() if name in PASSIVE}
    groups = [together, *({name: loop} for name, loop in LOOPS.items() if name not in PASSIVE)]
    results: dict[str, Any] = {}
    for group in groups:
        static = run(rank, group, register=False, move=False)["state"]
        moved = run(rank, group, register=True, move=True)
        state = moved.pop("state")
        apart = max(float((static[key].double() - state[key].double()).abs().max()) for key in static)
        results[", ".join(group)] = moved | {"apart": apart}
    alone = {**LOOPS, **OTHERWISE}
    results["alone"] = {name: run(rank, {name: loop}, False, True, steps=5) for name, loop in alone.items()}
    return results


def test_what_a_loop_keeps_by_row_moves_along_or_nothing_moves() -> None:
    for result in run_ranks(2, loops):
        for name, alone in result.pop("alone").items():
            about = [line for line in alone["said"] if "experts stay where they are" in line]
            holder = HOLDERS.get(name, "kept in run()")
            says = "AdamW.param_groups[0]['start'][0] goes by row" if name == "in a group" else f"{holder} holds"
            assert len(about) == 1 and says in about[0] and "balancer.register" in about[0], name
            assert alone["epoch"] == 0, name
        for name, moved in result.items():
            assert moved["epoch"] > 1 and moved["apart"] == 0.0 and moved["said"] == [], name


def trained(rank: int, balancer: eplb.Balancer, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> int:
    """The epoch after so many steps, in which a loop holds what has the shape of experts by chance, or passing."""
    for step in range(steps):
        ids = batch_of(rank, step)
        torch.manual_seed(step)
        batch = [torch.randn_like(p) for p in balancer._runtime.registry.parameters()]  # noqa: F841
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]  # noqa: F841
        optimizer.step()
        optimizer.zero_grad()
    return balancer.placement.epoch


def attached(**options: object) -> tuple[eplb.Balancer, nn.Module, torch.optim.Optimizer]:
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = config_from_settings({"dense_gradients": "allreduce", "interval": 2, "gate": "always", **options})
    balancer = eplb.attach(model, optimizer, config=config)
    balancer._wait_until_compiled()
    balancer._plan_with(plan_shuffle)
    return balancer, model, optimizer


def copied_at(rank: int, at: int | None, nth: int = 0) -> tuple[int, dict[str, Any], list[str]]:
    """A loop that copies the weights after a step and pulls to them from then on: the step of this number, in a job
    that stands; or the nth after which a migration is under way."""
    options = {"policy": "static"} if at is not None else {"overlap": True, "max_pause_seconds": 30.0}
    balancer, model, optimizer = attached(**options)
    handler, lines = heard()
    kept: list[Tensor] = []
    for step in range(9):
        ids = batch_of(rank, step)
        model(input_ids=ids, labels=ids).loss.backward()
        balancer.reduce_gradients()
        if kept:
            pull_to_start(kept, model)
        optimizer.step()
        optimizer.zero_grad()
        nth -= at is None and balancer._rebalancer.overlapped.in_flight
        if not kept and (step == at or (at is None and nth < 0)):
            at, kept = step, list(clones(model).values())
    logging.getLogger("eplb_runtime").removeHandler(handler)
    state = eplb.logical_state_dict(model)
    balancer.close()
    assert at is not None
    return at, state, list(lines())


def copied_in_flight(rank: int) -> list[tuple[float, list[str]]]:
    """How far weights are from those of a job that stands, and what was said."""
    found = []
    for nth in range(2):
        at, moved, said = copied_at(rank, None, nth)
        _, static, _ = copied_at(rank, at)
        found.append((max(float((static[name] - moved[name]).abs().max()) for name in static), said))
    return found


def looks_in_flight(rank: int) -> list[bool]:
    """For each look for copies while experts were in flight, whether it did without reading the heap."""
    balancer, model, optimizer = attached(overlap=True, max_pause_seconds=30.0)
    looks, nothing_is_new = [], Outside._nothing_is_new

    def noted(self: Outside) -> bool:
        looks.append(nothing_is_new(self))
        return looks[-1]

    with patch.object(Outside, "_nothing_is_new", noted):
        for step in range(9):
            ids = batch_of(rank, step)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    balancer.close()
    return looks


def taught(rank: int, writes: Callable[[int], bool], says: bool) -> tuple[int, list[str]]:
    """The epoch of a model after some steps, beside an attached one without an optimizer, into which it is averaged row
    by row after some of them."""
    balancer, model, optimizer = attached()
    teacher = make_model("olmoe", experts=EXPERTS)
    other = eplb.attach(teacher, None, config=eplb.BalancerConfig(policy="static"))
    if says:
        balancer.register_all("teacher", teacher, moves=False)
    handler, lines = heard()
    for step in range(6):
        trained(rank, balancer, model, optimizer, 1)
        if writes(step):
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                    mine.lerp_(theirs, 0.3)
    logging.getLogger("eplb_runtime").removeHandler(handler)
    epoch = balancer.placement.epoch
    for one in (balancer, other):
        one.close()
    return epoch, lines()


def teachers(rank: int) -> dict[str, tuple[int, list[str]]]:
    return {
        "in each step": taught(rank, lambda step: True, says=False),
        "at the start": taught(rank, lambda step: step == 0, says=False),
        "said to be right": taught(rank, lambda step: True, says=True),
    }


def alarms(rank: int) -> dict[str, Any]:
    handler, lines = heard()
    said: dict[str, Any] = {"looks": looks_in_flight(rank), "in flight": copied_in_flight(rank)}
    said["teachers"] = teachers(rank)
    handler.buffer.clear()
    for copies in (0, EXPERTS // 2):  # as many copies as homes: ours have the shape of experts, too
        other = attached(policy="static")  # another attached model, as a reference in fine-tuning
        balancer, model, optimizer = attached(replica_slots=copies)
        said[f"nothing kept, {copies}"] = trained(rank, balancer, model, optimizer, 5), list(lines())
        if rank == 1:
            late = Shadow(model)
        epoch = trained(rank, balancer, model, optimizer, 4)
        said[f"made late, {copies}"] = epoch, lines()[-1]
        handler.buffer.clear()
        if rank == 1:
            balancer.register_all("late", late.shadow, moves=False)
        said[f"left alone, {copies}"] = trained(rank, balancer, model, optimizer, 4), list(lines())
        rows = per_expert(model) if rank == 0 else []
        epoch = trained(rank, balancer, model, optimizer, 4)
        said[f"rows, {copies}"] = epoch, lines()[-1]
        del rows
        late = None
        handler.buffer.clear()
        said[f"rows are gone, {copies}"] = trained(rank, balancer, model, optimizer, 4), list(lines())
        for one in (balancer, other[0]):
            one.close()
    return said


def test_what_only_has_the_shape_of_experts_stops_nothing() -> None:
    for said in run_ranks(2, alarms):
        assert len(said["looks"]) > 1 and all(said["looks"])
        for apart, lines in said["in flight"]:
            assert apart == 0.0 and any("kept in copied_at() holds" in line for line in lines), (apart, lines)
        epoch, (line,) = said["teachers"]["in each step"]
        assert epoch == 0 and "another attached model without an optimizer is written" in line
        assert all(said["teachers"][name][0] > 0 for name in ("at the start", "said to be right"))
        assert not any(lines for name, (_, lines) in said["teachers"].items() if name != "in each step")
        for copies in (0, EXPERTS // 2):
            first, lines = said[f"nothing kept, {copies}"]
            assert first > 0 and lines == []
            late, line = said[f"made late, {copies}"]
            assert late == first and line.startswith("rank 1: late in alarms() holds")
            alone, lines = said[f"left alone, {copies}"]
            assert alone > late and lines == []
            rows, line = said[f"rows, {copies}"]
            assert rows == alone and "rank 0: rows in alarms() holds" in line
            assert said[f"rows are gone, {copies}"][0] > rows and said[f"rows are gone, {copies}"][1] == []
