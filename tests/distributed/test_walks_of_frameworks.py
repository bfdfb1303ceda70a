"""Frameworks that walk the modules of each rank and name its expert ``i`` ``ep_rank * E/R + i``, made right by
`hosts.walks`: 2 expert-parallel ranks of a Megatron model whose experts are a tensor each (``linear_fc1.weight3``), all
homes moved, twice.

Walkers in this file stand in for slime, verl (mbridge) and Megatron-Bridge, which are no requirements of these tests.
Those that are installed are walked as well, by their own code; what they import besides (Ray, engines, CUDA) is
answered by empty modules.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from examples import load_example
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import walks
from eplb_runtime.moe.experts.matching import MARK

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
EXPERTS, RANKS = 8, 2
STATE = dict[str, Tensor]
ABSENT = {
    *("apex", "codetiming", "datasets", "einops", "httpx", "hydra", "modelopt", "omegaconf", "orjson", "ray", "rich"),
    *("sglang", "tensorboard", "tensordict", "torch_memory_saver", "torchdata", "transformer_engine", "wandb"),
}
"""What frameworks import besides, and a walk does not use."""


class Answered(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for a package that is not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        absent = name.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__version__, module.__all__ = [], spec, "0.0.1", []
        return module

    def exec_module(self, module: Any) -> None:
        pass


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def model_of_two_ranks() -> tuple[Any, Any, eplb.Balancer]:
    """In bfloat16, by Megatron's distributed optimizer, after a step; experts are where they were at launch."""
    import test_megatron

    ours = test_megatron.example()
    model = ours.model_of(spec=test_megatron.grouped_spec())
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            for attribute, value in {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}.items():
                setattr(parameter, attribute, value)  # as TransformerEngine's linears have them
    model, optimizer = ours.wrapped(model)
    balancer = eplb.attach([model], optimizer, config=eplb.BalancerConfig(interval=None, gate="always"))
    ours.train(model, optimizer, range(1))
    return model, optimizer, balancer


def go_to(balancer: eplb.Balancer, by: int) -> None:
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
    """Stands in for slime: a generator of this rank's parameters, named over the whole model; who has which name is
    asked once."""

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
        load_example("verl_weights").follow_verl(balancer, self.engine)

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
        load_example("verl_weights").follow_verl(balancer, self.engine)

    def export(self) -> STATE:
        self.tasks = self.tasks or self.get_conversion_tasks(self.model)  # verl keeps them
        return copied(self.engine.bridge.export_hf_weights(self.model, conversion_tasks=self.tasks))


class Slime:
    """slime's own walk, its gathering over EP ranks for distributed engines, and its buckets for engines beside."""

    needs = "slime"

    def __init__(self, model: Any) -> None:
        update = "slime.backends.megatron_utils.update_weight"
        self.common, self.direct, self.distributed = (
            importlib.import_module(f"{update}.{name}")
            for name in ("common", "hf_weight_iterator_direct", "update_weight_from_distributed")
        )
        self.model = model
        self.arguments = SimpleNamespace(num_experts=EXPERTS, update_weight_buffer_size=1 << 16, vocab_size=64)
        for module in (self.direct, self.distributed):
            module.convert_to_hf = lambda arguments, model, name, tensor, *_, **__: [(name, tensor)]
            module.accelerator.current_device = lambda: torch.device("cpu")
            module.accelerator.synchronize = lambda: None
            module.get_gloo_group = lambda: dist.group.WORLD
        self.direct.monkey_patch_torch_reductions = lambda: None
        base = self.direct.HfWeightIteratorDirect
        self.buckets = base(self.arguments, [model], model_name="", quantization_config=None)

    def follow(self, balancer: eplb.Balancer) -> None:
        for module in (self.common, self.direct, self.distributed):
            module.named_params_and_buffers = walks.walk_in_slime(balancer, module.named_params_and_buffers)

    def export(self) -> STATE:
        with torch.no_grad():
            local = dict(self.common.named_params_and_buffers(self.arguments, [self.model]))
            found = copied(pair for chunk in self.buckets.get_hf_weight_chunks(local) for pair in chunk)
            updater = object.__new__(self.distributed.UpdateWeightFromDistributed)
            updater.args, updater.model, updater.model_name = self.arguments, [self.model], ""
            updater.quantization_config, updater._is_pp_src_rank = None, True
            gathered = copied(pair for chunk in updater._iter_expert_chunks() for pair in chunk)
        assert gathered and all(found[name].equal(tensor) for name, tensor in gathered.items()), "both of its ways"
        return found


