"""Plain state dicts, and copies of them that have lost what torch keeps beside: taken where they fit, refused by all
ranks alike where they do not."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict

import eplb_runtime as eplb

EXPERTS = 6
RANKS = 3
State = Mapping[str, Any]


def attached(**options: object) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, training.attach(model, optimizer, policy="static", **options)


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    training.step(model, optimizer, batch_of(rank, 0))


def swapped(current: eplb.Placement) -> eplb.Placement:
    """The first homes of ranks 0 and 1 change places; rank 2 keeps its own."""
    home, map_ = current.home.copy(), current.physical_to_logical.copy()
    for layer in range(current.num_layers):
        first, second = map_[layer, 0], map_[layer, EXPERTS // RANKS]
        home[layer, [first, second]] = home[layer, [second, first]]
        map_[layer, [0, EXPERTS // RANKS]] = second, first
    return eplb.Placement(map_, EXPERTS, RANKS, home, current.epoch + 1)


def move(balancer: eplb.Balancer) -> None:
    before = balancer.placement
    balancer.rebalancer._migrate(swapped(before))
    assert balancer.placement is not before


def saved(state: State) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[nn.Module], State]] = {
    "state_dict": lambda model: {key: value.clone() for key, value in model.state_dict().items()},
    "dict": lambda model: saved(dict(model.state_dict())),
    "of DCP": get_model_state_dict,
    "parameters": lambda model: {key: value.detach().clone() for key, value in model.named_parameters()},
}


def loaded(work: Callable[[], object]) -> str:
    try:
        work()
    except (RuntimeError, CheckpointException) as error:
        return str(error)
    return "loaded"


def rollback(rank: int) -> dict[str, list[str]]:
    """A loop that goes back to what it put aside."""
    model, optimizer, balancer = attached()
    train(rank, model, optimizer)
    said: dict[str, list[str]] = {}
    kept = {way: saved(copy(model)) for way, copy in COPIES.items()}
    of_optimizer = saved(optimizer.state_dict())
    bare = {key: of_optimizer[key] for key in ("state", "param_groups")}

    def try_all(when: str) -> None:
        said[when] = [loaded(lambda state=state: model.load_state_dict(state)) for state in kept.values()]
        said[when] += [loaded(lambda: set_model_state_dict(model, dict(kept["of DCP"])))]
        said[when] += [loaded(lambda state=state: optimizer.load_state_dict(state)) for state in (of_optimizer, bare)]

    before = eplb.logical_state_dict(model, optimizer)
    try_all("where it was taken")
    after = eplb.logical_state_dict(model, optimizer)
    assert all(torch.equal(before[key], after[key]) for key in before)
    move(balancer)
    moved = {key: value.clone() for key, value in model.state_dict().items()}
    try_all("after a move")
    mixed = {key: 0.5 * (value + moved[key]) for key, value in kept["state_dict"].items()}
    said["a mixture"] = [loaded(lambda: model.load_state_dict(mixed))]
    for key in moved:  # as averages are kept
        mixed[key] = moved[key].clone()
        for _ in range(300):
            mixed[key].mul_(0.9).add_(moved[key], alpha=0.1)
    said["an average"] = [loaded(lambda: model.load_state_dict(mixed))]
    move(balancer)
    try_all("after a move back")
    balancer.close()
    other, _, fresh = attached()
    said["fresh"] = [loaded(lambda: other.load_state_dict(moved))]
    fresh.close()
    assert not any("eplb_runtime_experts" in key for key in eplb.logical_state_dict(model))
    return said


def test_a_rollback_with_a_plain_dict_is_taken_by_all_ranks_or_by_none() -> None:
    results = run_ranks(RANKS, rollback)
    for said in results:
        assert set(said["where it was taken"]) == {"loaded"}
        refused = said["after a move"] + said["a mixture"] + said["fresh"]
        assert all(line != "loaded" and "\n" not in line for line in refused)
        assert all("use eplb_runtime.checkpoint, or eplb_runtime.logical_state_dict" in line for line in said["fresh"])
        assert "mixes rows of" in said["a mixture"][0]
        *marked, bare = said["after a move"]
        assert "does not say which experts of" in bare and "does not say" in marked[3]
        assert said["an average"] == ["loaded"]
        lost = [line != "loaded" for line in said["after a move back"]]
        assert lost == [False, False, False, True, False, False, True]
    assert "on rank 0 of the EP group" in results[2]["after a move"][0]


def of_another_rank(rank: int, states: list[State]) -> list[str]:
    model, optimizer, balancer = attached()
    said = [
        loaded(lambda state=state: model.load_state_dict(state)) for state in (states[(rank + 1) % RANKS], states[0])
    ]
    train(rank, model, optimizer)
    shared = [optimizer.state_dict()]
    dist.broadcast_object_list(shared)
    said += [loaded(lambda: optimizer.load_state_dict(shared[0]))]
    balancer.close()
    return said


def only_state(rank: int) -> State:
    model, _, balancer = attached()
    state: dict[str, Tensor] = {key: value.clone() for key, value in model.state_dict().items()}
    balancer.close()
    return state


def test_a_plain_dict_that_one_rank_alone_could_take_is_refused_by_all() -> None:
    states = run_ranks(RANKS, only_state)
    for rank, said in enumerate(run_ranks(RANKS, of_another_rank, states)):
        assert all("holds experts [" in line and "here stand" in line for line in said)
        assert all(line.startswith("rank ") == (rank == 0) for line in said[1:])


def by_dcp(rank: int, folder: str) -> list[str]:
    """What torch.distributed.checkpoint says of plain states, saved, and read back in place from a whole model's."""
    model, optimizer, balancer = attached()
    train(rank, model, optimizer)
    by_torch = get_state_dict(model, optimizer)
    states = [{"model": model.state_dict()}, {"optim": optimizer.state_dict()}, by_torch[0], {"optim": by_torch[1]}]
    states += [dict(model.named_parameters())]
    torch.save(states[-1], f"{folder}/{rank}.pt")
    assert torch.load(f"{folder}/{rank}.pt").keys() == states[-1].keys()
    said = [loaded(lambda state=state: dcp.save(state, checkpoint_id=folder)) for state in states]
    assert not list(Path(folder).glob("**/*.distcp"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    dcp.save({"model": make_model("olmoe", experts=EXPERTS).state_dict()}, checkpoint_id=folder)
    said += [loaded(lambda state=state: dcp.load(state, checkpoint_id=folder)) for state in (states[0], states[-1])]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    balancer.close()
    return said


def test_dcp_keeps_no_rows_of_one_rank_for_all(tmp_path: Path) -> None:
    for said in run_ranks(RANKS, by_dcp, str(tmp_path)):
        assert all("LogicalState(model, optimizer)" in line for line in said[:-2]), said
        assert "loaded" not in said
