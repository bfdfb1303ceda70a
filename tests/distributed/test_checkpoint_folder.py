"""Our own checkpoint folder: whole or not at all, and no byte of it is believed unchecked.

What plain equality needs is in test_checkpoint.py; here are disks that fail, ranks that die and files that change.
"""

import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support import training
from support.job import Run
from support.moe_models import make_model
from support.pipeline_models import make_stages
from support.ranks import run_ranks
from support.seen import assert_refused, differing, heard, said_by
from test_checkpoint import State, attached, job, save_and_go_on
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import CheckpointError, disk
from eplb_runtime.checkpoint.state import LogicalView
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import RebalanceCommitted
from eplb_runtime.planner.policies import shuffled


def load_damaged(rank: int, folder: Path, positions: list[tuple[str, int, int]]) -> list[str]:
    """Flip one bit after the other, and say what a load does about each."""
    run = attached(rank, job(seed=1)).train(1)
    before, said = run.state(), []

    def flip_one(name: str, at: int, bit: int) -> None:
        dist.barrier()
        if rank == 0:
            flip(folder / name, at, bit)
        dist.barrier()

    for position in positions:
        flip_one(*position)
        said.append(said_by(lambda: eplb.checkpoint.load(folder, run.model, run.optimizer)))
        flip_one(*position)
        assert differing(before, run.state()) == [], "nothing is changed"
    eplb.checkpoint.load(folder, run.model, run.optimizer)
    return said


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def places(folder: Path) -> list[tuple[str, int, int]]:
    """Bits all over the files, headers and data alike."""
    choice = random.Random(3)
    files = sorted(file for file in folder.iterdir() if file.name != "config.json")
    return [(file.name, choice.randrange(file.stat().st_size), choice.randrange(8)) for file in files for _ in range(4)]


def test_every_flipped_bit_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    run_ranks(2, save_and_go_on, job(), str(tmp_path), "safetensors")
    positions = places(tmp_path)
    of_ranks = run_ranks(2, load_damaged, tmp_path, positions)
    for (name, *_), *said in zip(positions, *of_ranks, strict=True):
        assert all(line and "\n" not in line for line in said) and any(name in line for line in said), (name, said)


# -- dying on the way ------------------------------------------------------------------------------------------------


