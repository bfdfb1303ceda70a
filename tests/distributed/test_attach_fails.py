"""An attach that fails, wherever and on whichever rank, fails on all and leaves models and optimizers as they were."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError
from eplb_runtime.hosts.attaching import attach as attaching
from eplb_runtime.hosts.attaching.checks import wait_for_ranks

EXPERTS = 8
CONFIG = eplb.BalancerConfig(dense_gradients="allreduce", timeout_seconds=30, replica_slots=1)


class WithoutHooks(torch.optim.Optimizer):
    """Stands before another optimizer and lacks what that has, as wrappers of some libraries do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.inner.defaults


def attach(model: nn.Module, optimizer: torch.optim.Optimizer | None, dispatch: str = "all_to_all") -> eplb.Balancer:
    return eplb.attach(model, optimizer, config=replace(CONFIG, dispatch=dispatch))


def raising(*_: object, **__: object) -> None:
    raise MemoryError("made to fail")


def failing_in(name: str, only_on: int) -> Callable[[int, nn.Module, torch.optim.Optimizer], None]:
    """A part of attaching raises on one rank."""

    def case(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        whole = getattr(attaching, name)
        if rank == only_on:
            setattr(attaching, name, raising)
        try:
            attach(model, optimizer)
        finally:
            setattr(attaching, name, whole)

    return case


def without_hooks(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    attach(model, WithoutHooks(optimizer))


def deepep_on_a_cpu(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    attach(model, optimizer, "deepep")


def another_model_on_one_rank(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    attach(model if rank else nn.Sequential(nn.Linear(4, 4)), optimizer)


def late_part_of_a_layer(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The first layer is cut already when the second fails."""
    second = model.model.layers[1].mlp.experts
    own = attaching.install_parameter

    def install(layer: Any, *args: Any) -> None:
        if rank == 0 and layer.experts is second:
            raise ValueError("made to fail")
        own(layer, *args)

    attaching.install_parameter = install
    try:
        attach(model, optimizer)
    finally:
        attaching.install_parameter = own


CASES: dict[str, tuple[Callable[[int, nn.Module, torch.optim.Optimizer], None], str]] = {
    "describing": (another_model_on_one_rank, "Sequential has no MoE layer"),
    "dispatch": (deepep_on_a_cpu, "dispatch='deepep': rank 0: it carries between GPUs, and this model is on cpu"),
    "the second layer": (late_part_of_a_layer, "ValueError: made to fail"),
    "marking": (failing_in("mark_state", 1), "MemoryError: made to fail"),
    "hooks": (without_hooks, "WithoutHooks"),
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


def step(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    training.step(model, optimizer, batch_of(rank, 0))


def fails(rank: int) -> dict[str, Any]:
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = torch.optim.AdamW(model.parameters())
    step(0, model, optimizer)  # state, equal on all ranks
    before = everything(model, optimizer)
    weights = {name: p.clone() for name, p in model.named_parameters()}
    ids = batch_of(rank, 1)
    logits = model(input_ids=ids).logits
    said, changed = {}, []
    for name, (case, _) in CASES.items():
        try:
            case(rank, model, optimizer)
        except (AttachError, RuntimeError) as error:
            said[name] = str(error)
        if everything(model, optimizer) != before:
            changed.append(name)
        assert torch.equal(model(input_ids=ids).logits, logits), name
        assert all(torch.equal(p, weights[n]) for n, p in model.named_parameters())
    balancer = attach(model, optimizer, "auto")
    step(rank, model, optimizer)
    said["right"] = str(len(optimizer.state))
    balancer.close()
    return {"said": said, "changed": changed}


def test_an_attach_that_fails_changes_nothing_and_the_next_one_works() -> None:
    for result in run_ranks(2, fails):
        assert result["changed"] == [] and result["said"].keys() == {*CASES, "right"}
        for name, (_, expected) in CASES.items():
            assert expected in result["said"][name], result["said"][name]
            assert "\n" not in result["said"][name]


def hooks_left(rank: int) -> set[int]:
    """Of parameters that stay the same objects, after an attach that fails at its end."""
    model = make_model("olmoe", experts=EXPERTS)
    eplb.shard_experts(model, ep_group=(group := [dist.new_group([one]) for one in range(2)][rank]))
    config = replace(CONFIG, replica_slots=0, run="/dev/null/no folder")
    with pytest.raises(AttachError, match="no folder"):
        eplb.attach(model, torch.optim.AdamW(model.parameters()), config=config, ep_group=group)
    return {len(parameter._backward_hooks or ()) for parameter in model.parameters()}


def test_no_hook_on_gradients_is_left() -> None:
    assert run_ranks(2, hooks_left) == [{0}, {0}]


def layers_called(rank: int) -> tuple[str, list[int]]:
    """What is said where rank 1 alone is refused, and which ranks have called experts by then."""
    model = make_model("olmoe", experts=EXPERTS)
    experts, called = model.model.layers[0].mlp.experts, []
    own = experts.forward
    experts.forward = lambda *given: called.append(rank) or own(*given)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if rank == 0 or "experts" not in name])
    with pytest.raises(AttachError) as raised:
        attach(model, optimizer)
    return str(raised.value), called


def test_layers_are_called_once_no_rank_is_refused() -> None:
    """A layer of the user's own may wait for other ranks."""
    for said, called in run_ranks(2, layers_called):
        assert "the optimizer does not hold" in said and called == []


def meta(rank: int) -> str:
    """Rank 1's code does not make a buffer anew that is in no checkpoint."""
    with torch.device("meta"):
        model = make_model("olmoe", experts=EXPERTS)
    if rank:
        model._init_weights = lambda module: None
    said = "nothing"
    try:
        eplb.attach(model, config=CONFIG, device="cpu")
    except AttachError as error:
        said = str(error)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    return said


def test_a_rank_that_does_not_come_is_named() -> None:
    first, second = run_ranks(2, left_alone)
    assert first == "rank 2 did not come to attach within 0.5 s: it is collective: call it on every rank"
    assert "rank 2 did not come to attach" in second


def left_alone(rank: int) -> str:
    """Of a call of three ranks, to which one does not come. Rank 1 would wait for longer, when rank 0 gives up."""
    with pytest.raises(RuntimeError) as refused:
        wait_for_ranks([0, 1, 2], "attach", 30 if rank else 0.5)
    return str(refused.value)


def comes_late(rank: int) -> list[str]:
    """Rank 1 comes when rank 0 has said that it waits."""
    store = dist.distributed_c10d._get_default_store()
    heard: list[str] = []

    class Hears(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())
            store.set("said", "")

    logging.getLogger("eplb_runtime").addHandler(Hears())
    if rank == 1:
        store.wait(["said"])
    wait_for_ranks([0, 1], "attach", 0.5 if rank == 0 else 30, patient=True)
    return heard


def test_a_rank_that_loads_its_model_for_long_is_waited_for() -> None:
    (late,), nothing = run_ranks(2, comes_late)
    assert late.startswith("attach waits for rank 1, which has not come for 0.5 s: it is not as") and not nothing
