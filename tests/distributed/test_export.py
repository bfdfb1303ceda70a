"""A Hugging Face folder, written a piece at a time, and a stream of tensors are what the library would
have written. Memory is counted at each operation."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.job import Job, Run, of_family
from support.live_memory import LiveMemory
from support.moe_models import FAMILIES
from support.ranks import run_ranks
from support.seen import assert_refused, said_by, same
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import CheckpointError, disk, stream
from eplb_runtime.checkpoint.state import LogicalView

EXPERTS = 8


def scrambled(ranks: int, replica_slots: int = 0) -> eplb.Placement:
    """Logical order backwards: no expert stands where it would without a balancer."""
    initial = eplb.Placement.initial(2, EXPERTS, ranks, replica_slots)
    slots = initial.physical_to_logical.copy()
    slots[slots >= 0] = EXPERTS - 1 - slots[slots >= 0]
    return eplb.Placement(slots, EXPERTS, ranks, initial.home[:, ::-1])


def job(family: str = "olmoe", *, ep: int = 4, replica_slots: int = 0, **more: Any) -> Job:
    """On four ranks."""
    settings = {"initial_placement": scrambled(ep, replica_slots), "replica_slots": replica_slots}
    return Job(family=family, ep=ep, optimizer=None, settings=settings, **more)


def whole_model(job: Job) -> nn.Module:
    return job.model(job)


def attached(job: Job) -> nn.Module:
    return Run(dist.get_rank(), job).attach().model


def streamed(balancer: eplb.Balancer, **options: Any) -> dict[str, torch.Tensor]:
    stream = balancer.named_logical_tensors(bucket_bytes=30_000, **options)
    return {name: tensor.clone() for name, tensor in stream}


def options_of(name: str) -> dict[str, Any]:
    return {"max_shard_size": "40KB", "save_original_format": name != "names as in the model"}


def export(rank: int, jobs: Mapping[str, Job], folder: Path) -> dict[str, dict[str, Any]]:
    """Each to a folder of its name, some also as a stream of tensors, to all ranks and to one."""
    found = {}
    for name, job in jobs.items():
        run = Run(rank, job).attach()
        balancer = run.balancer
        eplb.checkpoint.export_pretrained(run.model, folder / name, **options_of(name))
        if name not in STREAMED:
            balancer.close()
            continue
        everyone, one = streamed(balancer), streamed(balancer, rank=3)
        first = next(iter(balancer.named_logical_tensors().experts))
        wrong = said_by(lambda: balancer.verify_export({**everyone, first: everyone[first] + 1}))  # noqa: B023
        found[name] = {"all": everyone, "one": one, "said": balancer.verify_export(everyone), "wrong": wrong}
        balancer.close()
    return found


def tensors_of(folder: Path, index: str = "model.safetensors.index.json") -> dict[str, torch.Tensor]:
    """All tensors of a folder, each in the file that the index names."""
    if not (folder / index).exists():
        return load_file(folder / "model.safetensors")
    found = {}
    for name, file in json.loads((folder / index).read_text())["weight_map"].items():
        found[name] = load_file(folder / file)[name]
    return found


def loads_equal(folder: Path, job: Job) -> bool:
    import transformers as hf

    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    return same(dict(loaded.state_dict()), dict(whole_model(job).state_dict()))


JOBS = {family: job(family) for family in FAMILIES} | {
    "tied": job(model=partial(of_family, tied=True)),
    "replicas": job("gpt_oss", replica_slots=1),
    "two EP groups, stacked": job("gpt_oss", ep=2),
    "sliced": job(ep=2, sliced=True),
    "sliced, stacked": job("gpt_oss", ep=2, sliced=True),
    "names as in the model": job(),
}

STREAMED = ("deepseek_v3", "tied", "two EP groups, stacked", "sliced", "sliced, stacked")


Exported = tuple[Path, list[dict[str, dict[str, Any]]]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A folder for each job in one, and what each rank has streamed."""
    folder = tmp_path_factory.mktemp("exported")
    return folder, run_ranks(4, export, JOBS, folder)


