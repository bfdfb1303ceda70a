"""A checkpoint knows no placement: saved with any, it loads bit-equal with any other, at any EP size, or without us.

Each claim of equality has its control: rows written in the order of their slots must be noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import eplb_runtime as eplb
from eplb_runtime.balancer.balancer import Balancer
from eplb_runtime.checkpoint import CheckpointError, LogicalState
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.planner.shuffle import plan_shuffle

EXPERTS = 8
PARTS = 4
"""The batch of a step: each rank takes its share of so many parts."""
BEFORE, AFTER = range(4), range(4, 8)
"""Steps ahead of a checkpoint and after it: experts move in both."""

State = dict[str, torch.Tensor]
Saved = Callable[..., tuple[str, list[dict[str, Any]]]]


def nothing() -> None:
    pass


def rows_in_slot_order() -> None:
    """Every rank takes its rows for the experts that would stand there in logical order."""
    Balancer._home_experts = lambda self, layer: [
        self._runtime.job.ep_rank * self.placement.homes_per_rank + row for row in range(self.placement.homes_per_rank)
    ]


@dataclass(frozen=True)
class Job:
    family: str = "olmoe"
    optimizer: str = "AdamW"
    dtype: torch.dtype = torch.float32
    replica_slots: int = 0
    attached: bool = True
    seed: int = 0
    ep_size: int | None = None
    damage: Callable[[], None] = nothing


def scrambled(layers: int, ranks: int, job: Job) -> eplb.Placement:
    """Experts anywhere, otherwise than logical order in each layer, and for each job."""
    initial = eplb.Placement.initial(layers, EXPERTS, ranks, job.replica_slots)
    random = np.random.default_rng(10 * ranks + job.seed)
    other = [random.permutation(EXPERTS) for _ in range(layers)]
    slots = np.stack([np.append(other[layer], -1)[initial.physical_to_logical[layer]] for layer in range(layers)])
    home = np.empty_like(initial.home)
    for layer in range(layers):
        home[layer, other[layer]] = initial.home[layer]
    return eplb.Placement(slots, EXPERTS, ranks, home)


def build(job: Job) -> tuple[nn.Module, torch.optim.Optimizer, Balancer | None]:
    job.damage()
    model = make_model(job.family, experts=EXPERTS, seed=job.seed).to(job.dtype)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    groups = [{"params": others}, {"params": experts, "lr": 2e-3}]
    options: dict[str, Any] = {"AdamW": {"weight_decay": 0.1}, "SGD": {"momentum": 0.9}}.get(job.optimizer, {})
    optimizer = getattr(torch.optim, job.optimizer)(groups, lr=3e-3, **options)
    if not job.attached:
        return model, optimizer, None
    ranks = job.ep_size or dist.get_world_size()
    config = eplb.BalancerConfig(
        interval=3,
        gate="always",
        dense_gradients="allreduce",
        replica_slots=job.replica_slots,
        initial_placement=scrambled(2, ranks, job),
        dispatch=eplb.DispatchConfig(split_least_tokens=0 if job.replica_slots else 64),
    )
    group = None
    if job.ep_size is not None:
        sets = [list(range(first, first + job.ep_size)) for first in range(0, dist.get_world_size(), job.ep_size)]
        group = [dist.new_group(ranks) for ranks in sets][dist.get_rank() // job.ep_size]
    balancer = eplb.attach(model, optimizer, config=config, ep_group=group)
    balancer._plan_with(plan_shuffle)  # every decision moves something
    return model, optimizer, balancer


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, world_size: int = 1
) -> list[float]:
    """Losses of this rank, of a batch of ``PARTS`` parts that is the same at any world size."""
    losses = []
    model.train()
    for step in steps:
        share = PARTS // world_size
        ids = torch.cat([batch_of(part, step) % 12 + 12 * (step // 2 % 7) for part in range(PARTS)])
        ids = ids[rank * 2 * share : (rank + 1) * 2 * share]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_and_go_on(rank: int, job: Job, folder: str, how: str = "save") -> dict[str, Any]:
    """Train, save, train on: what a run that is never interrupted does."""
    model, optimizer, balancer = build(job)
    train(model, optimizer, BEFORE, rank, dist.get_world_size())
    if balancer is not None:
        assert not balancer.events.of_type(RebalanceAborted)
    state = eplb.logical_state_dict(model, optimizer)
    if how == "save":
        eplb.checkpoint.save(folder, model, optimizer)
    elif how == "dcp":
        eplb.checkpoint.save(folder, model, optimizer, format="dcp")
    elif how == "plain":
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    else:
        dcp.save({"app": LogicalState(model, optimizer), "other": torch.ones(3)}, checkpoint_id=folder)
    placement = balancer.placement if balancer is not None else None
    losses = train(model, optimizer, AFTER, rank, dist.get_world_size())
    return {
        "state": state,
        "losses": losses,
        "placement": placement,
        "after": eplb.logical_state_dict(model, optimizer),
    }


def load_and_go_on(rank: int, job: Job, folder: str, key: str = "") -> dict[str, Any]:
    """Another process that starts from the checkpoint, from other weights and other options."""
    model, optimizer, balancer = build(replace(job, seed=job.seed + 1))
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    eplb.checkpoint.load(folder, model, optimizer, key=key)
    assert [group["lr"] for group in optimizer.param_groups] == [3e-3, 2e-3]
    state = eplb.logical_state_dict(model, optimizer)
    placement = balancer.placement if balancer is not None else None
    losses = train(model, optimizer, AFTER, rank, dist.get_world_size())
    return {
        "state": state,
        "losses": losses,
        "placement": placement,
        "after": eplb.logical_state_dict(model, optimizer),
    }


def different(one: State, other: State) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


def mean_losses(results: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([result["losses"] for result in results]).mean(0)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A folder that nobody writes to any more, and what each rank has saved there: one for each question."""

    @cache
    def saved(world_size: int, how: str = "save") -> tuple[str, list[dict[str, Any]]]:
        folder = str(tmp_path_factory.mktemp("checkpoint") / "saved")
        return folder, run_ranks(world_size, save_and_go_on, Job(), folder, how)

    return saved


