"""What attach takes, what it refuses in a line, what it leaves to the host; and that one that fails, wherever and on
whichever rank, fails on all and leaves models and optimizers as they were."""

import gc
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support import training
from support.job import Job, Run
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import assert_refused, differing, said_by
from torch import nn

import eplb_runtime as eplb
from eplb_runtime import hosts
from eplb_runtime.events import LoadMeasured
from eplb_runtime.hosts import AttachError
from eplb_runtime.hosts.attaching import attach as attaching
from eplb_runtime.hosts.attaching.checks import wait_for_ranks

CONFIG = eplb.BalancerConfig(dense_gradients="allreduce", timeout_seconds=30, replica_slots=1)


def bad_inputs(rank: int, file: Path) -> None:
    model, different = make_model("olmoe"), make_model("olmoe", seed=rank)
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "down_proj" not in name])

    def with_config(config: Any) -> Callable[[], object]:
        return lambda: eplb.attach(model, config=config)

    def with_settings(**settings: Any) -> Callable[[], object]:
        return with_config(eplb.BalancerConfig(**settings))

    migration = eplb.MigrationConfig(staging_bytes=2**20 + rank)
    foreign = "3 MoE layers x 64 experts on 8 ranks with 0 replica slots, this job has 2 MoE layers x 8"
    cases = {
        "9 experts cannot be spread evenly over 2 ranks": lambda: eplb.attach(make_model("olmoe", experts=9)),
        "Sequential has no MoE layer": lambda: eplb.attach(nn.Sequential(nn.Linear(4, 4))),
        "does not hold model.layers.0.mlp.experts.down_proj": lambda: eplb.attach(model, optimizer),
        foreign: with_settings(initial_placement=str(file)),
        "/nowhere/p.json: cannot be read": with_settings(initial_placement="/nowhere/p.json"),
        "Adafactor mixes the experts": lambda: eplb.attach(model, torch.optim.Adafactor(model.parameters())),
        "rank 1 has another interval in its config than rank 0": with_settings(interval=10 + rank),
        "rank 1 has another staging_bytes in its config than rank 0": with_settings(migration=migration),
        "config=a dict: give BalancerConfig(...)": with_config({"interval": 3} if rank == 0 else None),
        "config=BalancerConfig: give BalancerConfig(...)": with_config(eplb.BalancerConfig if rank == 0 else None),
        "config=a MigrationConfig: give BalancerConfig(...)": with_config(eplb.MigrationConfig()),
        "rank 1 has another set of weights than rank 0: seed all ranks equally": lambda: eplb.attach(different),
        "attach first, then wrap": lambda: eplb.attach(nn.parallel.DistributedDataParallel(different)),
        "on the meta device: name the one to make it on": lambda: eplb.attach(make_model("olmoe").to("meta")),
    }
    assert_refused(cases)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(hosts, "_describe", Mock(side_effect=KeyboardInterrupt("by the test")))
        said = "by the test" if rank else "rank 1: KeyboardInterrupt: by the test"
        with pytest.raises(KeyboardInterrupt if rank else AttachError, match=said):
            eplb.attach(model)
    assert [name for name, _ in model.named_parameters()] == names
    balancer = eplb.attach(model)
    assert "attached already" in said_by(lambda: eplb.attach(model))
    balancer.close()


def test_bad_input_gets_one_clear_line(tmp_path: Path) -> None:
    eplb.Placement.initial(3, 64, 8).save(tmp_path / "p.json")
    run_ranks(2, bad_inputs, tmp_path / "p.json")