@pytest.mark.parametrize("name", JOBS)
def test_shards_are_what_save_pretrained_writes(name: str, exported: Exported, tmp_path: Path) -> None:
    job, written = JOBS[name], exported[0] / name
    whole_model(job).save_pretrained(tmp_path, **options_of(name))
    assert same(tensors_of(written), tensors_of(tmp_path))
    assert loads_equal(written, job)
    ours, theirs = (
        {path.name for path in folder.iterdir() if path.is_file() and "model" not in path.name}
        for folder in (written, tmp_path)
    )
    assert ours == theirs
    for file in ("config.json", "generation_config.json"):
        assert json.loads((written / file).read_text()) == json.loads((tmp_path / file).read_text())
    index = json.loads((written / "model.safetensors.index.json").read_text())["metadata"]
    assert index["total_size"] == sum(tensor.nbytes for tensor in tensors_of(written).values())


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_is_what_the_library_would_write_and_a_wrong_expert_in_it_is_noticed(
    name: str, exported: Exported, tmp_path: Path
) -> None:
    whole_model(JOBS[name]).save_pretrained(tmp_path)
    whole = tensors_of(tmp_path)
    for rank, found in enumerate(of_rank[name] for of_rank in exported[1]):
        assert same(found["all"], whole) and same(found["one"], whole if rank == 3 else {})
        assert "equal to the model's, all experts among them" in found["said"]
        assert "not equal to the model's: " in found["wrong"] and ".experts." in found["wrong"]
        assert found["wrong"] == exported[1][0][name]["wrong"]


def test_shards_are_within_the_size_asked_for(exported: Exported) -> None:
    files = sorted((exported[0] / "olmoe").glob("*.safetensors"))
    assert len(files) > 4
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 40_000


# -- names that the library would give if a family had them ----------------------------------------------------------


def other_names(how: str) -> None:
    """Let the library name and shape OLMoE's tensors otherwise."""
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import (
        Chunk,
        ConversionOps,
        MergeModulelist,
        Transpose,
        WeightConverter,
        WeightRenaming,
    )

    class Backwards(ConversionOps):
        def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
            ((_, tensors),) = input_dict.items()
            return {target_patterns[0]: (tensors[0] if isinstance(tensors, list) else tensors).flip(0)}

        @property
        def reverse_op(self) -> ConversionOps:
            return Backwards()

    down = "mlp.experts.down_proj"
    register_checkpoint_conversion_mapping(
        "olmoe",
        {
            "backwards": [WeightConverter("mlp.experts.*.w2", down, [MergeModulelist(dim=0), Backwards()])],
            "stacked and transposed": [WeightConverter("mlp.experts.w2", down, [Transpose(1, 2)])],
            "experts in the middle": [WeightConverter("mlp.experts.w2", down, [Transpose(0, 1)])],
            "joined": [
                WeightRenaming("self_attn.wo.", "self_attn.o_proj."),
                WeightConverter(
                    "self_attn.kv.weight", ["self_attn.k_proj.weight", "self_attn.v_proj.weight"], [Chunk(0)]
                ),
                WeightConverter("mlp.experts.*.w2", down, [MergeModulelist(dim=0)]),
            ],
        }[how],
        overwrite=True,
    )


HOWS = ("backwards", "stacked and transposed", "experts in the middle", "joined")


def export_with_other_names(rank: int, folder: Path) -> None:
    """Each to a folder of its name, and by the library to one beside it."""
    for how in HOWS:
        other_names(how)
        eplb.checkpoint.export_pretrained(attached(job()), folder / how, max_shard_size="40KB")
        if rank == 0:
            whole_model(job()).save_pretrained(folder / "library" / how, max_shard_size="40KB")


@pytest.mark.long
def test_whatever_the_library_makes_of_a_model_is_written(tmp_path: Path) -> None:
    run_ranks(4, export_with_other_names, tmp_path)
    for how in HOWS:
        assert same(tensors_of(tmp_path / how), tensors_of(tmp_path / "library" / how)), how


# -- memory ----------------------------------------------------------------------------------------------------------

WIDTH = 512
"""An expert's tensors are 2 and 1 MiB: more than what travels together."""


def measured(job: Job, call: str, folder: Path) -> dict[str, int]:
    """Peak of this rank beyond the model and the result, and what it is measured by."""
    model = attached(job)
    view, ours = LogicalView(model), eplb.checkpoint
    experts = [entry for entry in view.entries("model") if entry.layer == 0]
    calls: dict[str, Callable[[], Any]] = {
        "export": lambda: ours.export_pretrained(model, folder, max_shard_size="20MB"),
        "logical_state_dict": lambda: list(eplb.logical_state_dict(model).values()),
        "load_pretrained": lambda: ours.load_pretrained(model, folder),
        "save": lambda: ours.save(folder, model),
        "load": lambda: ours.load(folder, model),
    }
    with torch.no_grad(), LiveMemory() as memory:
        result = calls[call]() or []
    rows = [entry.tensor[:1].nbytes for entry in experts]
    return {
        "peak": memory.peak - sum(one.nbytes for one in result),
        "expert": sum(rows),
        "row": max(rows),
        "stack": max(rows) * EXPERTS,
        "dense": sum(entry.tensor.nbytes for entry in view.entries("model") if entry.layer is None),
    }