def test_thirty_kills_at_any_time_leave_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    """Each save over a checkpoint is killed later than the one before it."""
    model = make_model("olmoe", experts=4, layers=1, width=8)
    other = make_model("olmoe", experts=4, layers=1, width=8, seed=1)
    eplb.checkpoint.save(tmp_path, model)
    states = {"old": eplb.logical_state_dict(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    states["new"] = eplb.logical_state_dict(model)
    standing: list[str] = []
    nbytes = max(path.stat().st_size for path in tmp_path.iterdir())
    for kill in range(30):
        child = os.fork()
        if not child:
            try:
                if kill < 15:  # in the midst of a file, by its size
                    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes * kill // 15,) * 2)
                else:  # between two changes of the folder
                    kill_at(kill - 14)
                eplb.checkpoint.save(tmp_path, model)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        eplb.checkpoint.load(tmp_path, other)
        loaded = eplb.logical_state_dict(other)
        found = [name for name, state in states.items() if differing(state, loaded) == []]
        assert len(found) == 1, (kill, "a mixture")
        weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        of_others = {f"model.{name}": load_file(tmp_path / file)[name] for name, file in weight_map.items()}
        assert any(differing(state, of_others) == [] for state in states.values()), kill
        standing += found
    assert standing == sorted(standing, reverse=True), "once it is there, the new one stays"
    assert {"old", "new"} == set(standing)
    eplb.checkpoint.save(tmp_path, model)
    files = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert files == {"model", "checkpoint.json", "model.safetensors.index.json"}


def kill_at(number: int) -> None:
    """Kill this process at its change of that number in the file system."""
    count = 0

    def watch(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ("os.rename", "os.remove") or (
            event == "open" and isinstance(args[2], int) and args[2] & os.O_CREAT
        ):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def fails_on_one(rank: int, folder: str) -> list[str]:
    """What each rank hears: rank 1 has no room, JSON does not keep what its optimizer has, or folders are apart."""
    write, said = disk.save_file, []

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    def files() -> list[str]:
        dist.barrier()
        found = sorted(os.listdir(folder))
        dist.barrier()
        return found

    run = attached(rank, job()).train(1)
    model, optimizer = run.model, run.optimizer
    eplb.checkpoint.save(folder, model, optimizer)
    before = files()
    for what in ("room", "kind"):
        disk.save_file = full if rank == 1 and what == "room" else write
        if rank == 1 and what == "kind":
            next(iter(optimizer.state.values()))["odd"] = object()
        for save in ("save", "async_save"):
            with heard() as lines, pytest.raises((OSError, CheckpointError)) as raised:
                getattr(eplb.checkpoint, save)(folder, model, optimizer).result(60)
            said.append(str(raised.value))
            in_thread = what == "room" and save == "async_save"
            assert [folder in line and said[-1] in line for line in lines] == [True] * in_thread
            assert files() == before
    said.append(said_by(lambda: eplb.checkpoint.save(f"{folder}-of-rank-{rank}", model)))
    assert os.listdir(f"{folder}-of-rank-{rank}") == []
    return said


def test_a_rank_that_cannot_save_is_named_on_all_ranks_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    (*one, unseen), (*other, unseen_too) = run_ranks(2, fails_on_one, str(tmp_path))
    assert all("was not saved: rank 1 failed" in text for text in one)
    assert all("No space left" in text for text in other[:2]) and all("odd is a" in text for text in other[2:])
    assert "rank 0 does not see" in unseen and unseen == unseen_too


def save_in_the_background(rank: int, folder: str) -> list[State]:
    """Training goes on, with a commit, while the first save is held; the second one waits for it, a load for that."""
    assert "attach the model" in said_by(lambda: eplb.checkpoint.async_save(folder, nn.Linear(1, 1)))
    run = attached(rank, job()).train(3)
    model, optimizer, balancer = run.model, run.optimizer, run.balancer
    states = [run.state()]
    may_write, write = threading.Semaphore(0), disk._write

    def waiting(*args: Any) -> None:
        assert may_write.acquire(timeout=60)
        write(*args)

    disk._write = waiting
    first = eplb.checkpoint.async_save(f"{folder}/0", model, optimizer)
    before = len(balancer.events.of_type(RebalanceCommitted))
    run.train(6)
    assert len(balancer.events.of_type(RebalanceCommitted)) > before
    states.append(run.state())
    assert not first.done()
    threading.Timer(0.5, may_write.release).start()
    with heard(logging.INFO) as lines:
        second = eplb.checkpoint.async_save(f"{folder}/1", model, optimizer)
    assert first.done(), "one copy of the state at most"
    assert rank > 0 or f"checkpoint saved to {folder}/0, step 3 of the balancer" in lines
    run.train(1)
    assert not second.done()
    may_write.release(2)
    eplb.checkpoint.load(f"{folder}/1", model, optimizer)
    assert second.done()
    assert differing(states[1], run.state()) == []
    groups = [balancer.runtime.groups.background.group_name]
    balancer.close()
    states.append(run.state())
    eplb.checkpoint.async_save(f"{folder}/2", model, optimizer).result(60)
    groups.append(balancer.runtime.groups.background.group_name)
    assert groups[0] != groups[1], "ranks would look for the first group's addresses"
    return states


def test_a_save_in_the_background_has_the_state_of_its_call(tmp_path: Path) -> None:
    states = run_ranks(2, save_in_the_background, str(tmp_path))[0]
    for number, state in enumerate(states):
        here = Run(0, job(seed=1))  # without a balancer
        eplb.checkpoint.load(tmp_path / str(number), here.model, here.optimizer)
        assert differing(state, here.state()) == []


def save_stages(rank: int, folder: str) -> list[str]:
    """Two stages x EP 2, under names that both stages have, and then under names of their own: saved, and streamed."""
    number = rank // 2
    ranks, config = Ranks(ep=(2 * number, 2 * number + 1), stages=(number,)), eplb.BalancerConfig(guard="off")
    stage = make_stages((2, 1))[number]
    optimizer = torch.optim.AdamW(stage.parameters())
    balancer = eplb.attach(stage, optimizer, config=config, ranks=ranks)
    saves = [partial(eplb.checkpoint.save, folder, stage, optimizer, format=name) for name in ("safetensors", "dcp")]
    said = [said_by(save) for save in saves]
    assert said_by(balancer.named_logical_tensors)
    balancer.close()
    named = nn.ModuleDict({f"stage{number}": make_stages((2, 1))[number]})
    optimizer = torch.optim.AdamW(named.parameters(), lr=0.01 * (1 + number))
    balancer = eplb.attach(named, optimizer, config=config, ranks=ranks)

    def step() -> None:
        for parameter in named.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    state = eplb.logical_state_dict(named, optimizer)
    eplb.checkpoint.save(folder, named, optimizer)
    step()
    optimizer.param_groups[0]["lr"] = 1.0
    assert differing(state, eplb.logical_state_dict(named, optimizer))
    eplb.checkpoint.load(folder, named, optimizer)
    assert differing(state, eplb.logical_state_dict(named, optimizer)) == []
    assert optimizer.param_groups[0]["lr"] == 0.01 * (1 + number)
    here, everyone = balancer.placement, [None] * 4
    moved = shuffled(here, np.ones((here.num_layers, here.num_experts)))
    balancer.load_state_dict({"step": 0, "placement": moved.to_json()})
    dist.all_gather_object(everyone, eplb.logical_state_dict(named))
    whole = {name.removeprefix("model."): tensor for one in everyone for name, tensor in one.items()}
    stream = {name: tensor.clone() for name, tensor in balancer.named_logical_tensors(bucket_bytes=10_000)}
    assert differing(stream, whole) == [] and "equal to the model's" in balancer.verify_export(stream)
    assert {name.split(".")[0] for name in whole} == {"stage0", "stage1"}
    balancer.close()
    return said


def test_stages_are_saved_together_under_names_of_their_own(tmp_path: Path) -> None:
    said, of_dcp = zip(*run_ranks(4, save_stages, str(tmp_path)), strict=True)
    assert "pipeline stages need names of their own" in said[0]
    assert all("DCP keeps one of each: use format='safetensors'" in text for text in of_dcp)
    assert all("rank 0 failed" in text for text in said[1:])


def test_what_cannot_be_saved_or_read_gets_one_line(tmp_path: Path) -> None:
    model = make_model("olmoe")
    optimizer, rates = torch.optim.SGD(model.parameters(), lr=0.1), (torch.tensor(1.1 + n / 1e7) for n in range(100))
    odd_options = torch.optim.SGD([{"params": p, "lr": lr} for p, lr in zip(model.parameters(), rates, strict=False)])
    odd = nn.ModuleDict({"complex": nn.Linear(1, 1)})
    odd_dtype = torch.optim.SGD(odd.parameters())
    odd_dtype.state[odd["complex"].weight]["momentum"] = torch.zeros(1, 1, dtype=torch.complex128)
    load, save = eplb.checkpoint.load, eplb.checkpoint.save
    save(tmp_path / "good", model)
    save(tmp_path / "dcp", model, odd_options, format="dcp")
    odd_options.param_groups[0] |= {"of": {"layers": 1}, "schedule": print}
    save(tmp_path / "nested", model, odd_options, format="dcp")
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    index = (tmp_path / "good" / "checkpoint.json").read_text()
    (file,) = (tmp_path / "good").glob("*.safetensors")

    def copy(text: str = index, content: bytes = file.read_bytes()) -> Path:
        folder = shutil.copytree(tmp_path / "good", tmp_path / "copy", dirs_exist_ok=True)
        (folder / "checkpoint.json").write_text(text)
        (folder / file.name).write_bytes(content)
        return folder

    cases: dict[str, Callable[[], object]] = {
        "cannot be read as a checkpoint": lambda: load(copy("{"), model),
        "of version 5; this reads": lambda: load(copy(index.replace('"version": 4', '"version": 5')), model),
        "has another checksum": lambda: load(copy(index.replace('"files": {', '"files": {"x": [1, ""], ')), model),
        "another size or checksum": lambda: load(copy(content=file.read_bytes()[:-1]), model),
        "cannot be used: FileNotFoundError": lambda: load((copy() / file.name).unlink() or tmp_path / "copy", model),
        "has no optimizer: load it with optimizer=None": lambda: load(tmp_path / "good", model, optimizer),
        "schedule is a builtin_function_or_method, which JSON": lambda: save(tmp_path / "odd", model, odd_options),
        "format='torch' is unknown": lambda: save(tmp_path / "x", model, format="torch"),
        "complex.weight.momentum: safetensors has no torch.complex128": lambda: save(tmp_path / "y", odd, odd_dtype),
        "has a model.safetensors, which would be read": lambda: save(tmp_path / "weights", model),
        "was not saved: rank 0: FileExistsError": lambda: save(file, model, format="dcp"),
        "several with different options when saved": lambda: load(tmp_path / "dcp", model, optimizer),
        "groups.0.of.layers in": lambda: load(tmp_path / "nested", model, odd_options),
        "has a checkpoint, which DCP cannot": lambda: save(tmp_path / "dcp", model, format="dcp"),
    }
    assert_refused(cases)
    assert not (tmp_path / "odd").exists()


# -- memory that is freed between phases ------------------------------------------------------------------------------


def with_freed_memory(rank: int, folder: Path) -> None:
    """While one rank has freed its weights, then all have emptied an expert parameter's data."""
    model = make_model("olmoe", experts=4, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    balancer = training.attach(model, optimizer)
    ours = eplb.checkpoint
    ours.save(folder / "before", model, optimizer)
    whole = ours.logical_state_dict(model, optimizer)
    calls: list[Callable[[], Any]] = [
        lambda: ours.save(folder / "a", model, optimizer),
        lambda: ours.save(folder / "b", model, optimizer, format="dcp"),
        lambda: ours.async_save(folder / "c", model, optimizer),
        lambda: ours.logical_state_dict(model, optimizer),
        lambda: ours.export_pretrained(model, folder / "d"),
        lambda: ours.load(folder / "before", model, optimizer),
        lambda: ours.load_pretrained(model, folder / "before"),
        lambda: ours.load_logical_state_dict(model, optimizer, whole),
    ]
    expert = model.get_parameter(next(iter(balancer.layer_of_parameter)))
    values = expert.data.clone()
    if rank == 1:
        expert.untyped_storage().resize_(0)
    for call in calls:
        assert_refused({"memory is freed" if rank == 1 else "rank 1": call})
    if rank == 1:
        expert.untyped_storage().resize_(values.nbytes)
    expert.data = torch.empty(0)
    for call in calls:
        assert_refused({"memory is freed": call})
    expert.data = values
    ours.load(folder / "before", model, optimizer)
    assert torch.equal(expert, values)
    balancer.close()


@pytest.mark.long
def test_freed_memory_is_neither_saved_nor_loaded_and_every_rank_hears_of_it(tmp_path: Path) -> None:
    """Read by torch, such memory ends the process; a rank that finds it alone would let the others wait."""
    run_ranks(2, with_freed_memory, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]


def alone(rank: int, folder: Path) -> tuple[str, list[str]]:
    """What rank 0 hears that saves by itself, and each rank when it takes a plain state dict, twice."""
    model = make_model("olmoe", experts=4, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    balancer = training.attach(model, optimizer, timeout_seconds=training.DEADLINE)
    said = said_by(lambda: eplb.checkpoint.async_save(folder, model, optimizer)) if rank == 0 else ""
    with heard() as warned:
        list(LogicalView(model, optimizer).entries())
        assert not warned, "what we read ourselves is no checkpoint of the user's"
        for _ in range(2):
            model.state_dict()
    dist.barrier()
    balancer.close()
    return said, warned


@pytest.mark.long
def test_a_rank_that_saves_alone_is_told_and_so_is_who_takes_a_plain_state_dict(tmp_path: Path) -> None:
    (said, warned), (none, warned_too) = run_ranks(2, alone, tmp_path)
    assert "rank 1 did not come to" in said and "call it on every rank" in said and not none
    for lines in (warned, warned_too):
        (line,) = (text for text in lines if "state_dict()" in text)
        assert "this rank's 2 of 4 experts" in line
