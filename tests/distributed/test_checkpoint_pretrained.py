"""Hugging Face folders, and models that begin on the meta device: each rank reads its own experts and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe_models import FAMILIES, batch_of, make_model
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.checkpoint import CheckpointError
from eplb_runtime.hosts import AttachError

EXPERTS = 8


def scrambled(layers: int, ranks: int, replica_slots: int = 0) -> eplb.Placement:
    """Logical order backwards: no expert stands where it would without a balancer."""
    initial = eplb.Placement.initial(layers, EXPERTS, ranks, replica_slots)
    slots = initial.physical_to_logical.copy()
    slots[slots >= 0] = EXPERTS - 1 - slots[slots >= 0]
    return eplb.Placement(slots, EXPERTS, ranks, initial.home[:, ::-1])


def config(ranks: int, replica_slots: int = 0) -> eplb.BalancerConfig:
    return eplb.BalancerConfig(
        initial_placement=scrambled(2, ranks, replica_slots),
        dense_gradients="allreduce",
        replica_slots=replica_slots,
        dispatch=eplb.DispatchConfig(split_least_tokens=0 if replica_slots else 64),
    )


def on_meta(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers as hf

    settings = make_model(family, experts=EXPERTS).config
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(settings).to(dtype)


class Reads:
    """Which rows are read of which tensors, as safetensors sees it."""

    def __init__(self) -> None:
        self.bytes = 0

    def watch(self) -> None:
        from eplb_runtime.hosts.transformers import weights as transformers_weights

        reads = self

        class Slice:
            def __init__(self, part: object) -> None:
                self.part = part

            def get_shape(self) -> list[int]:
                return self.part.get_shape()

            def __getitem__(self, index: object) -> torch.Tensor:
                value = self.part[index]
                reads.bytes += value.nbytes
                return value

        class Opened:
            def __init__(self, *args: object, **options: object) -> None:
                self.file = safe_open(*args, **options)

            def __enter__(self) -> Opened:
                self.file.__enter__()
                return self

            def __exit__(self, *error: object) -> None:
                self.file.__exit__(*error)

            def keys(self) -> list[str]:
                return self.file.keys()

            def get_slice(self, key: str) -> Slice:
                return Slice(self.file.get_slice(key))

        transformers_weights.safe_open = Opened


CASES = [(family, replica_slots) for family in FAMILIES for replica_slots in (0, 1)]


def all_from_meta(rank: int, folder: str) -> dict:
    return {case: from_meta(rank, case[0], f"{folder}/{case[0]}", case[1]) for case in CASES}


def all_from_whole(rank: int) -> dict:
    return {case: from_whole(rank, *case) for case in CASES}


def from_meta(rank: int, family: str, folder: str, replica_slots: int) -> dict:
    reads = Reads()
    reads.watch()
    model = on_meta(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ranks = dist.get_world_size()
    balancer = eplb.attach(model, optimizer, config=config(ranks, replica_slots), device="cpu")
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    unloaded = model(input_ids=batch_of(rank, 0)).logits
    assert unloaded.isnan().all(), "a load that was forgotten must show"
    eplb.checkpoint.load_pretrained(model, folder)
    state = eplb.logical_state_dict(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses = []
    for step in range(2):
        ids = batch_of(rank, step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    experts = sum(p.nbytes for name, p in model.named_parameters() if name in balancer.layer_of_parameter)
    rest = sum(t.nbytes for name, t in model.state_dict().items() if name not in balancer.layer_of_parameter)
    return {"state": state, "buffers": buffers, "losses": losses, "read": reads.bytes, "own": experts + rest}


def from_whole(rank: int, family: str, replica_slots: int) -> list[float]:
    model = make_model(family, experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    eplb.attach(model, optimizer, config=config(dist.get_world_size(), replica_slots))
    losses = []
    for step in range(2):
        ids = batch_of(rank, step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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


def fused_names(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model = on_meta("olmoe", torch.bfloat16)
    eplb.attach(model, config=config(2), device="cpu")
    eplb.checkpoint.load_pretrained(model, folder)
    return eplb.logical_state_dict(model)


def test_the_models_own_fused_names_are_read_too_and_cast_to_its_dtype(tmp_path: Path) -> None:
    whole = make_model("olmoe", experts=EXPERTS)
    save_file(
        {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}, tmp_path / "model.safetensors"
    )
    for state in run_ranks(2, fused_names, str(tmp_path)):
        for name, tensor in whole.to(torch.bfloat16).state_dict().items():
            assert torch.equal(tensor, state[f"model.{name}"]), name


def experts_in_file_order(rank: int, folder: str) -> dict[str, torch.Tensor]:
    from eplb_runtime.balancer.balancer import Balancer

    Balancer._home_experts = lambda self, layer: [4 * self._runtime.job.ep_rank + row for row in range(4)]
    return fused_names(rank, folder)


def test_control_experts_read_in_the_order_of_slots_are_noticed(tmp_path: Path) -> None:
    whole = make_model("olmoe", experts=EXPERTS).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    good = run_ranks(2, fused_names, str(tmp_path))[0]
    damaged = run_ranks(2, experts_in_file_order, str(tmp_path))[0]
    name = "model.model.layers.0.mlp.experts.down_proj"
    assert torch.equal(good[name], whole.state_dict()[name.removeprefix("model.")])
    assert not torch.equal(damaged[name], good[name])


def save_logical(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model = make_model("deepseek_v3", experts=EXPERTS)
    eplb.attach(model, config=config(4))
    eplb.checkpoint.save(folder, model)
    return eplb.logical_state_dict(model)


def load_logical(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model = on_meta("deepseek_v3")
    eplb.attach(model, config=config(2), device="cpu")
    eplb.checkpoint.load(folder, model)
    assert not model(input_ids=batch_of(rank, 0)).logits.isnan().any()
    return eplb.logical_state_dict(model)


def test_a_meta_model_is_loaded_from_a_logical_checkpoint(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(4, save_logical, folder)[0]
    for loaded in run_ranks(2, load_logical, folder):
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def refusals(rank: int, folder: str) -> dict[str, str]:
    said = {}

    def refused(case: str, action: object) -> None:
        try:
            action()
            said[case] = "nothing was refused"
        except (AttachError, CheckpointError) as error:
            said[case] = str(error)

    refused("no device", lambda: eplb.attach(on_meta("olmoe")))
    model = on_meta("olmoe")
    adagrad = torch.optim.Adagrad(model.parameters())
    refused("state on meta", lambda: eplb.attach(model, adagrad, device="cpu"))
    model = on_meta("olmoe")
    model.model.register_buffer("odd", torch.ones(3, device="meta"), persistent=False)
    refused("odd buffer", lambda: eplb.attach(model, device="cpu"))
    model = on_meta("olmoe")
    eplb.attach(model, device="cpu")
    refused("nothing there", lambda: eplb.checkpoint.load_pretrained(model, folder))
    refused("missing", lambda: eplb.checkpoint.load_pretrained(model, folder + "/missing"))
    refused("other experts", lambda: eplb.checkpoint.load_pretrained(model, folder + "/more"))
    return said


def test_what_cannot_be_made_or_read_gets_one_line(tmp_path: Path) -> None:
    whole = make_model("olmoe", experts=EXPERTS)
    whole.save_pretrained(tmp_path / "missing")
    weights = load_file(tmp_path / "missing" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "missing" / "model.safetensors")
    make_model("olmoe", experts=EXPERTS * 2).save_pretrained(tmp_path / "more")
    expected = {
        "no device": "attach(..., device='cuda')",
        "state on meta": "Adagrad has made its state on the meta device",
        "odd buffer": "buffer odd of OlmoeModel is in no checkpoint",
        "nothing there": "has no model.safetensors and no model.safetensors.index.json",
        "missing": "lacks model.norm.weight (1 such weights)",
        "other experts": "neither one tensor for each of the 8",
    }
    for said in run_ranks(2, refusals, str(tmp_path)):
        assert said.keys() == expected.keys()
        for case, text in said.items():
            assert expected[case] in text, f"{case}: {text}"
            assert "\n" not in text
