"""Hugging Face folders, and models that begin on the meta device: each rank reads its own experts and no others."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from support import training
from support.moe_models import FAMILIES, batch_of, make_model
from support.ranks import run_ranks
from support.seen import assert_refused, same
from test_export import EXPERTS, scrambled
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict

import eplb_runtime as eplb
from eplb_runtime.checkpoint import disk

pytestmark = pytest.mark.long


def attach(model: nn.Module, optimizer: Any = None, replica_slots: int = 0, device: str | None = None) -> eplb.Balancer:
    start = scrambled(dist.get_world_size(), replica_slots)
    config = training.config_of(initial_placement=start, replica_slots=replica_slots)
    return eplb.attach(model, optimizer, config=config, device=device)


def on_meta(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    import transformers as hf

    settings = make_model(family, experts=EXPERTS).config
    with torch.device("meta"):
        return hf.AutoModelForCausalLM.from_config(settings).to(dtype)


def count_reads() -> list[int]:
    """Bytes that this rank reads from files, from now on, a number for each read."""
    reads: list[int] = []
    own = disk.TensorFiles._slice

    class Slice:
        def __init__(self, part: Any) -> None:
            self.get_shape, self.get_dtype, self._part = part.get_shape, part.get_dtype, part

        def __getitem__(self, index: Any) -> torch.Tensor:
            value = self._part[index]
            reads.append(value.nbytes)
            return value

    disk.TensorFiles._slice = lambda *args: Slice(own(*args))
    return reads


def from_meta(rank: int, family: str, folder: Path, replica_slots: int) -> None:
    whole, model, reads = make_model(family, experts=EXPERTS), on_meta(family), count_reads()
    expected, buffers = eplb.logical_state_dict(whole), {name: one.clone() for name, one in whole.named_buffers()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = attach(model, optimizer, replica_slots, device="cpu")
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert model(input_ids=batch_of(rank, 0)).logits.isnan().all(), "a load that was forgotten must show"
    eplb.checkpoint.load_pretrained(model, folder)
    assert same(eplb.logical_state_dict(model), expected) and same(dict(model.named_buffers()), buffers)
    own = sum(p.nbytes for name, p in model.named_parameters() if name in balancer.layer_of_parameter)
    own += sum(t.nbytes for name, t in model.state_dict().items() if name not in balancer.layer_of_parameter)
    assert sum(reads) <= own, "a rank reads its own experts and the rest, once"
    of_whole = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    attach(whole, of_whole, replica_slots)
    for step in range(2):
        losses = [training.step(*one, batch_of(rank, step)) for one in ((model, optimizer), (whole, of_whole))]
        assert losses[0] == losses[1]


def all_from_meta(rank: int, folder: Path) -> None:
    for family, replica_slots in [*((family, 0) for family in FAMILIES), ("olmoe", 1), ("gpt_oss", 1)]:
        from_meta(rank, family, folder / family, replica_slots)


def test_a_meta_model_is_attached_then_loaded_by_each_rank_for_itself(tmp_path: Path) -> None:
    """Per-expert names (OLMoE, Qwen3-MoE, Mixtral, DeepSeek-V3) and whole tensors (gpt-oss)."""
    for family in FAMILIES:
        make_model(family, experts=EXPERTS).save_pretrained(tmp_path / family, max_shard_size="40KB")
        assert len(list((tmp_path / family).glob("*.safetensors"))) > 1
    run_ranks(2, all_from_meta, tmp_path)


def fused_names(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    model = on_meta("olmoe", torch.bfloat16)
    attach(model, device="cpu")
    eplb.checkpoint.load_pretrained(model, folder)
    return eplb.logical_state_dict(model)


def test_the_models_own_fused_names_are_read_too_and_cast_to_its_dtype(tmp_path: Path) -> None:
    whole = make_model("olmoe", experts=EXPERTS)
    tensors = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = {f"model.{name}": tensor for name, tensor in whole.to(torch.bfloat16).state_dict().items()}
    for state in run_ranks(2, fused_names, tmp_path):
        assert same(state, expected)


def refusals(rank: int, folder: Path) -> None:
    def with_an_odd_buffer() -> None:
        model = on_meta("olmoe")
        model.model.register_buffer("odd", torch.ones(3, device="meta"), persistent=False)
        eplb.attach(model, device="cpu")

    model, load = on_meta("olmoe"), eplb.checkpoint.load_pretrained
    eplb.attach(model, device="cpu")
    cases: dict[str, Callable[[], object]] = {
        "attach(..., device='cuda')": lambda: eplb.attach(on_meta("olmoe")),
        "buffer odd of OlmoeModel is in no checkpoint": with_an_odd_buffer,
        "has no model.safetensors and no model.safetensors.index.json": lambda: load(model, folder),
        "has no model.model.norm.weight": lambda: load(model, folder / "missing"),
        "has more than 8 experts in model.layers.0.mlp.experts": lambda: load(model, folder / "more"),
        "has no model.model.layers.1.mlp.experts.gate_up_proj": lambda: load(model, folder / "a part"),
        "gate_up_proj is quantised": lambda: load(model, folder / "quantised"),
        "do not fit together: they have shapes [[32, 32], [32, 1]]": lambda: load(model, folder / "narrow"),
    }
    assert_refused(cases)


def test_what_cannot_be_made_or_read_gets_one_line(tmp_path: Path) -> None:
    make_model("olmoe", experts=EXPERTS).save_pretrained(tmp_path / "whole")
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    up = [name for name in weights if name.endswith("up_proj.weight")]
    changes: dict[str, dict[str, Any]] = {"missing": {"model.norm.weight": None}, "a part": {up[-1]: None}}
    changes["quantised"] = {name: weights[name].to(torch.float8_e4m3fn) for name in up}
    changes["narrow"] = {name: weights[name][:, :1].clone() for name in up}
    for name, new in changes.items():
        (tmp_path / name).mkdir()
        save_file({k: v for k, v in (weights | new).items() if v is not None}, tmp_path / name / "model.safetensors")
    make_model("olmoe", experts=EXPERTS * 2).save_pretrained(tmp_path / "more")
    run_ranks(2, refusals, tmp_path)


# -- Plain state dicts, and copies of them that have lost what torch keeps beside --------------------------------------


PLAIN_EXPERTS, RANKS = 6, 3
State = Mapping[str, Any]


def attached(**options: object) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model = make_model("olmoe", experts=PLAIN_EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, training.attach(model, optimizer, policy="static", **options)


def swapped(current: eplb.Placement) -> eplb.Placement:
    """The first homes of ranks 0 and 1 change places; rank 2 keeps its own."""
    order = np.array(current.physical_to_logical)
    order[:, [0, PLAIN_EXPERTS // RANKS]] = order[:, [PLAIN_EXPERTS // RANKS, 0]]
    return eplb.Placement(order, PLAIN_EXPERTS, RANKS, order.argsort(axis=1), current.epoch + 1)


def saved(state: State) -> State:
    torch.save(state, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


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
    training.step(model, optimizer, batch_of(rank, 0))
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
    assert same(before, eplb.logical_state_dict(model, optimizer))
    balancer.place(swapped(balancer.placement))
    moved = {key: value.clone() for key, value in model.state_dict().items()}
    try_all("after a move")
    mixed = {key: 0.5 * (value + moved[key]) for key, value in kept["state_dict"].items()}
    said["a mixture"] = [loaded(lambda: model.load_state_dict(mixed))]
    for key in moved:  # as averages are kept
        mixed[key] = moved[key].clone()
        for _ in range(300):
            mixed[key].mul_(0.9).add_(moved[key], alpha=0.1)
    said["an average"] = [loaded(lambda: model.load_state_dict(mixed))]
    balancer.place(swapped(balancer.placement))
    try_all("after a move back")
    registered = {key: value.clone() for key, value in model.state_dict().items()}
    balancer.register_all("kept", registered)
    balancer.place(swapped(balancer.placement))
    said["registered"] = [loaded(lambda: model.load_state_dict(registered))]
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
        assert all("other experts in its rows of" in line for line in (*said["after a move"], *said["a mixture"]))
        assert said["an average"] == said["registered"] == ["loaded"]
        lost = [line != "loaded" for line in said["after a move back"]]
        assert lost == [False, False, False, True, False, False, True]


def of_another_rank(rank: int) -> list[str]:
    model, optimizer, balancer = attached()
    states: list[Any] = [None] * RANKS
    dist.all_gather_object(states, {key: value.clone() for key, value in model.state_dict().items()})
    said = [loaded(lambda one=one: model.load_state_dict(one)) for one in (states[(rank + 1) % RANKS], states[0])]
    training.step(model, optimizer, batch_of(rank, 0))
    shared = [optimizer.state_dict()]
    dist.broadcast_object_list(shared)
    said += [loaded(lambda: optimizer.load_state_dict(shared[0]))]
    balancer.close()
    return said


def test_a_plain_dict_that_one_rank_alone_could_take_is_refused_by_all() -> None:
    for rank, said in enumerate(run_ranks(RANKS, of_another_rank)):
        assert all("fits only the rank and placement that it was taken at" in line for line in said)
        assert all(line.startswith("rank ") == (rank == 0) for line in said[1:])


def by_dcp(rank: int, folder: str) -> list[str]:
    """What torch.distributed.checkpoint says of plain states, saved, and read back in place from a whole model's."""
    model, optimizer, balancer = attached()
    training.step(model, optimizer, batch_of(rank, 0))
    by_torch = get_state_dict(model, optimizer)
    states = [{"model": model.state_dict()}, {"optim": optimizer.state_dict()}, by_torch[0], {"optim": by_torch[1]}]
    states += [dict(model.named_parameters())]
    torch.save(states[-1], f"{folder}/{rank}.pt")
    assert torch.load(f"{folder}/{rank}.pt").keys() == states[-1].keys()
    said = [loaded(lambda state=state: dcp.save(state, checkpoint_id=folder)) for state in states]
    assert not list(Path(folder).glob("**/*.distcp"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    dcp.save({"model": make_model("olmoe", experts=PLAIN_EXPERTS).state_dict()}, checkpoint_id=folder)
    said += [loaded(lambda state=state: dcp.load(state, checkpoint_id=folder)) for state in (states[0], states[-1])]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    balancer.close()
    return said


def test_dcp_keeps_no_rows_of_one_rank_for_all(tmp_path: Path) -> None:
    for said in run_ranks(RANKS, by_dcp, str(tmp_path)):
        assert all("checkpoint.save(..., format='dcp')" in line for line in said[:-2]), said
        assert "loaded" not in said