JOBS = {
    "AdamW": (Job(), "save"),
    "SGD, biases, DCP": (Job("gpt_oss", "SGD"), "dcp"),
    "bfloat16, buffers": (Job("deepseek_v3", dtype=torch.bfloat16), "save"),
    "Adagrad, replicas": (Job("olmoe", "Adagrad", replica_slots=1), "save"),
}
THERE = {"EP 4": (4, {}), "EP 2": (2, {"replica_slots": 0}), "EP 1": (1, {"replica_slots": 0})}
THERE |= {"no balancer": (1, {"attached": False})}
"""Where they are loaded: how many ranks, and what of the job is otherwise."""


def save_all(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: save_and_go_on(rank, job, str(folder / name), how) for name, (job, how) in JOBS.items()}


def load_all(rank: int, folder: Path, otherwise: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: load_and_go_on(rank, replace(job, **otherwise), str(folder / name)) for name, (job, _) in JOBS.items()
    }


def test_saved_at_ep_4_it_loads_bit_equal_at_ep_4_2_1_and_without_a_balancer(tmp_path: Path) -> None:
    saved_all = run_ranks(4, save_all, tmp_path)
    for place, (world_size, otherwise) in THERE.items():
        loaded_all = run_ranks(world_size, load_all, tmp_path, otherwise)
        for name, (job, _) in JOBS.items():
            saved, loaded = ([of_rank[name] for of_rank in of_all] for of_all in (saved_all, loaded_all))
            for result in loaded:
                assert different(saved[0]["state"], result["state"]) == [], (name, place)
            tolerance = 2e-2 if job.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(mean_losses(loaded), mean_losses(saved), rtol=tolerance, atol=tolerance)
            if place == "EP 4":
                # The warm start: the same placement, hence the very same bits ever after.
                assert [r["placement"].digest() for r in loaded] == [r["placement"].digest() for r in saved]
                if not job.replica_slots:
                    assert [r["losses"] for r in loaded] == [r["losses"] for r in saved]
                    assert different(saved[0]["after"], loaded[0]["after"]) == []