class MBridge:
    """mbridge's own export, as verl's ``vanilla_mbridge`` calls it."""

    needs = "mbridge"

    def __init__(self, model: Any) -> None:
        from mbridge.models.qwen3moe import Qwen3MoEBridge

        class Bridge(Qwen3MoEBridge):  # type: ignore[misc]
            def _weight_to_hf_format(self, name: str, tensor: Any) -> Any:
                own = super()._weight_to_hf_format
                return own(name, tensor) if ".experts." in name else ([name], [tensor])

        self.models = [model]
        self.bridge = object.__new__(Bridge)
        self.bridge.config, self.bridge.hf_config = model.config, SimpleNamespace(num_experts=EXPERTS)
        parallel = importlib.import_module("mbridge.core.parallel_states").ParallelStates
        self.bridge.mpu = parallel.get_parallel_state()
        self.bridge._weight_merge_across_tp = lambda name, tensors, tensor: tensors[0]
        self.bridge.make_vocab_size_divisible_by = None

    def follow(self, balancer: eplb.Balancer) -> None:
        load_example("verl_weights").follow_verl(balancer, SimpleNamespace(bridge=self.bridge, vanilla_bridge=True))

    def export(self) -> STATE:
        return copied(self.bridge.export_weights(self.models))


class Verl:
    """verl's ``per_tensor_generator``, which walks the actor's chunks without a bridge."""

    needs = "verl"

    def __init__(self, model: Any) -> None:
        self.walker = importlib.import_module("verl.utils.megatron_utils")
        self.models: Any = [model]
        self.balancer: Any = None

    def follow(self, balancer: eplb.Balancer) -> None:
        self.balancer = balancer

    def export(self) -> STATE:
        models = walks.modules_in_logical_order(self.balancer, self.models) if self.balancer else self.models
        converter = SimpleNamespace(
            mcore_config=SimpleNamespace(num_moe_experts=EXPERTS),
            hf_config=None,
            convert_param=lambda name, tensors: ([f"{name}/{part}" for part in range(len(tensors))], tensors),
        )
        names = {"qkv_layer_name": "none", "gate_proj_layer_name": "linear_fc1."}
        settings = SimpleNamespace(tie_word_embeddings=False)
        config = self.models[0].config
        found = copied(self.walker.per_tensor_generator(models, settings, converter, config, names))
        return {name: tensor for name, tensor in found.items() if self.balancer or MARK not in name}


