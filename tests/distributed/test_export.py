"""A Hugging Face folder is written a piece at a time, by all ranks, and is what the library would have written.

Memory is counted at each operation; each bound has its control, a version that gathers first and must break it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_memory import LiveMemory
from moe_models import FAMILIES, make_model
from ranks import run_ranks
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import eplb_runtime as eplb
from eplb_runtime.checkpoint import CheckpointError
from eplb_runtime.checkpoint.state import LogicalView
from eplb_runtime.hosts.transformers import export as folders

EXPERTS = 8


@dataclass(frozen=True)
class Job:
    """An export on four ranks."""

    family: str = "olmoe"
    options: tuple[tuple[str, Any], ...] = (("max_shard_size", "40KB"),)
    ep_size: int = 4
    sliced: bool = False
    replica_slots: int = 0
    tied: bool = False
    width: int = 32


def scrambled(ranks: int, replica_slots: int = 0) -> eplb.Placement:
    """Logical order backwards: no expert stands where it would without a balancer."""
    initial = eplb.Placement.initial(2, EXPERTS, ranks, replica_slots)
    slots = initial.physical_to_logical.copy()
    slots[slots >= 0] = EXPERTS - 1 - slots[slots >= 0]
    return eplb.Placement(slots, EXPERTS, ranks, initial.home[:, ::-1])


def whole_model(job: Job) -> nn.Module:
    return make_model(job.family, experts=EXPERTS, width=job.width, tied=job.tied)


def attached(job: Job) -> nn.Module:
    model = whole_model(job)
    mesh = init_device_mesh("cpu", (4 // job.ep_size, job.ep_size), mesh_dim_names=("edp", "ep"))
    ep_group = mesh["ep"].get_group()
    config = eplb.BalancerConfig(
        initial_placement=scrambled(job.ep_size, job.replica_slots),
        dense_gradients="host" if job.sliced else "allreduce",
        replica_slots=job.replica_slots,
    )
    if job.sliced:
        eplb.shard_experts(model, config=config, ep_group=ep_group)
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=mesh["edp"], shard_placement_fn=lambda parameter: Shard(1))
            fully_shard(layer)
        fully_shard(model)
    eplb.attach(model, config=config, ep_group=ep_group)
    return model


def export(rank: int, jobs: Mapping[str, Job], folder: Path) -> None:
    """Each to a folder of its name."""
    for name, job in jobs.items():
        eplb.checkpoint.export_pretrained(attached(job), folder / name, **dict(job.options))


def tensors_of(folder: Path, index: str = "model.safetensors.index.json") -> dict[str, torch.Tensor]:
    """All tensors of a folder, each in the file that the index names."""
    if not (folder / index).exists():
        return load_file(folder / "model.safetensors")
    found = {}
    for name, file in json.loads((folder / index).read_text())["weight_map"].items():
        found[name] = load_file(folder / file)[name]
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


def loads_equal(folder: Path, job: Job) -> bool:
    import transformers as hf

    loaded = hf.AutoModelForCausalLM.from_pretrained(folder)
    return same(dict(loaded.state_dict()), dict(whole_model(job).state_dict()))


JOBS = {family: Job(family) for family in FAMILIES} | {
    "tied": Job(tied=True),
    "replicas": Job("gpt_oss", replica_slots=1),
    "two EP groups": Job("qwen3_moe", ep_size=2),
    "two EP groups, stacked": Job("gpt_oss", ep_size=2),
    "sliced": Job("olmoe", ep_size=2, sliced=True),
    "sliced, stacked": Job("gpt_oss", ep_size=2, sliced=True),
    "sliced, one file": Job("olmoe", (), ep_size=2, sliced=True),
    "names as in the model": Job("olmoe", (("max_shard_size", "40KB"), ("save_original_format", False))),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a folder for each job."""
    folder = tmp_path_factory.mktemp("exported")
    run_ranks(4, export, JOBS, folder)
    return folder


@pytest.mark.parametrize("name", JOBS)
def test_shards_of_all_ranks_are_what_save_pretrained_writes(name: str, exported: Path, tmp_path: Path) -> None:
    job, written = JOBS[name], exported / name
    whole_model(job).save_pretrained(tmp_path, **dict(job.options))
    assert same(tensors_of(written), tensors_of(tmp_path))
    assert loads_equal(written, job)
    ours, theirs = (
        {path.name for path in folder.iterdir() if path.is_file() and "model" not in path.name}
        for folder in (written, tmp_path)
    )
    assert ours == theirs
    for file in ("config.json", "generation_config.json"):
        assert json.loads((written / file).read_text()) == json.loads((tmp_path / file).read_text())
    if job.options:
        index, other = (
            json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
            for folder in (written, tmp_path)
        )
        assert index["total_parameters"] == other["total_parameters"]
        # The library forgets views that it makes on the way, so its own sum is too small.
        assert index["total_size"] == sum(tensor.nbytes for tensor in tensors_of(written).values())