def optimizer_kept(rank: int) -> None:
    """An optimizer made, and used, before attach: groups, options and state stay, cut to the local experts."""
    model = make_model("qwen3_moe")
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    others = [p for name, p in model.named_parameters() if ".experts." not in name]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": experts, "lr": 7e-4, "weight_decay": 0.3}], lr=1e-3)
    for step in range(2):
        training.step(model, optimizer, batch_of(0, step))
    whole = eplb.logical_state_dict(model, optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    balancer = training.attach(model, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert (optimizer.param_groups[1]["lr"], optimizer.param_groups[1]["weight_decay"]) == (7e-4, 0.3)
    local = optimizer.param_groups[1]["params"][0]
    assert local.shape[0] == 4 and optimizer.state[local]["exp_avg"].shape == local.shape
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    assert differing(whole, eplb.logical_state_dict(model, optimizer)) == []
    balancer.close()


def test_an_optimizer_made_before_keeps_groups_options_and_state() -> None:
    run_ranks(2, optimizer_kept)


def count_load(rank: int) -> list[int]:
    """Tokens counted per step: padding and evaluation do not count, recompute counts once."""
    model = make_model("olmoe").train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = training.attach(model, optimizer, interval=2, policy="static")
    ids = batch_of(rank, 0)
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    counted = []
    for attention_mask in (None, mask):
        model(input_ids=ids, labels=ids, attention_mask=attention_mask).loss.backward()
        counted.append(int(balancer.runtime.counter.counts[0].sum()))
        with torch.no_grad():
            model.eval()(input_ids=ids)
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
    model = make_model("olmoe").eval()
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
    assert min(run_ranks(2, infer)) >= 1


def start_from_a_file(rank: int, file: Path) -> None:
    model, initial = make_model("olmoe"), eplb.Placement.initial(2, 8, 2)
    whole = {name: tensor.clone() for name, tensor in eplb.logical_state_dict(model).items()}
    other = eplb.Placement(initial.physical_to_logical[:, ::-1], 8, 2, initial.home[:, ::-1], 5)
    if rank == 0:
        other.save(file)
    dist.barrier()
    balancer = eplb.attach(model, config=eplb.BalancerConfig(initial_placement=str(file)))
    assert balancer.placement.digest() == other.digest()
    first = next(iter(balancer.runtime.registry.parameters()))
    assert not torch.equal(first, whole["model.model.layers.0.mlp.experts.gate_up_proj"][:4])
    assert differing(whole, eplb.logical_state_dict(model)) == []
    balancer.close()


def test_a_job_starts_with_the_placement_of_a_file(tmp_path: Path) -> None:
    run_ranks(2, start_from_a_file, tmp_path / "p.json")


def left_by_cycles(rank: int) -> list[tuple[int, ...]]:
    """Threads, descriptors, tensors and objects of ours, after some cycles of attach and close, and after more."""
    left = []
    for cycles in (3, 3):
        for _ in range(cycles):
            settings = {"interval": 2, "lag": 1, "replica_slots": 1, "overlap": True}
            job = Run(rank, Job(layers=1, planner=eplb.plan, settings=settings)).attach().train(3)
            job.balancer.close()
            del job
        gc.collect()
        ours = sum(str(type(one).__module__).startswith(("eplb_runtime", "torch.nn")) for one in gc.get_objects())
        tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
        left.append((threading.active_count(), len(os.listdir("/proc/self/fd")), tensors, ours))
    return left


def test_cycles_of_attach_and_close_leave_nothing() -> None:
    for first, second in run_ranks(2, left_by_cycles):
        assert second == first


# -- one that fails ----------------------------------------------------------------------------------------------------


class WithoutHooks(torch.optim.Optimizer):
    """Stands before another optimizer and lacks what that has, as wrappers of some libraries do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)
    defaults = property(lambda self: self.inner.defaults)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> eplb.Balancer:
    return eplb.attach(model, optimizer, config=replace(CONFIG, **settings))


def failing_in(name: str, on: int, at: int = 1) -> Callable[..., object]:
    """A part of attaching raises on one rank, in its call of this number."""

    def case(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        own, calls = getattr(attaching, name), count(1)

        def part(*args: Any, **named: Any) -> Any:
            if rank == on and next(calls) == at:
                raise MemoryError(f"made to fail in {name}")
            return own(*args, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attaching, name, part)
            attach(model, optimizer)

    return case


FAILING: dict[str, Callable[..., object]] = {
    "Sequential has no MoE layer": lambda rank, model, optimizer: attach(
        model if rank else nn.Sequential(nn.Linear(4, 4)), optimizer
    ),
    "dispatch='deepep': rank 0: it carries between GPUs, and this model is on cpu": lambda _, model, optimizer: attach(
        model, optimizer, dispatch="deepep"
    ),
    "MemoryError: made to fail in install_parameter": failing_in("install_parameter", 0, at=3),  # of the second layer
    "MemoryError: made to fail in mark_state": failing_in("mark_state", 1),
    "WithoutHooks": lambda _, model, optimizer: attach(model, WithoutHooks(optimizer)),
}


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that an attach changes, by identity and by value."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "parameters": {name: id(p) for name, p in model.named_parameters()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {n: (len(m._forward_pre_hooks), len(m._state_dict_hooks)) for n, m in model.named_modules()},
        "held": [id(p) for p in held],
        "states": [id(optimizer.state[p]["exp_avg"]) for p in held],
        "optimizer hooks": (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)),
    }


def fails(rank: int) -> dict[str, str]:
    model = make_model("olmoe")
    optimizer = torch.optim.AdamW(model.parameters())
    training.step(model, optimizer, batch_of(0, 0))  # state, equal on all ranks
    before = everything(model, optimizer)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    ids = batch_of(rank, 1)
    logits, said = model(input_ids=ids).logits, {}
    for words, case in FAILING.items():
        said[words] = said_by(lambda case=case: case(rank, model, optimizer))
        assert everything(model, optimizer) == before, words
        assert torch.equal(model(input_ids=ids).logits, logits), words
        assert differing(weights, dict(model.named_parameters())) == []
    balancer = attach(model, optimizer)
    training.step(model, optimizer, ids)
    balancer.close()
    return said


def test_an_attach_that_fails_changes_nothing_and_the_next_one_works() -> None:
    for rank, said in enumerate(run_ranks(2, fails)):
        for words, line in said.items():
            assert words.removeprefix(f"rank {rank}: ") in line and "\n" not in line, (words, line)


def hooks_left(rank: int) -> set[int]:
    """Of parameters that stay the same objects, after an attach that fails at its end."""
    model = make_model("olmoe")
    eplb.shard_experts(model, ep_group=(group := [dist.new_group([one]) for one in range(2)][rank]))
    config = replace(CONFIG, replica_slots=0, run="/dev/null/no folder")
    with pytest.raises(AttachError, match="no folder"):
        eplb.attach(model, torch.optim.AdamW(model.parameters()), config=config, ep_group=group)
    return {len(parameter._backward_hooks or ()) for parameter in model.parameters()}


def test_no_hook_on_gradients_is_left() -> None:
    assert run_ranks(2, hooks_left) == [{0}, {0}]


def layers_called(rank: int) -> tuple[str, list[int]]:
    """What is said where rank 1 alone is refused, and which ranks have called experts by then."""
    model = make_model("olmoe")
    experts, called = model.model.layers[0].mlp.experts, []
    own = experts.forward
    experts.forward = lambda *given: called.append(rank) or own(*given)  # type: ignore[func-returns-value]
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if rank == 0 or "experts" not in name])
    return said_by(lambda: attach(model, optimizer)), called


def test_layers_are_called_once_no_rank_is_refused() -> None:
    """A layer of the user's own may wait for other ranks."""
    for said, called in run_ranks(2, layers_called):
        assert "the optimizer does not hold" in said and called == []


def comes_late(rank: int) -> list[str]:
    """Rank 1 comes when rank 0 has said that it waits."""
    store = dist.distributed_c10d._get_default_store()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: (heard.append(record.getMessage()), store.set("said", ""))  # type: ignore
    logging.getLogger("eplb_runtime").addHandler(handler)
    if rank == 1:
        store.wait(["said"])
    wait_for_ranks([0, 1], "attach", 30 if rank else 0.5, patient=True)
    return heard


def test_a_rank_that_loads_its_model_for_long_is_waited_for() -> None:
    (late,), nothing = run_ranks(2, comes_late)
    assert late.startswith("attach has waited 0.5 s for rank 1, which is slower or") and not nothing