class Bridge:
    """Megatron-Bridge's own tasks, mappings and stream; names as Qwen3-MoE's."""

    needs = "megatron.bridge"

    def __init__(self, model: Any) -> None:
        import megatron

        for name in ("", ".models", ".models.conversion"):  # without importing a hundred models
            module = ModuleType(f"megatron.bridge{name}")
            folders = (Path(root) / "bridge" / name[1:].replace(".", "/") for root in megatron.__path__)
            module.__path__ = [str(folder) for folder in folders if folder.is_dir()]
            sys.modules[f"megatron.bridge{name}"] = module
        conversion = "megatron.bridge.models.conversion"
        mappings = importlib.import_module(f"{conversion}.param_mapping")
        registry = importlib.import_module(f"{conversion}.mapping_registry").MegatronMappingRegistry
        base = importlib.import_module(f"{conversion}.model_bridge").MegatronModelBridge
        experts, theirs = "decoder.layers.*.mlp.experts.linear_fc", "model.layers.*.mlp.experts.*"

        class Own(base):  # type: ignore[misc, valid-type]
            def provider_bridge(self, *_: Any) -> None:
                pass

            def mapping_registry(self) -> Any:
                return registry(
                    mappings.GatedMLPMapping(
                        megatron_param=f"{experts}1.weight*",
                        gate=f"{theirs}.gate_proj.weight",
                        up=f"{theirs}.up_proj.weight",
                    ),
                    mappings.AutoMapping(megatron_param=f"{experts}2.weight*", hf_param=f"{theirs}.down_proj.weight"),
                    mappings.ReplicatedMapping("decoder.layers.*.mlp.router.weight", "model.layers.*.mlp.gate.weight"),
                )

        mappings.AutoMapping.register_module_type("GroupedLinear", "column")
        self.own, self.model, self.export_weight_dtype = Own(), model, "bf16"
        parts = ("gate_proj", "up_proj", "down_proj")
        keys = [
            f"model.layers.{layer}.mlp.{own}.weight"
            for layer in range(model.config.num_layers)
            for own in ("gate", *(f"experts.{expert}.{part}" for expert in range(EXPERTS) for part in parts))
        ]
        self.theirs = SimpleNamespace(state=SimpleNamespace(source=SimpleNamespace(get_all_keys=lambda: keys)))
        self.engine = SimpleNamespace(bridge=self, vanilla_bridge=False)
        self.tasks = self.get_conversion_tasks([model.module])

    def get_conversion_tasks(self, models: Any) -> Any:
        return [task for task in self.own.build_conversion_tasks(self.theirs, models) if task is not None]

    def export_hf_weights(self, model: Any, *, conversion_tasks: Any) -> Any:
        options = {"conversion_tasks": conversion_tasks, "show_progress": False, "merge_adapter_weights": False}
        theirs = SimpleNamespace(config=SimpleNamespace())
        return self.own.stream_weights_megatron_to_hf([model], theirs, **options)

    def follow(self, balancer: eplb.Balancer) -> None:
        load_example("verl_weights").follow_verl(balancer, self.engine)

    def export(self) -> STATE:
        return copied(self.engine.bridge.export_hf_weights(self.model.module, conversion_tasks=self.tasks))


WALKERS: dict[str, Any] = {walker.__name__: walker for walker in (ByNames, ByGathering, ByTasks)}
FRAMEWORKS: dict[str, Any] = {walker.__name__: walker for walker in (Slime, MBridge, Verl, Bridge)}
INSTALLED = [name for name, walker in FRAMEWORKS.items() if is_installed(walker.needs)]


def line_of(work: Callable[[], Any]) -> str:
    try:
        return str(work())
    except RuntimeError as error:
        return str(error)


def restored(walker: ByNames) -> None:
    """Write back what was walked, as a backup of weights is restored."""
    with torch.no_grad():
        for _, tensor in walker.named(None, [walker.model]):
            tensor.copy_(tensor.clone())


def loaded(walker: ByNames, by: str) -> None:
    """Write other weights into what is walked, so that no version shows it."""
    for name, tensor in walker.named(None, [walker.model]):
        if ".experts." in name and by == "copy":
            tensor.data.copy_(tensor.data + 1)
        elif ".experts." in name:
            tensor.data = tensor.data + 1


def stale(balancer: eplb.Balancer, model: Any) -> None:
    """Experts move while a walk is under way."""
    (walked,) = walks.modules_in_logical_order(balancer, [model])
    go_to(balancer, 5)
    list(walked.named_parameters())