def test_each_rank_writes_shards_of_its_own_experts_within_the_size_asked_for(exported: Path) -> None:
    files = sorted((exported / "olmoe").glob("*.safetensors"))
    assert len(files) > 4
    experts_of = [
        {int(key.split(".experts.")[1].split(".")[0]) for key in load_file(file) if ".experts." in key}
        for file in files
    ]
    backwards = [{7, 6}, {5, 4}, {3, 2}, {1, 0}]
    assert all(any(found <= pair for pair in backwards) for found in experts_of)
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 40_000


def export_twice(rank: int, folder: str) -> None:
    model = attached(Job())
    for options in ({"max_shard_size": "20KB"}, {"max_shard_size": "60KB"}, {}, {"variant": "bf16"}):
        eplb.checkpoint.export_pretrained(model, folder, **options)


def test_a_new_export_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    run_ranks(4, export_twice, str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.bf16.safetensors",
    }
    assert loads_equal(tmp_path, Job())


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


HOWS = ("stacked and transposed", "experts in the middle", "joined")


def export_with_other_names(rank: int, folder: Path) -> None:
    """Each to a folder of its name, and by the library to one beside it."""
    for how in HOWS:
        other_names(how)
        eplb.checkpoint.export_pretrained(attached(Job()), folder / how, max_shard_size="40KB")
        if rank == 0:
            whole_model(Job()).save_pretrained(folder / "library" / how, max_shard_size="40KB")


def test_whatever_the_library_makes_of_a_model_is_written(tmp_path: Path) -> None:
    run_ranks(4, export_with_other_names, tmp_path)
    for how in HOWS:
        assert same(tensors_of(tmp_path / how), tensors_of(tmp_path / "library" / how)), how


# -- memory ----------------------------------------------------------------------------------------------------------

WIDTH = 512
"""An expert's tensors are 2 and 1 MiB: more than what travels together."""


def gather_first(view: LogicalView, folder: Path) -> None:
    """How it was done before: everything on every rank, then the library's own call."""
    whole = {
        entry.name: entry.tensor
        if entry.layer is None
        else view.balancer.gather_experts(entry.layer, entry.tensor).clone()
        for entry in view.entries("model")
    }
    if dist.get_rank() == 0:
        type(view.model).save_pretrained(view.model, str(folder), state_dict=whole)  # the library's own
    dist.barrier()


def measured(job: Job, case: str, folder: Path) -> dict[str, int]:
    """Peak of this rank beyond the model, and what it is measured by."""
    model = attached(job)
    view = LogicalView(model)
    expert_tensors = [entry for entry in view.entries("model") if entry.layer == 0]
    name = expert_tensors[0]
    with torch.no_grad(), LiveMemory() as memory:
        if case == "export":
            eplb.checkpoint.export_pretrained(model, folder, **dict(job.options))
        elif case == "gather first":
            gather_first(view, folder)
        elif case == "gather_experts":
            result = view.balancer.gather_experts(0, name.tensor)
        elif case == "logical_state_dict":
            result = eplb.logical_state_dict(model)
        elif case == "load_pretrained":
            eplb.checkpoint.load_pretrained(model, folder)
        elif case == "save":
            eplb.checkpoint.save(folder, model)
        elif case == "load":
            eplb.checkpoint.load(folder, model)
    rows = {entry.name: entry.tensor[:1].nbytes for entry in expert_tensors}
    held = {
        "gather_experts": lambda: result.nbytes,
        "logical_state_dict": lambda: sum(t.nbytes for t in result.values()),
    }
    return {
        "peak": memory.peak - held.get(case, int)(),
        "expert": sum(rows.values()),
        "row": max(rows.values()),
        "stack": max(rows.values()) * EXPERTS,
        "dense": sum(entry.tensor.nbytes for entry in view.entries("model") if entry.layer is None),
    }


MEASURED = {
    "own shards": Job("olmoe", (("max_shard_size", "20MB"),), width=WIDTH),
    "stacked": Job("gpt_oss", (("max_shard_size", "20MB"),), width=WIDTH),
    "sliced": Job("olmoe", (("max_shard_size", "20MB"),), ep_size=2, sliced=True, width=WIDTH),
}


Case = tuple[Job, str, str]
"""What is measured: a job, a call, and the name of a folder."""
CONTROLS = {family: Job(family, width=WIDTH) for family in ("olmoe", "gpt_oss")}
WHOLE, SLICED = Job(width=WIDTH), Job(width=WIDTH, ep_size=2, sliced=True)
GATHERED = [(job, call, "") for job in (WHOLE, SLICED) for call in ("gather_experts", "logical_state_dict")]


