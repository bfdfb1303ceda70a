"""A checkpoint knows no placement: saved with any, it loads bit-equal with any other, at any EP size, or without us.

Rows that are written in the order of their slots are noticed: `mutants`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support import training
from support.job import Job, Run, changing
from support.moe_models import make_model
from support.ranks import run_ranks
from support.seen import assert_refused, differing
from support.shuffle import plan_shuffle
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import RebalanceAborted
from eplb_runtime.planner.policies import shuffled

EXPERTS = 8
PARTS = 4
"""The batch of a step: each rank takes its share of so many parts."""
BEFORE = AFTER = 4
"""Steps ahead of a checkpoint and after it: experts move in both."""

State = dict[str, torch.Tensor]
Saved = Callable[[int], tuple[Path, list[dict[str, Any]]]]


def share_of_step(rank: int, step: int) -> torch.Tensor:
    """This rank's part of a batch that is the same at any world size."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    parts = range(rank * PARTS // ranks, (rank + 1) * PARTS // ranks)
    return torch.cat([changing(part, step) for part in parts])


def in_two_groups(parameters: list[nn.Parameter], kind: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 2e-3}]
    return getattr(torch.optim, kind)(groups, lr=3e-3, **options)


ADAMW = partial(in_two_groups, weight_decay=0.1)
SGD = partial(in_two_groups, kind="SGD", momentum=0.9)
REPLICAS = {"replica_slots": 1}
job = partial(Job, optimizer=ADAMW, batches=share_of_step, planner=plan_shuffle)


def attached(rank: int, job: Job) -> Run:
    """Experts are anywhere, otherwise than in logical order in each layer, and for each seed."""
    replica_slots = job.settings.get("replica_slots", 0)
    ranks = job.ep or len(job.settings.get("ranks", Ranks()).job or range(dist.get_world_size()))
    start = eplb.Placement.initial(2, EXPERTS, ranks, replica_slots).with_epoch(2 * job.seed)
    scrambled = shuffled(start, np.ones((2, EXPERTS))).with_epoch(0)
    settings = {"interval": 3, "lag": 1, "initial_placement": scrambled, **job.settings}
    return Run(rank, replace(job, settings=settings)).attach()


def save_and_go_on(rank: int, job: Job, folder: str, how: str) -> dict[str, Any]:
    """Train, save, train on: what a run that is never interrupted does."""
    run = attached(rank, job).train(BEFORE)
    assert not run.balancer.events.of_type(RebalanceAborted)
    eplb.checkpoint.save(folder, run.model, run.optimizer, format=how)
    return found(run)


def load_and_go_on(rank: int, job: Job, folder: str, balanced: bool) -> dict[str, Any]:
    """Another process that starts from the checkpoint, from other weights and other options."""
    job = replace(job, seed=job.seed + 1)
    run = attached(rank, job) if balanced else Run(rank, job)
    run.steps = BEFORE
    for group in run.optimizer.param_groups:
        group["lr"] = 1.0
    eplb.checkpoint.load(folder, run.model, run.optimizer)
    assert [group["lr"] for group in run.optimizer.param_groups] == [3e-3, 2e-3]
    return found(run)


def take_and_go_on(rank: int, job: Job, state: State, balanced: bool) -> dict[str, Any]:
    """One in memory, by an optimizer that has state already."""
    job = replace(job, seed=job.seed + 1)
    run = (attached(rank, job) if balanced else Run(rank, job)).train(BEFORE)
    eplb.load_logical_state_dict(run.model, run.optimizer, state)
    return found(run)


def found(run: Run) -> dict[str, Any]:
    """State and placement as they are, and what a run makes of them."""
    state, placement = run.state(), run.balancer.placement if hasattr(run, "balancer") else None
    run.losses.clear()
    return {"state": state, "placement": placement, "losses": run.train(AFTER).losses, "after": run.state()}


