"""Frameworks that walk the modules of each rank and name its expert ``i`` ``ep_rank * E/R + i``, made right by an
example: 2 expert-parallel ranks of a Megatron model whose experts are a tensor each (``linear_fc1.weight3``), all
homes moved, twice.

Walkers in this file stand in for slime, verl (mbridge) and Megatron-Bridge, which are no requirements of these tests.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import megatron_standins as standins
from support.examples import load_example
from support.megatron_jobs import MegatronLoop, needs_megatron
from support.ranks import run_ranks
from support.seen import differing
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.moe.experts.registry import MARK

pytestmark = [needs_megatron, pytest.mark.long]
EXPERTS, RANKS = 8, 2
STATE = dict[str, Tensor]
walks = load_example("rl_weights")


def model_of_two_ranks() -> tuple[Any, eplb.Balancer]:
    """In bfloat16, by Megatron's distributed optimizer, after a step; experts are where they were at launch."""
    standins.cpu()
    standins.grouped()
    job = MegatronLoop()
    (model,) = job.models
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            for attribute, value in {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}.items():
                setattr(parameter, attribute, value)  # as TransformerEngine's linears have them
    balancer = eplb.attach([model], job.optimizer, config=eplb.BalancerConfig(interval=None, gate="always"))
    job.train(range(1))
    return model, balancer


def migrate_at(balancer: eplb.Balancer, by: int) -> None:
    layers = balancer.placement.num_layers
    order = np.stack([np.roll(np.arange(EXPERTS), by + layer) for layer in range(layers)])
    placement = eplb.Placement(order, EXPERTS, RANKS, np.argsort(order, axis=1))
    balancer.load_state_dict({"step": 1, "placement": placement.to_json()})


def of_all_ranks(mine: STATE) -> STATE:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: tensor for of_rank in everyone for name, tensor in of_rank.items()}


def copied(pairs: Iterable[tuple[str, Tensor]]) -> STATE:
    return {name: tensor.detach().clone() for name, tensor in pairs}


# -- walkers, each with the seam that it has -----------------------------------------------------------------------


class ByNames:
    """Stands in for slime: a generator of this rank's parameters, named over the whole model, once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.named = self._named
        self.owners: dict[str, int] = {}

    def _named(self, arguments: Any, models: Any) -> Iterator[tuple[str, Tensor]]:
        first = dist.get_rank() * EXPERTS // RANKS
        for model in models:
            for name, parameter in model.named_parameters():
                if (match := re.fullmatch(r"(.*\.experts\..*weight)(\d+)", name)) is not None:
                    name = f"{match.group(1)}{first + int(match.group(2))}"
                yield name, parameter

    def follow(self, balancer: eplb.Balancer) -> None:
        self.named = walks.walk_in_slime(balancer, self._named)

    def export(self) -> STATE:
        mine = copied(self.named(None, [self.model]))
        if not self.owners:
            everyone: list[Any] = [None] * RANKS
            dist.all_gather_object(everyone, list(mine))
            self.owners = {name: rank for rank in range(RANKS) for name in everyone[rank]}
        return of_all_ranks({name: mine[name] for name, rank in self.owners.items() if rank == dist.get_rank()})


class ByGathering:
    """Stands in for mbridge, and so for verl's vanilla bridge: parameters of chunks, gathered over EP ranks."""

    def __init__(self, model: Any) -> None:
        self.models = [model]
        self.engine = SimpleNamespace(bridge=SimpleNamespace(export_weights=self._export), vanilla_bridge=True)
        self.engine.get_per_tensor_param_shard = lambda: "shards"

    def _export(self, models: Any) -> Iterator[tuple[str, Tensor]]:
        models = [model.module.module if hasattr(model, "ddp_config") else model for model in models]
        names = [name for model in models for name, _ in model.named_parameters()]
        walked = (tensor for model in models for _, tensor in model.named_parameters())
        for name, tensor in zip(names, walked, strict=True):
            if ".mlp.experts.linear_fc" not in name:
                yield name, tensor
                continue
            assert tensor.tensor_model_parallel, "notes of the parameter are there"
            gathered = [torch.empty_like(tensor) for _ in range(RANKS)]
            dist.all_gather(gathered, tensor.data)
            head, _, index = name.rpartition(".weight")
            for rank, one in enumerate(gathered):
                yield f"{head}.weight{rank * EXPERTS // RANKS + int(index)}", one

    def follow(self, balancer: eplb.Balancer) -> None:
        load_example("rl_weights").follow_verl(balancer, self.engine)

    def export(self) -> STATE:
        return copied(self.engine.bridge.export_weights(self.models))


@dataclass(frozen=True)
class Task:
    """As Megatron-Bridge's `WeightConversionTask`, by what an export reads."""

    global_param_name: str
    param_weight: Tensor | None


class ByTasks:
    """Stands in for Megatron-Bridge, and for verl with it: tasks that are made once, and gathered over EP ranks."""

    export_weight_dtype = "bf16"

    def __init__(self, model: Any) -> None:
        self.model = model
        self.engine = SimpleNamespace(bridge=self, vanilla_bridge=False)
        self.tasks: Any = None

    def get_conversion_tasks(self, model: Any) -> list[Task]:
        first = dist.get_rank() * EXPERTS // RANKS
        found = [Task("of another stage", None)]
        for name, parameter in model.named_parameters():
            head, dot, index = name.rpartition(".weight")
            found.append(Task(f"{head}{dot}{first + int(index)}" if ".experts." in name else name, parameter))
        return found

    def export_hf_weights(self, model: Any, conversion_tasks: Any = None) -> Iterator[tuple[str, Tensor]]:
        for number in range(len(conversion_tasks)):  # the progress bar asks for it
            assert number >= 0
        for task in conversion_tasks:
            if task.param_weight is None:
                continue
            if ".experts." not in task.global_param_name:
                yield task.global_param_name, task.param_weight
                continue
            gathered = [torch.empty_like(task.param_weight) for _ in range(RANKS)]
            dist.all_gather(gathered, task.param_weight.data)
            head, _, number = task.global_param_name.rpartition(".weight")
            each = EXPERTS // RANKS
            for rank, one in enumerate(gathered):
                yield f"{head}.weight{rank * each + int(number) % each}", one

    def save_hf_weights(self) -> str:
        return "saved"

    def follow(self, balancer: eplb.Balancer) -> None:
        load_example("rl_weights").follow_verl(balancer, self.engine)

    def export(self) -> STATE:
        self.tasks = self.tasks or self.get_conversion_tasks(self.model)  # verl keeps them
        return copied(self.engine.bridge.export_hf_weights(self.model, conversion_tasks=self.tasks))