Figures = dict[str, int]
WHOLE, STACKED, SLICED = job(width=WIDTH), job("gpt_oss", width=WIDTH), job(width=WIDTH, ep=2, sliced=True)


def of_export(figures: Figures) -> float:
    """Besides two experts and the dense part a shard, and two stacks, where experts are not written one by one."""
    return 2 * figures["expert"] + figures["dense"] + 20_000_000 + 2 * figures["stack"]


BOUNDS: dict[str, tuple[Job, str, Callable[[Figures], float]]] = {
    "export": (WHOLE, "export", of_export),
    "export, stacked": (STACKED, "export", of_export),
    "export, sliced": (SLICED, "export", of_export),
    # gloo's thread may still hold an expert that has come while the next one comes.
    "logical_state_dict": (WHOLE, "logical_state_dict", lambda figures: 2 * figures["row"]),
    "logical_state_dict, sliced": (SLICED, "logical_state_dict", lambda figures: 2.5 * figures["row"]),
    "load_pretrained": (WHOLE, "load_pretrained", lambda figures: 2 * figures["expert"] + figures["dense"]),
    # Two rows: one is read while the one before it is still held.
    "save": (STACKED, "save", lambda figures: 2 * figures["row"] + figures["dense"]),
    "load": (STACKED, "load", lambda figures: 2 * figures["row"] + figures["dense"]),
}
"""A job, a call, and the most that it may hold on a rank beyond the model and its result."""


def measure_all(rank: int, folder: Path) -> dict[str, Figures]:
    folders = {"load": "save", "load_pretrained": "whole"}
    return {name: measured(job, call, folder / folders.get(name, name)) for name, (job, call, _) in BOUNDS.items()}


@pytest.mark.long
def test_each_call_holds_no_more_than_it_says(tmp_path: Path) -> None:
    whole_model(WHOLE).save_pretrained(tmp_path / "whole")
    for of_rank in run_ranks(4, measure_all, tmp_path):
        for name, figures in of_rank.items():
            assert 0 < figures["peak"] <= BOUNDS[name][2](figures), (name, figures)
    for name in ("export", "export, stacked", "export, sliced"):
        assert loads_equal(tmp_path / name, BOUNDS[name][0]), name


# -- what goes wrong -------------------------------------------------------------------------------------------------


def full_disk_on_rank_0(rank: int, folder: Path) -> str:
    model, write = attached(job()), disk.save_file

    def full(*args: Any) -> None:
        if rank == 0:
            raise OSError(28, "No space left on device")
        write(*args)

    eplb.checkpoint.export_pretrained(model, folder, max_shard_size="40KB")
    before = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    disk.save_file = full
    with pytest.raises(OSError if rank == 0 else CheckpointError) as raised:
        eplb.checkpoint.export_pretrained(model, folder, max_shard_size="40KB")
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == before
    return str(raised.value)


@pytest.mark.long
def test_a_rank_that_cannot_write_is_named_on_all_ranks_and_the_old_folder_stays(tmp_path: Path) -> None:
    said = run_ranks(4, full_disk_on_rank_0, tmp_path)
    assert "No space left" in said[0]
    assert all("rank 0 failed" in text for text in said[1:])
    assert loads_equal(tmp_path, job())


def refusals(rank: int, folder: Path) -> None:
    model, export_it, value = attached(job()), eplb.checkpoint.export_pretrained, stream.TensorList.value

    def no_room(*args: Any) -> Any:
        if rank == 3:
            raise RuntimeError("no room")
        return value(*args)

    without_room = patch.object(stream.TensorList, "value", no_room)(export_it)
    cases: dict[str, Callable[[], object]] = {
        "does not take push_to_hub: upload the folder": lambda: export_it(model, folder, push_to_hub=True),
        "no room" if rank == 3 else "was not exported: rank 3 failed": lambda: without_room(model, folder),
        "the model is not attached": lambda: export_it(whole_model(job()), folder),
    }
    assert_refused(cases)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    run_ranks(4, refusals, tmp_path)