JOBS = {
    "AdamW": (job(family="mixtral", ep=2), "safetensors"),
    "SGD, biases, DCP": (job(family="gpt_oss", optimizer=SGD), "dcp"),
    "bfloat16, buffers": (job(family="deepseek_v3", dtype=torch.bfloat16), "safetensors"),
    "Adagrad, replicas": (job(optimizer=partial(in_two_groups, kind="Adagrad"), settings=REPLICAS), "safetensors"),
    "slices": (job(family="gpt_oss", ep=2, sliced=True), "safetensors"),
}
PLACES: dict[str, tuple[int, int, list[str], dict[str, Any]]] = {
    "4 to 4": (4, 4, list(JOBS), {}),
    "4 to slices": (4, 4, ["SGD, biases, DCP"], {"ep": 2, "sliced": True}),
    "4 to 2": (4, 2, list(JOBS), {"settings": {}, "sliced": False}),
    "4 to no balancer": (4, 1, list(JOBS), {"sliced": False}),
    "2 to 4 with replicas": (2, 4, ["AdamW", "Adagrad, replicas"], {"settings": REPLICAS}),
}
"""Ranks that save and that load, which jobs, and what of the job is otherwise then; one rank has no balancer."""
IN_MEMORY = "AdamW"
"""What is saved so is taken once more, as `logical_state_dict` gives it."""


