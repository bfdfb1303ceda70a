"""Hugging Face folders, and models that begin on the meta device: each rank reads its own experts and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import FAMILIES, batch_of, make_model
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import training
from test_export import EXPERTS, scrambled
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import CheckpointError
from eplb_runtime.checkpoint.state import LogicalView
from eplb_runtime.hosts import AttachError


def config(ranks: int, replica_slots: int = 0) -> eplb.BalancerConfig:
    return eplb.BalancerConfig(
        initial_placement=scrambled(ranks, replica_slots),
        dense_gradients="allreduce",
        replica_slots=replica_slots,
        dispatch=eplb.DispatchConfig(split_least_tokens=0 if replica_slots else 64),
    )


def on_meta(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers as hf

    settings = make_model(family, experts=EXPERTS).config
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(settings).to(dtype)


def count_reads() -> list[int]:
    """Bytes that this rank reads from files, from now on, a number for each read."""
    from eplb_runtime.hosts.transformers import weights as transformers_weights

    reads: list[int] = []

    class Slice:
        def __init__(self, part: Any) -> None:
            self.get_shape, self._part = part.get_shape, part

        def __getitem__(self, index: Any) -> torch.Tensor:
            value = self._part[index]
            reads.append(value.nbytes)
            return value

    class Opened:
        def __init__(self, *args: Any, **options: Any) -> None:
            self._file = safe_open(*args, **options)
            self.keys = self._file.keys

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *error: object) -> None: ...

        def get_slice(self, key: str) -> Slice:
            return Slice(self._file.get_slice(key))

    transformers_weights.safe_open = Opened
    return reads


CASES = [*((family, 0) for family in FAMILIES), ("olmoe", 1), ("gpt_oss", 1)]


def all_from_meta(rank: int, folder: str) -> dict:
    return {case: from_meta(rank, case[0], f"{folder}/{case[0]}", case[1]) for case in CASES}


def all_from_whole(rank: int) -> dict:
    return {case: from_whole(rank, *case) for case in CASES}


def from_meta(rank: int, family: str, folder: str, replica_slots: int) -> dict:
    reads = count_reads()
    model = on_meta(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = eplb.attach(model, optimizer, config=config(dist.get_world_size(), replica_slots), device="cpu")
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    unloaded = model(input_ids=batch_of(rank, 0)).logits
    assert unloaded.isnan().all(), "a load that was forgotten must show"
    eplb.checkpoint.load_pretrained(model, folder)
    state = eplb.logical_state_dict(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    own = sum(p.nbytes for name, p in model.named_parameters() if name in balancer.layer_of_parameter)
    own += sum(t.nbytes for name, t in model.state_dict().items() if name not in balancer.layer_of_parameter)
    losses = trained_on(rank, model, optimizer)
    return {"state": state, "buffers": buffers, "losses": losses, "read": sum(reads), "own": own}


def from_whole(rank: int, family: str, replica_slots: int) -> list[float]:
    model = make_model(family, experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    eplb.attach(model, optimizer, config=config(dist.get_world_size(), replica_slots))
    return trained_on(rank, model, optimizer)


def trained_on(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return [training.step(model, optimizer, batch_of(rank, step)) for step in range(2)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], list[dict]]:
    """Of each rank and case: a model that begins on the meta device, and losses of one that does not."""
    folder = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        make_model(family, experts=EXPERTS).save_pretrained(folder / family, max_shard_size="40KB")
        assert len(list((folder / family).glob("*.safetensors"))) > 1
    return run_ranks(2, all_from_meta, str(folder)), run_ranks(2, all_from_whole)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_meta_model_is_attached_then_loaded_by_each_rank_for_itself(
    case: tuple[str, int], trained: tuple[list[dict], list[dict]]
) -> None:
    """Per-expert names (OLMoE, Qwen3-MoE, Mixtral, DeepSeek-V3) and whole tensors (gpt-oss)."""
    whole = make_model(case[0], experts=EXPERTS)
    loaded, losses = ([of_rank[case] for of_rank in of_ranks] for of_ranks in trained)
    for result in loaded:
        expected = eplb.logical_state_dict(whole)
        assert result["state"].keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, result["state"][name]), name
        for name, buffer in whole.named_buffers():
            assert torch.equal(buffer, result["buffers"][name]), name
        assert result["read"] <= result["own"], "a rank reads its own experts and the rest, once"
    assert [result["losses"] for result in loaded] == losses


def fused_names(rank: int, folder: str, by_slot: bool) -> dict[str, torch.Tensor]:
    if by_slot:
        LogicalView.experts_here = lambda self, _: [4 * self.balancer.runtime.job.ep_rank + row for row in range(4)]
    model = on_meta("olmoe", torch.bfloat16)
    eplb.attach(model, config=config(2), device="cpu")
    eplb.checkpoint.load_pretrained(model, folder)
    return eplb.logical_state_dict(model)


@pytest.mark.parametrize("by_slot", [False, True], ids=["by expert", "control: by slot"])
def test_the_models_own_fused_names_are_read_too_and_cast_to_its_dtype(by_slot: bool, tmp_path: Path) -> None:
    whole = make_model("olmoe", experts=EXPERTS)
    save_file(
        {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}, tmp_path / "model.safetensors"
    )
    for state in run_ranks(2, fused_names, str(tmp_path), by_slot):
        tensors = whole.to(torch.bfloat16).state_dict().items()
        other = {name for name, tensor in tensors if not torch.equal(tensor, state[f"model.{name}"])}
        assert bool(other) == by_slot and all(".experts." in name for name in other)


def refusals(rank: int, folder: str) -> dict[str, str]:
    def with_state_on_meta() -> None:
        model = on_meta("olmoe")
        eplb.attach(model, torch.optim.Adagrad(model.parameters()), device="cpu")

    def with_an_odd_buffer() -> None:
        model = on_meta("olmoe")
        model.model.register_buffer("odd", torch.ones(3, device="meta"), persistent=False)
        eplb.attach(model, device="cpu")

    model, load = on_meta("olmoe"), eplb.checkpoint.load_pretrained
    eplb.attach(model, device="cpu")
    cases: dict[str, Callable[[], object]] = {
        "attach(..., device='cuda')": lambda: eplb.attach(on_meta("olmoe")),
        "Adagrad has made its state on the meta device": with_state_on_meta,
        "buffer odd of OlmoeModel is in no checkpoint": with_an_odd_buffer,
        "has no model.safetensors and no model.safetensors.index.json": lambda: load(model, folder),
        "lacks model.norm.weight (1 such weights)": lambda: load(model, folder + "/missing"),
        "neither one tensor for each of the 8": lambda: load(model, folder + "/more"),
    }
    said = {}
    for words, action in cases.items():
        with pytest.raises((AttachError, CheckpointError)) as raised:
            action()
        said[words] = str(raised.value)
    return said


def test_what_cannot_be_made_or_read_gets_one_line(tmp_path: Path) -> None:
    whole = make_model("olmoe", experts=EXPERTS)
    whole.save_pretrained(tmp_path / "missing")
    weights = load_file(tmp_path / "missing" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "missing" / "model.safetensors")
    make_model("olmoe", experts=EXPERTS * 2).save_pretrained(tmp_path / "more")
    for said in run_ranks(2, refusals, str(tmp_path)):
        for words, text in said.items():
            assert words in text and "\n" not in text
