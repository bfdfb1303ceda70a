"""PEFT's LoRA on expert matrices: adapters move with their experts; PEFT saves and loads them as its own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.job import Job, Run, alone, moved, of_family, static
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import differing, digests, furthest, heard
from support.shuffle import plan_shuffle
from support.training import undone
from torch import Tensor, nn

import eplb_runtime as eplb

pytestmark = pytest.mark.long

pytest.importorskip("peft", reason="PEFT is not installed")

STEPS, EXPERTS, RANKS = 3, 8, 2
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def with_lora(job: Job, **more: Any) -> Any:
    """``grouped_mm`` adds grouped products, where rows of ``r`` fit."""
    from peft import LoraConfig, get_peft_model
    from transformers.integrations import moe

    has_grouped_products = job.dtype is not torch.float64
    moe._can_use_grouped_mm = lambda *_: has_grouped_products
    base = of_family(job)
    torch.manual_seed(3)
    chosen = {"target_modules": ["q_proj"], "target_parameters": TARGETS, "init_lora_weights": False, "lora_alpha": 24}
    return get_peft_model(base, LoraConfig(**{**chosen, "r": 16, **more}))


job = partial(
    Job,
    model=with_lora,
    layers=1,
    dtype=torch.float64,
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    planner=plan_shuffle,
    steps=STEPS,
)
WITH_COPIES = job(planner=eplb.plan, settings={"replica_slots": 1})


def in_layout_of_peft(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A logical state dict, adapters of experts as a model that nobody balances has them."""
    found = {}
    for name, tensor in state.items():
        if ".experts." in name and tensor.ndim == 3 and "lora_A" in name:
            tensor = tensor.reshape(-1, tensor.shape[2])
        elif ".experts." in name and tensor.ndim == 3 and "lora_B" in name:
            tensor = tensor.permute(1, 2, 0).reshape(tensor.shape[1], -1)
        found[name] = tensor
    return found


def runs(rank: int, job: Job) -> dict[str, Any]:
    """All homes fixed, and all homes moved in each step; without us on one rank."""
    traces = []
    for way in (static(job), job)[job is WITH_COPIES :]:
        run = Run(rank, way).attach().train(STEPS)
        state = in_layout_of_peft(run.state())
        traces.append(run.end())
    peft = alone(job, RANKS).train(STEPS)
    return {
        "losses": (peft.losses, traces[0].losses, traces[-1].losses),
        "commits": [trace.commits for trace in traces],
        "static is moved": differing(traces[0].bits, traces[-1].bits),
        "beside PEFT": furthest(state, peft.state()),
    }


JOBS = {
    "grouped products": job(layers=2),
    "base in bfloat16, adapters in float32": job(dtype=torch.bfloat16),
    "copies": WITH_COPIES,
}
BESIDE_PEFT = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: torch.inf}


def all_runs(rank: int) -> dict[str, dict[str, Any]]:
    return {name: runs(rank, job) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def of_jobs() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(RANKS, all_runs)


@pytest.mark.parametrize("name", JOBS)
def test_static_is_moved_and_both_are_peft(of_jobs: list[dict[str, dict[str, Any]]], name: str) -> None:
    job, found = JOBS[name], [one[name] for one in of_jobs]
    for one in found:
        assert one["beside PEFT"] < BESIDE_PEFT[job.dtype]
        assert one["static is moved"] == []
        assert one["commits"] == [0, STEPS] or (name == "copies" and one["commits"][0] > 0)
    means = [sum(losses) / RANKS for losses in zip(*(one["losses"][2] for one in found), strict=True)]
    assert means == pytest.approx(
        found[0]["losses"][0], abs={torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.2}[job.dtype]
    )


def used(rank: int, folder: Path) -> dict[str, Any]:
    from peft import PeftModel

    found: dict[str, Any] = {}
    runs = {}
    for name, way in (("static", static), ("moved", moved)):
        run = runs[name] = Run(rank, way(job(layers=2))).attach().train(3)
        found["gathered everywhere"] = []
        with undone(eplb.Balancer):
            eplb.Balancer.gather_experts = lambda *_, **__: found["gathered everywhere"].append(1)
            run.model.save_pretrained(folder / name)
    run = Run(rank, static(job(layers=2, model=partial(with_lora, target_parameters=[])))).attach()
    with heard() as warned:
        run.model.save_pretrained(folder / f"attention {rank}")
    found["warned"] = list(warned)
    run.balancer.close()
    model = runs["moved"].model.eval()
    logical = eplb.logical_state_dict(model)
    ids = batch_of(rank, 77)

    def loss(model: nn.Module) -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    adapted = loss(model)
    base = make_model("olmoe", experts=EXPERTS).double().eval()
    with model.disable_adapter():
        found["disabled"] = loss(model), loss(base), adapted
    merged = PeftModel.from_pretrained(base, folder / "moved").merge_and_unload()
    found["saved, merged elsewhere"] = loss(merged), adapted
    merged = {name: tensor for name, tensor in merged.state_dict().items() if ".experts." in name}
    other = PeftModel.from_pretrained(make_model("olmoe", experts=EXPERTS).double(), folder / "static")
    of_static = {k: v for k, v in other.merge_and_unload().state_dict().items() if ".experts." in k}
    found["merged after moves"] = differing(digests(merged), digests(of_static))
    kept = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, _ in kept if rank else ():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    found["saved while freed"] = said(lambda: model.save_pretrained(folder / "freed"))
    for parameter, data in kept:
        parameter.data = data
    # Adapters in PEFT's layout go to the experts that are here, wherever these have moved to.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.zero_()
    model.load_adapter(folder / "moved", "default", is_trainable=True)
    loaded = digests(eplb.logical_state_dict(model))
    found["loaded"] = [name for name in differing(loaded, digests(logical)) if "lora" in name]
    found["moved"] = len({run.balancer.placement.digest() for run in runs.values()}) == 2
    found["refused"] = [
        said(model.merge_and_unload),
        said(model.unload),
        said(model.merge_adapter),
        said(lambda: model.add_adapter("second", model.peft_config["default"])),
        said(lambda: eplb.checkpoint.export_pretrained(model, folder / "exported")),
        said(lambda: model.delete_adapter("default")),
        said(lambda: model.load_adapter(folder / "moved", "default", low_cpu_mem_usage=True)),
    ]
    found["after refusals"] = loss(model), adapted
    for run in runs.values():
        run.balancer.close()
    return found


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, eplb.checkpoint.ExportError) as error:
        return str(error)
    return "nothing was refused"