def test_and_back_from_ep_2_and_from_plain_dcp_without_a_balancer_to_ep_4(tmp_path: Path, saved_once: Saved) -> None:
    plain, keyed = str(tmp_path / "plain"), str(tmp_path / "keyed")
    at_ep_2, saved_at_ep_2 = saved_once(2)
    sources = {
        (at_ep_2, ""): saved_at_ep_2,
        (plain, ""): run_ranks(1, save_and_go_on, Job(attached=False), plain, "plain"),
        (keyed, "app"): run_ranks(2, save_and_go_on, Job(), keyed, "app"),
    }
    of_ranks = run_ranks(4, load_several, list(sources))
    for source, saved in sources.items():
        for replica_slots in (0, 1):
            loaded = [of_rank[source, replica_slots] for of_rank in of_ranks]
            for result in loaded:
                assert different(saved[0]["state"], result["state"]) == [], source
            torch.testing.assert_close(mean_losses(loaded), mean_losses(saved), rtol=1e-4, atol=1e-4)


def load_several(rank: int, sources: list[tuple[str, str]]) -> dict[Any, dict[str, Any]]:
    """Each without copies and with."""
    return {
        ((folder, key), replica_slots): load_and_go_on(rank, Job(replica_slots=replica_slots), folder, key)
        for folder, key in sources
        for replica_slots in (0, 1)
    }


