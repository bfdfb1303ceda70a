"""What attach takes, what it refuses with one line, and what it leaves to the host."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from torch import nn

import eplb_runtime as eplb
from eplb_runtime import hosts
from eplb_runtime.events import LoadMeasured
from eplb_runtime.hosts import AttachError


def refusal(make: object) -> str:
    try:
        make()  # type: ignore[operator]
    except AttachError as error:
        return str(error)
    return "nothing was refused"


def interrupted_on_rank_1(rank: int, call: Callable[[], object]) -> str:
    """What the other rank says of an interrupt while rank 1 looks at its model."""
    if rank == 0:
        return refusal(call)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as error:
        patch.setattr(hosts, "_describe", Mock(side_effect=KeyboardInterrupt("by the test")))
        call()
    return f"rank 1: KeyboardInterrupt: {error.value}"


def bad_inputs(rank: int, placement_file: str) -> dict[str, str]:
    said = {}
    model = make_model("olmoe", experts=9)
    said["experts not divisible"] = refusal(lambda: eplb.attach(model))
    dense = nn.Sequential(nn.Linear(4, 4))
    said["no MoE layer"] = refusal(lambda: eplb.attach(dense))
    model = make_model("olmoe", experts=8)
    names = [name for name, _ in model.named_parameters()]
    without = [p for name, p in model.named_parameters() if "down_proj" not in name]
    optimizer = torch.optim.AdamW(without)
    said["optimizer without experts"] = refusal(lambda: eplb.attach(model, optimizer))
    said["foreign placement"] = refusal(
        lambda: eplb.attach(model, config=eplb.BalancerConfig(initial_placement=placement_file))
    )
    said["missing placement"] = refusal(
        lambda: eplb.attach(model, config=eplb.BalancerConfig(initial_placement="/nowhere/p.json"))
    )
    said["mixing optimizer"] = refusal(lambda: eplb.attach(model, torch.optim.Adafactor(model.parameters())))
    said["different configs"] = refusal(lambda: eplb.attach(model, config=eplb.BalancerConfig(interval=10 + rank)))
    other = eplb.BalancerConfig(migration=eplb.MigrationConfig(staging_bytes=2**20 + rank))
    said["different inner settings"] = refusal(lambda: eplb.attach(model, config=other))
    said["a dict"] = refusal(lambda: eplb.attach(model, config={"interval": 3} if rank == 0 else None))
    said["the class"] = refusal(lambda: eplb.attach(model, config=eplb.BalancerConfig if rank == 0 else None))
    said["of migration alone"] = refusal(lambda: eplb.attach(model, config=eplb.MigrationConfig()))
    said["an interrupt"] = interrupted_on_rank_1(rank, lambda: eplb.attach(model))
    different = make_model("olmoe", experts=8, seed=rank)
    said["different weights"] = refusal(lambda: eplb.attach(different))
    said["DDP"] = refusal(lambda: eplb.attach(nn.parallel.DistributedDataParallel(different)))
    said["meta"] = refusal(lambda: eplb.attach(make_model("olmoe", experts=8).to("meta")))
    said["untouched"] = str([name for name, _ in model.named_parameters()] == names)
    balancer = eplb.attach(model)
    said["twice"] = refusal(lambda: eplb.attach(model))
    balancer.close()
    return said


def test_bad_input_gets_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    eplb.Placement.initial(3, 64, 8).save(file)
    expected = {
        "experts not divisible": "9 experts cannot be spread evenly over 2 ranks",
        "no MoE layer": "Sequential has no MoE layer",
        "optimizer without experts": "does not hold model.layers.0.mlp.experts.down_proj",
        "foreign placement": "3 MoE layers x 64 experts on 8 ranks with 0 replica slots, this job has 2 MoE layers x 8",
        "missing placement": "/nowhere/p.json: cannot be read",
        "mixing optimizer": "Adafactor mixes the experts",
        "different configs": "rank 1 has another interval in its config than rank 0",
        "different inner settings": "rank 1 has another staging_bytes in its config than rank 0",
        "a dict": "config=a dict: give BalancerConfig(interval=3)",
        "the class": "config=BalancerConfig: give BalancerConfig(...)",
        "of migration alone": "config=a MigrationConfig: give BalancerConfig(...)",
        "an interrupt": "rank 1: KeyboardInterrupt: by the test",
        "different weights": "rank 1 has another set of weights than rank 0: seed all ranks equally",
        "DDP": "attach first, then wrap",
        "meta": "the model is on the meta device: name the one to make it on",
        "twice": "attached already",
    }
    for said in run_ranks(2, bad_inputs, str(file)):
        assert said.pop("untouched") == "True"
        assert said.keys() == expected.keys()
        for case, text in said.items():
            assert expected[case] in text, f"{case}: {text}"
            assert "\n" not in text


def optimizer_kept(rank: int) -> None:
    """An optimizer made, and used, before attach: groups, options and state stay, cut to the local experts."""
    model = make_model("qwen3_moe", experts=8)
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": experts, "lr": 7e-4, "weight_decay": 0.3}], lr=1e-3)
    for step in range(2):
        training.step(model, optimizer, batch_of(0, step))
    whole = eplb.logical_state_dict(model, optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(dense_gradients="allreduce"))
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert (optimizer.param_groups[1]["lr"], optimizer.param_groups[1]["weight_decay"]) == (7e-4, 0.3)
    local = optimizer.param_groups[1]["params"][0]
    assert local.shape[0] == 4
    assert optimizer.state[local]["exp_avg"].shape == local.shape
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    attached = eplb.logical_state_dict(model, optimizer)
    assert whole.keys() == attached.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, attached[name]), name
    balancer.close()


def test_an_optimizer_made_before_keeps_groups_options_and_state() -> None:
    run_ranks(2, optimizer_kept)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a if name.startswith("model."))


def count_load(rank: int) -> list[int]:
    """Tokens counted per step: padding and evaluation do not count, recompute counts once."""
    model = make_model("olmoe", experts=8)
    model.activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = eplb.attach(
        model, optimizer, config=eplb.BalancerConfig(interval=2, policy="static", dense_gradients="allreduce")
    )
    model.train()
    ids = batch_of(rank, 0)
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    counted = []
    for attention_mask in (None, mask):
        model(input_ids=ids, labels=ids, attention_mask=attention_mask).loss.backward()
        counted.append(int(balancer.runtime.counter.counts[0].sum()))
        model.eval()
        with torch.no_grad():
            model(input_ids=ids)
        model.train()
        assert int(balancer.runtime.counter.counts[0].sum()) == counted[-1]
        optimizer.step()
    optimizer.step()
    assert balancer.events.of_type(LoadMeasured)
    balancer.close()
    return counted


def test_load_is_counted_once_for_real_tokens_in_training() -> None:
    choices = 2 * 12 * 2  # sequences, length, top-k
    assert run_ranks(2, count_load) == [[choices, choices - 5 * 2]] * 2


def infer(rank: int) -> int:
    model = make_model("olmoe", experts=8).eval()
    balancer = eplb.attach(model, config=eplb.BalancerConfig(interval=3, gate="always"))
    outputs = []
    with torch.no_grad():
        for _ in range(7):
            outputs.append(model(input_ids=batch_of(rank, 0) % 9).logits)
            balancer.step()
    assert all(torch.equal(outputs[0], other) for other in outputs)
    moved = balancer.placement.epoch
    balancer.close()
    return moved


def test_inference_is_balanced_too_and_says_the_same() -> None:
    assert min(run_ranks(4, infer)) >= 1


def save_and_restore(rank: int, folder: str) -> None:
    model = make_model("olmoe", experts=8)
    balancer = eplb.attach(model)
    before = eplb.logical_state_dict(model)
    start = balancer.placement
    other = eplb.Placement(start.physical_to_logical[:, ::-1], 8, 2, start.home[:, ::-1], 5)
    balancer.load_state_dict({"step": 40, "placement": other.to_json()})
    assert balancer.placement == other
    assert not torch.equal(
        next(iter(balancer.runtime.registry.parameters())), before["model.model.layers.0.mlp.experts.gate_up_proj"][:4]
    )
    after = eplb.logical_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    if rank == 0:
        balancer.placement.save(Path(folder) / "p.json")
    dist.barrier()
    again = make_model("olmoe", experts=8)
    second = eplb.attach(again, config=eplb.BalancerConfig(initial_placement=str(Path(folder) / "p.json")))
    assert second.placement.digest() == other.digest()
    assert all(torch.equal(before[name], value) for name, value in eplb.logical_state_dict(again).items())
    balancer.close()
    second.close()


def test_a_placement_is_saved_and_restored(tmp_path: Path) -> None:
    run_ranks(2, save_and_restore, str(tmp_path))


def left_by_cycles(rank: int) -> list[tuple[int, ...]]:
    """Threads, descriptors, tensors and objects of ours, after some cycles of attach and close, and after more."""
    left = []
    for cycles in (3, 3):
        for _ in range(cycles):
            model = make_model("olmoe", experts=8, layers=1)
            optimizer = torch.optim.AdamW(model.parameters())
            balancer = training.attach(model, optimizer, gate="always", replica_slots=1, interval=2)
            for step in range(3):
                model(input_ids=(ids := batch_of(rank, step)), labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            balancer.close()
            del model, optimizer, balancer
        gc.collect()
        ours = sum(str(type(one).__module__).startswith(("eplb_runtime", "torch.nn")) for one in gc.get_objects())
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        left.append((threading.active_count(), len(os.listdir("/proc/self/fd")), tensors, ours))
    return left


def test_cycles_of_attach_and_close_leave_nothing() -> None:
    for first, second in run_ranks(2, left_by_cycles):
        assert second == first