WALKERS: dict[str, Any] = {walker.__name__: walker for walker in (ByNames, ByGathering, ByTasks)}


def line_of(work: Callable[[], Any]) -> str:
    try:
        return str(work())
    except RuntimeError as error:
        return str(error)


def write(walker: ByNames, way: str) -> None:
    """Write back what was walked, as a backup of weights is restored; or other weights, so that no version shows it."""
    with torch.no_grad():
        for name, tensor in walker.named(None, [walker.model]):
            if way == "restore":
                tensor.copy_(tensor.clone())
            elif ".experts." in name and way == "copy":
                tensor.data.copy_(tensor.data + 1)
            elif ".experts." in name:
                tensor.data = tensor.data + 1


def stale(balancer: eplb.Balancer, model: Any) -> None:
    """Experts move while a walk is under way."""
    (walked,) = walks.modules_in_logical_order(balancer, [model])
    migrate_at(balancer, 5)
    list(walked.named_parameters())


def stacked(balancer: eplb.Balancer, model: Any, rank: int) -> None:
    """Rank 1 has its experts in one tensor."""
    registry = balancer.runtime.registry
    own = registry.by_expert
    if rank == 1:
        registry.by_expert = lambda layer: [torch.zeros(EXPERTS // RANKS, 2)]  # type: ignore[method-assign]
    try:
        walks.modules_in_logical_order(balancer, [model])
    finally:
        registry.by_expert = own  # type: ignore[method-assign]


def everything(rank: int) -> dict[str, Any]:
    model, balancer = model_of_two_ranks()
    walkers = {name: walker(model) for name, walker in WALKERS.items()}
    found: dict[str, Any] = {name: {"at launch": walker.export()} for name, walker in walkers.items()}
    migrate_at(balancer, 3)
    for name, walker in walkers.items():
        found[name]["without"] = walker.export()
        walker.follow(balancer)
        found[name]["with"] = walker.export()
    migrate_at(balancer, 2)
    for name, walker in walkers.items():
        found[name]["moved on"] = walker.export()
    names, tasks, gathering = walkers["ByNames"], walkers["ByTasks"], walkers["ByGathering"]
    walked = walks.modules_in_logical_order(balancer, [model])[0]
    copy = Task("decoder.mlp.experts.weight1", torch.ones(2))
    found["streamed"] = differing(
        copied(balancer.named_logical_tensors(bucket_bytes=8_192)), of_all_ranks(copied(in_all(names)))
    )
    kept = {(MARK in name, of.is_meta) for name, of in walked.state_dict().items() if ".experts." in name}
    found["walked"] = walked.config is model.module.config, kept
    lines: dict[str, Callable[[], Any]] = {
        "all experts among them": lambda: balancer.verify_export(copied(in_all(names))),
        "save_hf_weights() names experts by the rank they were on": tasks.save_hf_weights,
        "get_per_tensor_param_shard() names experts": gathering.engine.get_per_tensor_param_shard,
        "is no parameter of the attached model": lambda: list(walks.tasks_in_logical_order(balancer, [copy])),
        "(): rank 1: experts of MoE layer 0 are stacked or sliced": lambda: stacked(balancer, model, rank),
    }
    said = [(line, line_of(work)) for line, work in lines.items()]
    written = [line_of(partial(write, names, way)) for way in ("restore", "copy", "replace")]
    said += [("was written to, and it is a copy", line) for line in written]
    with balancer.logical_order():
        said.append(("saved", tasks.save_hf_weights()))
        write(names, "restore")
    found["said"] = [*said, ("have moved since this export began", line_of(lambda: stale(balancer, model)))]
    balancer.close()
    return found


def in_all(names: ByNames) -> Iterator[tuple[str, Tensor]]:
    return ((name.replace("module.", ""), tensor) for name, tensor in names.named(None, [names.model]))


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything)


@pytest.mark.parametrize("name", WALKERS)
def test_each_expert_arrives_under_its_logical_id(name: str, results: list[dict[str, Any]]) -> None:
    for found in results:
        walked = found[name]
        experts = [name for name in walked["at launch"] if ".experts." in name]
        assert len(experts) >= 2 * 2 * EXPERTS, "two layers of two tensors"
        assert set(differing(walked["without"], walked["at launch"])) == set(experts), "control: without the adapter"
        assert differing(walked["with"], walked["at launch"]) == []
        assert differing(walked["moved on"], walked["at launch"]) == []


def test_a_walk_is_in_logical_order_and_what_would_name_or_lose_a_wrong_expert_raises(
    results: list[dict[str, Any]],
) -> None:
    for found in results:
        assert found["streamed"] == [], "all experts in logical order, on every rank"
        assert found["walked"] == (True, {(False, True)}), "no mark of ours, and nothing that could be exported"
        assert [(line, said) for line, said in found["said"] if line not in said] == []