def test_two_ep_groups_write_each_expert_once(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(4, save_and_go_on, Job(ep_size=2), folder, "dcp")
    loaded = run_ranks(2, load_and_go_on, Job(), folder)
    assert different(saved[0]["state"], loaded[0]["state"]) == []
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data.values()
    written = sum(file.stat().st_size for file in Path(folder).glob("*.distcp"))
    assert sum(info.length for info in stored) == written


def plain_load(rank: int, folder: str) -> State:
    """DCP's own calls, no balancer and none of our code."""
    model, optimizer, _ = build(Job(attached=False, seed=1))
    train(model, optimizer, range(1))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return eplb.logical_state_dict(model, optimizer)


def test_plain_dcp_reads_it_as_whole_tensors(saved_once: Saved) -> None:
    folder, saved = saved_once(4, "dcp")
    (loaded,) = run_ranks(1, plain_load, folder)
    assert different(saved[0]["state"], loaded) == []


def test_each_rank_writes_its_own_experts_only(saved_once: Saved) -> None:
    folder, saved = saved_once(4, "dcp")
    placement = saved[0]["placement"]
    storage = dcp.FileSystemReader(folder).read_metadata().storage_data
    seen = set()
    for index, info in storage.items():
        if index.fqn.endswith("layers.0.mlp.experts.down_proj"):
            writer = int(info.relative_path.split("_")[2])
            first = int(index.offset[0])
            assert placement.home[0, first] // placement.slots_per_rank == writer
            seen.add(writer)
    assert seen == {0, 1, 2, 3}


def test_control_rows_in_slot_order_are_noticed(tmp_path: Path, saved_once: Saved) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(2, save_and_go_on, Job(damage=rows_in_slot_order), folder)
    (loaded,) = run_ranks(1, load_and_go_on, Job(attached=False), folder)
    found = different(saved[0]["state"], loaded["state"])
    assert any("experts.down_proj" in name for name in found)
    good, saved = saved_once(2)
    loaded = run_ranks(2, load_and_go_on, Job(damage=rows_in_slot_order), good)[0]
    assert any("experts.down_proj" in name for name in different(saved[0]["state"], loaded["state"]))


# -- in memory -------------------------------------------------------------------------------------------------------


def in_memory(rank: int, job: Job, state: State) -> list[dict[str, Any]]:
    return [from_memory(rank, job, state, fresh) for fresh in (True, False)]


def from_memory(rank: int, job: Job, state: State, fresh: bool) -> dict[str, Any]:
    """Into an optimizer that has no state yet, or one that has stepped."""
    model, optimizer, _ = build(replace(job, seed=1))
    if not fresh:
        train(model, optimizer, BEFORE, rank, dist.get_world_size())
    eplb.load_logical_state_dict(model, optimizer, state)
    again = eplb.logical_state_dict(model, optimizer)
    return {"state": again, "losses": train(model, optimizer, AFTER, rank, dist.get_world_size())}


def test_what_logical_state_dict_gives_can_be_taken_anywhere(saved_once: Saved) -> None:
    _, saved = saved_once(2)
    for world_size, job in [(4, Job()), (2, Job()), (1, Job(attached=False))]:
        for loaded in zip(*run_ranks(world_size, in_memory, job, saved[0]["state"]), strict=True):
            for result in loaded:
                assert different(saved[0]["state"], result["state"]) == []
            torch.testing.assert_close(mean_losses(loaded), mean_losses(saved), rtol=1e-4, atol=1e-4)
    for damaged in run_ranks(2, in_memory, Job(damage=rows_in_slot_order), saved[0]["state"])[0]:
        assert any("experts.down_proj" in name for name in different(saved[0]["state"], damaged["state"]))


def wrapped(rank: int) -> None:
    """What a host puts around the model changes no name."""
    model, optimizer, _ = build(Job())
    expected = eplb.logical_state_dict(model, optimizer)
    for outer in (nn.parallel.DistributedDataParallel(model), torch.compile(model)):
        assert different(expected, eplb.logical_state_dict(outer, optimizer)) == []
    plain = make_model("olmoe")
    assert different(eplb.logical_state_dict(plain), eplb.logical_state_dict(torch.compile(plain))) == []


def test_wrappers_are_looked_through() -> None:
    run_ranks(2, wrapped)


# -- warm start ------------------------------------------------------------------------------------------------------


def load_without_warm_start(rank: int, folder: str) -> dict[str, Any]:
    model, optimizer, balancer = build(Job(seed=1))
    start = balancer.placement.digest()
    eplb.checkpoint.load(folder, model, optimizer, warm_start=False)
    assert balancer.placement.digest() == start
    return {
        "state": eplb.logical_state_dict(model, optimizer),
        "losses": train(model, optimizer, AFTER, rank, 2),
    }


def test_without_the_warm_start_the_losses_are_the_same(saved_once: Saved) -> None:
    folder, saved = saved_once(2)
    loaded = run_ranks(2, load_without_warm_start, folder)
    assert different(saved[0]["state"], loaded[0]["state"]) == []
    assert [r["losses"] for r in loaded] == [r["losses"] for r in saved]


def roll_back(rank: int, folder: str) -> None:
    """Plain ``dcp.load`` into a job that runs: its optimizer has state to load into."""
    model, optimizer, balancer = build(Job())
    train(model, optimizer, BEFORE, rank, 2)
    state = {"app": LogicalState(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    expected = eplb.logical_state_dict(model, optimizer)
    placement = balancer.placement
    balancer._plan_with(plan_shuffle)
    losses = train(model, optimizer, AFTER, rank, 2)
    assert balancer.placement.digest() != placement.digest()
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    dcp.load(state, checkpoint_id=folder)
    assert balancer.placement.digest() == placement.digest()
    assert different(expected, eplb.logical_state_dict(model, optimizer)) == []
    assert train(model, optimizer, AFTER, rank, 2) == losses


def test_a_running_job_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, roll_back, str(tmp_path / "checkpoint"))


# -- asynchronous ----------------------------------------------------------------------------------------------------


class SlowWriter(dcp.FileSystemWriter):
    """Writes nothing before it is told to."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.go = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.go.wait(60)
        return super().write_data(plan, planner)


def save_asynchronously(rank: int, folder: str, tear: bool) -> State:
    """A commit falls between the start of the save and its end."""
    model, optimizer, balancer = build(Job())
    train(model, optimizer, range(3), rank, 2)
    expected = eplb.logical_state_dict(model, optimizer)
    writer = SlowWriter(folder)
    if tear:
        writer.stage = lambda state: state
    future = eplb.checkpoint.async_save(folder, model, optimizer, storage_writer=writer)
    before = len(balancer.events.of_type(RebalanceCommitted))
    train(model, optimizer, range(3, 6), rank, 2)
    assert len(balancer.events.of_type(RebalanceCommitted)) > before, "no commit while the save was under way"
    assert not balancer.events.of_type(RebalanceAborted)
    writer.go.set()
    future.result()
    return expected


def test_a_commit_during_an_asynchronous_save_does_not_tear_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(2, save_asynchronously, folder, False)
    (loaded,) = run_ranks(1, load_and_go_on, Job(attached=False), folder)
    assert different(saved[0], loaded["state"]) == []


def test_control_without_the_staging_copy_it_would_be_torn(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(2, save_asynchronously, folder, True)
    (loaded,) = run_ranks(1, load_and_go_on, Job(attached=False), folder)
    assert any("experts" in name for name in different(saved[0], loaded["state"]))


def staging_in_the_background(rank: int, folder: str) -> State:
    """DCP's own asynchronous staging: a commit that is due meanwhile waits until the copy is made."""
    model, optimizer, balancer = build(Job())
    train(model, optimizer, range(3), rank, 2)
    assert balancer._rebalancer._pending is not None, "a decision is on its way"
    expected = eplb.logical_state_dict(model, optimizer)
    writer = SlowWriter(folder)
    group = dist.new_group(backend="gloo")
    with balancer.quiesce():
        future = dcp.async_save(
            LogicalState(model, optimizer).state_dict(),
            storage_writer=writer,
            process_group=group,
        )
        epoch = balancer.placement.epoch
        for _ in range(2):  # due now; as steps of a run whose weights do not change
            balancer.step()
        assert balancer.placement.epoch == epoch
        assert balancer._rebalancer._pending is not None
    balancer.step()
    assert balancer.placement.epoch > epoch, "the commit comes with the first step after"
    writer.go.set()
    future.result()
    return expected


def test_a_commit_waits_while_the_balancer_is_quiet(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(2, staging_in_the_background, folder)
    (loaded,) = run_ranks(1, load_and_go_on, Job(attached=False), folder)
    assert different(saved[0], loaded["state"]) == []


# -- what does not fit -----------------------------------------------------------------------------------------------


def refused(rank: int, folder: str) -> dict[str, str]:
    said = {}

    def trying(case: str, action: Callable[[], object]) -> None:
        try:
            action()
            said[case] = "nothing was refused"
        except CheckpointError as error:
            said[case] = str(error)

    model, optimizer, _ = build(Job())
    before = eplb.logical_state_dict(model, optimizer)
    trying("nothing there", lambda: eplb.checkpoint.load(folder + "-none", model, optimizer))
    trying("another key", lambda: eplb.checkpoint.load(folder, model, optimizer, key="app"))
    trying("another DCP key", lambda: eplb.checkpoint.load(folder + "-app", model, optimizer, key="other"))
    fresh, fresh_optimizer, _ = build(Job())
    state = LogicalState(fresh, fresh_optimizer)
    trying("fresh optimizer", lambda: dcp.load({"app": state}, checkpoint_id=folder + "-app"))
    larger = make_model("olmoe", experts=EXPERTS, layers=3)
    trying("more layers", lambda: eplb.checkpoint.load(folder, larger))
    smaller = make_model("olmoe", experts=EXPERTS, layers=1)
    trying("fewer layers", lambda: eplb.checkpoint.load(folder, smaller))
    wider = make_model("olmoe", experts=EXPERTS * 2)
    trying("more experts", lambda: eplb.checkpoint.load(folder, wider))
    trying("another optimizer", lambda: eplb.checkpoint.load(folder, model, torch.optim.SGD(wider.parameters(), lr=1)))
    trying("in memory", lambda: eplb.load_logical_state_dict(wider, None, before))
    one_group = torch.optim.AdamW(model.parameters())
    trying("other groups", lambda: eplb.checkpoint.load(folder, model, one_group))
    assert different(before, eplb.logical_state_dict(model, optimizer)) == []
    return said


def save_twice(rank: int, folder: str) -> None:
    model, optimizer, _ = build(Job())
    train(model, optimizer, range(2), rank, 2)
    eplb.checkpoint.save(folder, model, optimizer)
    dcp.save({"app": LogicalState(model, optimizer)}, checkpoint_id=folder + "-app")


def test_what_does_not_fit_is_refused_with_one_line_and_nothing_is_changed(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    run_ranks(2, save_twice, folder)
    expected = {
        "nothing there": "cannot be read as a checkpoint",
        "another key": "has no keys, as DCP's checkpoints may have",
        "another DCP key": "has no other.model.",
        "fresh optimizer": "load it with eplb_runtime.checkpoint.load",
        "more layers": "has no model.model.layers.2.",
        "fewer layers": "has no place in the model",
        "more experts": "has shape (8, 32) in",
        "another optimizer": "holds a tensor that is no parameter of this model",
        "in memory": "has shape (8, 32) in the state, (16, 32) in the model",
        "other groups": "several with different options when saved",
    }
    for said in run_ranks(2, refused, folder):
        assert said.keys() == expected.keys()
        for case, text in said.items():
            assert expected[case] in text, f"{case}: {text}"
            assert "\n" not in text