def measure_all(rank: int, cases: Sequence[Case], folder: Path) -> list[dict[str, int]]:
    return [measured(job, call, folder / name) for job, call, name in cases]


def measure(cases: Sequence[Case], folder: Path) -> list[list[dict[str, int]]]:
    """Of each case the figures of all ranks."""
    return [list(figures) for figures in zip(*run_ranks(4, measure_all, cases, folder), strict=True)]


def test_export_takes_two_experts_the_dense_part_and_a_shard_at_most(tmp_path: Path) -> None:
    cases = [(job, "export", name) for name, job in MEASURED.items()]
    for (job, _, name), of_ranks in zip(cases, measure(cases, tmp_path), strict=True):
        for figures in of_ranks:
            shard = max(20_000_000, 2 * figures["stack"]) if name != "own shards" else 0  # there it is live memory
            assert figures["peak"] <= 2 * figures["expert"] + figures["dense"] + shard, (name, figures)
        assert loads_equal(tmp_path / name, job), name


def test_control_gathering_first_is_noticed(tmp_path: Path) -> None:
    for of_ranks in measure([(job, "gather first", family) for family, job in CONTROLS.items()], tmp_path):
        for figures in of_ranks:
            assert figures["peak"] > 2 * (2 * figures["expert"] + figures["dense"]), figures


def test_gathering_takes_its_result_and_two_experts_at_most(tmp_path: Path) -> None:
    """gloo's thread may still hold an expert that has come while the next one comes."""
    for (job, call, _), of_ranks in zip(GATHERED, measure(GATHERED, tmp_path), strict=True):
        for figures in of_ranks:
            assert figures["peak"] <= (2.5 if job.sliced else 2) * figures["row"], (call, figures)


def test_loading_takes_two_experts_and_the_largest_dense_tensor(tmp_path: Path) -> None:
    whole_model(WHOLE).save_pretrained(tmp_path)
    (of_ranks,) = measure([(WHOLE, "load_pretrained", "")], tmp_path)
    for figures in of_ranks:
        assert figures["peak"] <= 2 * figures["expert"] + figures["dense"], figures


def test_a_checkpoint_is_written_and_read_expert_by_expert(tmp_path: Path) -> None:
    """Two rows: one is read while the one before it is still held."""
    cases = [(Job("gpt_oss", width=WIDTH), call, "checkpoint") for call in ("save", "load")]
    for (_, call, _), of_ranks in zip(cases, measure(cases, tmp_path), strict=True):
        for figures in of_ranks:
            assert figures["peak"] <= 2 * figures["row"] + figures["dense"], (call, figures)


# -- what goes wrong -------------------------------------------------------------------------------------------------


def full_disk_on_rank_2(rank: int, folder: str) -> str:
    write = folders.save_tensors

    def full(*args: Any) -> None:
        if rank == 2:
            raise OSError(28, "No space left on device")
        write(*args)

    model = attached(Job())
    eplb.checkpoint.export_pretrained(model, folder, max_shard_size="40KB")
    before = sorted(path.name for path in Path(folder).iterdir())
    dist.barrier()
    folders.save_tensors = full
    with pytest.raises(OSError if rank == 2 else CheckpointError) as raised:
        eplb.checkpoint.export_pretrained(model, folder, max_shard_size="40KB")
    dist.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == before
    return str(raised.value)


def test_a_rank_that_cannot_write_is_named_on_all_ranks_and_the_old_folder_stays(tmp_path: Path) -> None:
    said = run_ranks(4, full_disk_on_rank_2, str(tmp_path))
    assert "No space left" in said[2]
    assert all("rank 2 failed" in text for rank, text in enumerate(said) if rank != 2)
    assert loads_equal(tmp_path, Job())


def refusals(rank: int, folder: str) -> dict[str, str]:
    said = {}

    def refused(case: str, action: Callable[[], object]) -> None:
        try:
            action()
            said[case] = "nothing was refused"
        except CheckpointError as error:
            said[case] = str(error)

    model = attached(Job())
    export_it = eplb.checkpoint.export_pretrained
    refused("upload", lambda: export_it(model, folder, push_to_hub=True))
    refused("not attached", lambda: export_it(whole_model(Job()), folder))
    other_names("backwards")
    refused("experts mixed", lambda: export_it(model, folder))
    return said


def test_what_cannot_be_exported_gets_one_line(tmp_path: Path) -> None:
    expected = {
        "upload": "does not take push_to_hub: upload the folder",
        "not attached": "the model is not attached",
        "experts mixed": "mixes experts",
    }
    for said in run_ranks(4, refusals, str(tmp_path)):
        assert said.keys() == expected.keys()
        for case, text in said.items():
            assert expected[case] in text, f"{case}: {text}"
            assert "\n" not in text