def stacked(balancer: eplb.Balancer, model: Any, rank: int) -> None:
    """Rank 1 has its experts in one tensor."""
    registry = balancer._runtime.registry
    own = registry.by_expert
    if rank == 1:
        registry.by_expert = lambda layer: [torch.zeros(EXPERTS // RANKS, 2)]  # type: ignore[method-assign]
    try:
        walks.modules_in_logical_order(balancer, [model])
    finally:
        registry.by_expert = own  # type: ignore[method-assign]


def everything(rank: int) -> dict[str, Any]:
    importlib.import_module("transformers")
    model, _, balancer = model_of_two_ranks()
    sys.meta_path.append(Answered())  # Megatron and Transformers have looked for what is there before
    walkers = {name: walker(model) for name, walker in {**WALKERS, **{n: FRAMEWORKS[n] for n in INSTALLED}}.items()}
    found: dict[str, Any] = {name: {"at launch": walker.export()} for name, walker in walkers.items()}
    go_to(balancer, 3)
    for name, walker in walkers.items():
        found[name]["without"] = walker.export()
        walker.follow(balancer)
        found[name]["with"] = walker.export()
    go_to(balancer, 2)
    for name, walker in walkers.items():
        found[name]["moved on"] = walker.export()
    names, tasks, gathering = walkers["ByNames"], walkers["ByTasks"], walkers["ByGathering"]
    walked = walks.modules_in_logical_order(balancer, [model])[0]
    copy = Task("decoder.mlp.experts.weight1", torch.ones(2))
    found["said"] = {
        "verified": line_of(lambda: balancer.verify_export(copied(in_all(names)))),
        "written to": [
            line_of(lambda: restored(names)),
            line_of(lambda: loaded(names, "copy")),
            line_of(lambda: loaded(names, "replace")),
        ],
        "saved": line_of(tasks.save_hf_weights),
        "shards": line_of(gathering.engine.get_per_tensor_param_shard),
        "a copy": line_of(lambda: list(walks.tasks_in_logical_order(balancer, [copy]))),
        "stacked on one rank": line_of(lambda: stacked(balancer, model, rank)),
        "the rest is the module's own": walked.config is model.module.config,
        "a state dict": {(MARK in name, of.is_meta) for name, of in walked.state_dict().items() if ".experts." in name},
    }
    with balancer.logical_order():
        found["said"]["saved in logical order"] = tasks.save_hf_weights()
        restored(names)
    found["said"]["stale"] = line_of(lambda: stale(balancer, model))
    found["rank"] = rank
    balancer.close()
    return found


def in_all(names: ByNames) -> Iterator[tuple[str, Tensor]]:
    return ((name.replace("module.", ""), tensor) for name, tensor in names.named(None, [names.model]))


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything)


def differing(some: STATE, others: STATE) -> list[str]:
    assert some.keys() == others.keys()
    return [name for name in some if some[name].dtype != others[name].dtype or not some[name].equal(others[name])]


def experts_of(exported: STATE) -> list[str]:
    return [name for name in exported if ".experts." in name]


@pytest.mark.parametrize("name", [*WALKERS, *FRAMEWORKS])
def test_each_expert_arrives_under_its_logical_id(name: str, results: list[dict[str, Any]]) -> None:
    if name in FRAMEWORKS and name not in INSTALLED:
        pytest.skip(f"{FRAMEWORKS[name].needs} is not installed; its stand-in is walked")
    for found in results:
        walked = found[name]
        experts = experts_of(walked["at launch"])
        assert len(experts) >= 2 * 2 * EXPERTS, "two layers of two tensors"
        assert set(differing(walked["without"], walked["at launch"])) == set(experts), "control: without the adapter"
        assert differing(walked["with"], walked["at launch"]) == []
        assert differing(walked["moved on"], walked["at launch"]) == []


def test_verify_export_finds_such_a_walk_right(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert "among them those of all 16 experts" in found["said"]["verified"]


def test_what_would_name_or_lose_a_wrong_expert_raises(results: list[dict[str, Any]]) -> None:
    for found in results:
        said = found["said"]
        assert all("was written to, and it is a copy" in line for line in said["written to"]), said["written to"]
        assert "save_hf_weights() names experts by the rank they were on" in said["saved"]
        assert said["saved in logical order"] == "saved"
        assert "get_per_tensor_param_shard() names experts" in said["shards"]
        assert "is no parameter of the attached model" in said["a copy"]
        assert "have moved since this export began" in said["stale"]
        assert said["the rest is the module's own"]
        assert "(): rank 1: experts of MoE layer 0 are stacked or sliced" in said["stacked on one rank"]
        assert said["a state dict"] == {(False, True)}, "no mark of ours, and nothing that could be exported"