def test_peft_saves_loads_and_disables_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    close = {"abs": 1e-6}
    for found in run_ranks(RANKS, used, tmp_path):
        assert found["gathered everywhere"] == []
        assert found["warned"] == [], "experts are frozen"
        assert found["moved"] and found["merged after moves"] == [] and found["loaded"] == []
        disabled, base, adapted = found["disabled"]
        assert disabled == pytest.approx(base, **close) and abs(adapted - base) > 1e-3
        assert found["saved, merged elsewhere"][0] == pytest.approx(found["saved, merged elsewhere"][1], **close)
        assert found["saved while freed"].startswith("save_pretrained of an attached model: ")
        assert "freed" in found["saved while freed"] and "\n" not in found["saved while freed"]
        merging, unloading, here, another, exported, deleting, loading = found["refused"]
        assert "experts compute with their adapters" in deleting and "low_cpu_mem_usage=True" in loading
        assert found["after refusals"][0] == pytest.approx(found["after refusals"][1], **close)
        assert merging == unloading == here and "merge_and_unload in a process of its own" in merging
        assert "was added after attach" in another
        assert "its own save_pretrained" in exported
        assert all("\n" not in line for line in found["refused"])
    one, other = (load_file(tmp_path / kind / "adapter_model.safetensors") for kind in ("static", "moved"))
    assert differing(digests(one), digests(other)) == [] and len(one) == 2 * (2 + 4)
    assert {tuple(one[name].shape) for name in one if ".experts." in name and "lora_A" in name} == {(EXPERTS * 16, 32)}


def loaded_beside_copies(rank: int, folder: Path) -> tuple[list[float], bool]:
    """Losses of forwards before and after a call that writes into adapters, with copies."""
    run = Run(rank, WITH_COPIES).attach().train(3)
    model, balancer = run.model.eval(), run.balancer
    model.save_pretrained(folder)
    ids = batch_of(rank, 77)
    losses = []
    for call in (lambda: None, lambda: model.load_adapter(folder, "default", is_trainable=True)):
        call()
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=ids).loss))
    has_copies = balancer.runtime.maps.replicas.has_copies(0)
    balancer.close()
    return losses, has_copies


def test_copies_follow_what_peft_writes(tmp_path: Path) -> None:
    for losses, has_copies in run_ranks(RANKS, loaded_beside_copies, tmp_path):
        assert has_copies and losses == pytest.approx([losses[0]] * 2, abs=1e-6)


def refusals(rank: int) -> dict[str, str]:
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    found = {}

    def tried(case: str, model: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        found[case] = said(lambda: eplb.attach(model, torch.optim.AdamW(trained)))

    model = with_lora(job())
    model.add_adapter("second", LoraConfig(r=4, target_parameters=TARGETS))
    tried("several", model)
    model = with_lora(job())
    model.merge_adapter()
    tried("merged", model)
    tried("biases", with_lora(job(family="gpt_oss"), target_parameters=["mlp.experts.down_proj_bias"]))
    tried("no PeftModel", inject_adapter_in_model(LoraConfig(target_parameters=TARGETS), make_model("olmoe")))
    base = make_model("olmoe", experts=EXPERTS)
    eplb.shard_experts(base)
    tried("after shard_experts", get_peft_model(base, LoraConfig(r=4, target_parameters=TARGETS)))
    return found


def test_what_cannot_be_split_is_refused_at_attach() -> None:
    wanted = {
        "several": "has 2 adapters (default, second), and one moves with an expert",
        "merged": "unmerge_adapter() before attach",
        "no PeftModel": "no PeftModel is around it",
        "biases": "one pair of matrices for all experts",
        "after shard_experts": "get_peft_model first, then shard_experts",
    }
    for found in run_ranks(RANKS, refusals):
        for case, line in wanted.items():
            assert line in found[case] and "\n" not in found[case], case