def save_all(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    jobs = {name for before, _, names, _ in PLACES.values() for name in names if before == dist.get_world_size()}
    return {name: save_and_go_on(rank, JOBS[name][0], str(folder / name), JOBS[name][1]) for name in sorted(jobs)}


def load_all(rank: int, folder: Path, names: list[str], otherwise: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found, balanced = {}, dist.get_world_size() > 1
    for name in names:
        job = replace(JOBS[name][0], **otherwise)
        found[name] = load_and_go_on(rank, job, str(folder / name), balanced)
        if name == IN_MEMORY:
            found["in memory"] = take_and_go_on(rank, job, found[name]["state"], balanced)
    return found


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Folders of all jobs that nobody writes to any more, and what each rank has saved there."""

    @cache
    def saved(ranks: int) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("checkpoints")
        return folder, run_ranks(ranks, save_all, folder)

    return saved


def same_training(saved: list[dict[str, Any]], loaded: list[dict[str, Any]], tolerance: float = 1e-4) -> None:
    for result in loaded:
        assert differing(saved[0]["state"], result["state"]) == []
    mine, theirs = (torch.tensor([one["losses"] for one in results]).mean(0) for results in (loaded, saved))
    torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("place", PLACES)
def test_it_loads_bit_equal_anywhere(place: str, saved_by: Saved) -> None:
    before, ranks, names, otherwise = PLACES[place]
    folder, saved_all = saved_by(before)
    loaded_all = run_ranks(ranks, load_all, folder, names, otherwise)
    for name in names:
        job = JOBS[name][0]
        saved, loaded = ([of_rank[name] for of_rank in of_all] for of_all in (saved_all, loaded_all))
        same_training(saved, loaded, 2e-2 if job.dtype == torch.bfloat16 else 1e-4)
        if name == IN_MEMORY:
            same_training(saved, [of_rank["in memory"] for of_rank in loaded_all])
        if place == "4 to 4":
            # The warm start: the same placement, hence the very same bits ever after.
            assert [r["placement"].digest() for r in loaded] == [r["placement"].digest() for r in saved]
            if not job.settings:
                assert [r["losses"] for r in loaded] == [r["losses"] for r in saved]
                assert differing(saved[0]["after"], loaded[0]["after"]) == []


@pytest.mark.long
@pytest.mark.parametrize(("name", "key"), [("AdamW", "exp_avg"), ("Adagrad, replicas", "sum")])
def test_the_library_reads_what_each_rank_has_written_a_share_of(name: str, key: str, saved_by: Saved) -> None:
    folders, results = saved_by(4)
    folder, state, tensors = folders / name, results[0][name]["state"], {}
    for part in ("model", "optimizer"):
        weight_map = json.loads((folder / f"{part}.safetensors.index.json").read_text())["weight_map"]
        files = sorted(set(weight_map.values()))
        assert [file.split("-")[:2] for file in files] == [[part, f"{rank:05d}"] for rank in range(4)]
        loaded = {file: load_file(folder / file) for file in files}
        assert {name: file for file in files for name in loaded[file]} == weight_map, "each tensor is there once"
        tensors |= {f"{part}.{name}": loaded[file][name] for name, file in weight_map.items()}
        nbytes = [sum(tensor.nbytes for tensor in loaded[file].values()) for file in files]
        assert max(nbytes) < 1.5 * min(nbytes)
    assert sum(tensor.nbytes for tensor in tensors.values()) == sum(tensor.nbytes for tensor in state.values())
    for expert in range(EXPERTS):
        one = tensors[f"optimizer.model.layers.0.mlp.experts.{expert}.down_proj.{key}"]
        assert torch.equal(one, state[f"optimizer.model.layers.0.mlp.experts.down_proj.{key}"][expert])
    model = make_model(JOBS[name][0].family, seed=1).from_pretrained(folder)
    expected = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
    assert differing(dict(model.state_dict()), expected) == []


def plain_load(folder: str) -> State:
    """DCP's own calls, no balancer and none of our code."""
    run = Run(0, job(seed=1)).train(1)
    model, optimizer = run.model, run.optimizer
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return eplb.logical_state_dict(model, optimizer)


@pytest.mark.long
def test_plain_dcp_reads_whole_tensors_to_which_each_rank_has_written_its_own_experts(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(4, save_and_go_on, job(), folder, "dcp")
    assert differing(saved[0]["state"], plain_load(folder)) == []
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


def wrapped(rank: int) -> None:
    """What a host puts around the model changes no name."""
    run = attached(rank, job())
    for outer in (nn.parallel.DistributedDataParallel(run.model), torch.compile(run.model)):
        assert differing(run.state(), eplb.logical_state_dict(outer, run.optimizer)) == []
    plain = make_model("olmoe")
    expected = eplb.logical_state_dict(plain)
    assert differing(expected, eplb.logical_state_dict(torch.compile(plain))) == []
    state = eplb.logical_state_dict(fully_shard(plain, mesh=training.meshes(1, 2)[0]))
    nn.init.zeros_(plain.lm_head.weight)
    assert differing(expected, state) == [], "also of a DTensor in one piece it is a copy"


@pytest.mark.long
def test_wrappers_are_looked_through() -> None:
    run_ranks(2, wrapped)


def roll_back(rank: int, folder: str) -> None:
    """A load into a job that runs: its optimizer has state to load into. Rank 0 is not of the job, and never comes."""
    if rank == 0:
        return
    run = attached(rank, job(settings={"ranks": Ranks(job=(1, 2))})).train(BEFORE)
    eplb.checkpoint.save(folder, run.model, run.optimizer, format="dcp")
    expected, placement = run.state(), run.balancer.placement
    losses = run.train(AFTER).losses[BEFORE:]
    assert run.balancer.placement.digest() != placement.digest()
    for group in run.optimizer.param_groups:
        group["lr"] = 1.0
    eplb.checkpoint.load(folder, run.model, run.optimizer)
    assert run.balancer.placement.digest() == placement.digest()
    assert differing(expected, run.state()) == []
    run.steps = BEFORE
    assert run.train(AFTER).losses[-AFTER:] == losses


def test_a_running_job_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    run_ranks(3, roll_back, str(tmp_path / "checkpoint"))


def refused(rank: int, folder: str) -> None:
    run = attached(rank, job())
    model, optimizer, before = run.model, run.optimizer, run.state()
    larger, smaller = (make_model("olmoe", experts=EXPERTS, layers=layers) for layers in (3, 1))
    wider = make_model("olmoe", experts=EXPERTS * 2)
    sgd, one_group = torch.optim.SGD(wider.parameters(), lr=1), torch.optim.AdamW(model.parameters())
    load, take = eplb.checkpoint.load, eplb.load_logical_state_dict
    part = {f"optimizer.{name}.exp_avg": p.detach() for name, p in model.named_parameters() if ".experts." in name}
    cases: dict[str, Callable[[], object]] = {
        "-none cannot be used: FileNotFoundError": lambda: load(folder + "-none", model, optimizer),
        "has no model.model.layers.2.": lambda: load(folder, larger),
        "has no place in the model": lambda: load(folder, smaller),
        "has shape (8, 32) in": lambda: load(folder, wider),
        "holds a tensor that is no parameter of this model": lambda: load(folder, model, sgd),
        "has shape (8, 32) in the state, (16, 32) in the model": lambda: take(wider, None, before),
        "has shape (4, ": lambda: take(model, optimizer, before | part),
        "1.weight is outside the attached model": lambda: load(folder, nn.Sequential(model, nn.Linear(1, 1))),
        "several with different options when saved": lambda: load(folder, model, one_group),
    }
    assert_refused(cases)
    assert differing(before, run.state()) == []
    task = nn.Sequential(model)
    task.register_buffer("mask", torch.ones(1), persistent=False)
    load(folder, task)  # nothing that is saved is outside


def save(rank: int, folder: str) -> None:
    run = attached(rank, job()).train(2)
    eplb.checkpoint.save(folder, run.model, run.optimizer)


def test_what_does_not_fit_is_refused_with_one_line_and_nothing_is_changed(tmp_path: Path) -> None:
    for call in (save, refused):
        run_ranks(2, call, str(tmp_path / "checkpoint"))
