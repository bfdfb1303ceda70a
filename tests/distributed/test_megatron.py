"""Megatron-Core's own code - GPT, MoE layers, DistributedDataParallel, optimizers, checkpoints - with moving experts.

On a CPU, by the answers of ``launch/examples/megatron_cpu.py`` to what it asks of CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
import torch._dynamo.utils
from examples import FOLDER, load_example
from flat_settings import config_from_settings
from ranks import run_ranks
from support.seen import said_by
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.events import LoadMeasured
from eplb_runtime.hosts import AttachError
from eplb_runtime.load.series import read_series
from eplb_runtime.tools.formats.loads import read_load

pytestmark = jobs.needs_megatron
STEPS, LENGTH = 3, 16
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LOSSES = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
WAYS: dict[str, dict[str, Any]] = {
    "torch, three experts a token": {"wrap": None, "bf16": False, "moe_router_topk": 3},
    "distributed optimizer, all-gather": {
        "wrap": {"overlap": True},
        "moe_token_dispatcher_type": "allgather",
        **BIASED,
        **LOSSES,
    },
    "optimizer of float16, shared experts": {
        "wrap": {"distributed": False},
        "moe_router_topk": 3,
        "moe_shared_expert_intermediate_size": 64,
    },
    "grouped experts": {"wrap": {}, "grouped": True},
}
COMPILED = "distributed optimizer, all-gather"
"""In a test of its own Megatron compiles functions of its own here, as it does by itself; else they run as they are."""


def example() -> ModuleType:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    ours = load_example("megatron_gpt")
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    return ours


class GroupedLinear(torch.nn.Module):
    """In the place of TransformerEngine's, which needs CUDA: its parameters, and one product for each expert."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__()
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.zeros(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = False
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        pairs = zip(rows.split(counts), self.parameters(), strict=True)
        return torch.cat([torch.nn.functional.linear(mine, weight) for mine, weight in pairs]), None


def grouped_spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = get_gpt_layer_local_spec(num_experts=8, moe_grouped_gemm=False, normalization="LayerNorm")
    linears = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    layer = spec.submodules.mlp
    if isinstance(layer, partial):  # since 0.18 makers of modules are partial functions
        layer.keywords["submodules"].experts = partial(TEGroupedMLP, submodules=linears)
    else:
        layer.submodules.experts = ModuleSpec(module=TEGroupedMLP, submodules=linears)
    return spec


def config(move: bool) -> eplb.BalancerConfig:
    return eplb.BalancerConfig(
        interval=1, gate="always", policy="incremental" if move else "static", migration=eplb.MigrationConfig(lag=0)
    )


def make(
    wrap: dict[str, bool] | None, move: bool, grouped: bool = False, **options: Any
) -> tuple[Any, Any, eplb.Balancer]:
    ours = example()
    model = ours.model_of(spec=grouped_spec() if grouped else None, **options)
    if wrap is not None:
        ddp, optimizer = ours.wrapped(model, **wrap)
        balancer = eplb.attach([ddp], optimizer, config=config(move))
    else:
        ddp, optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        settings = config_from_settings({**vars(config(move)), "dense_gradients": "allreduce"})
        balancer = eplb.attach(model, optimizer, config=settings)
    if move:
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    return ddp, optimizer, balancer


def train(model: Any, optimizer: Any, balancer: eplb.Balancer, steps: range) -> list[Any]:
    """Losses and norms; optimizers of torch may be several."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    if not isinstance(optimizers[0], torch.optim.Optimizer):
        return example().train(model, optimizer, steps)
    seen = []
    for step in steps:
        loss = example().loss_of(model, step)
        loss.backward()
        norm = balancer.clip_grad_norm_(1.0)
        for one in optimizers:
            one.step()
            one.zero_grad()
        seen.append((loss.item(), norm.item()))
    return seen


def state_of(balancer: eplb.Balancer, model: Any) -> dict[Any, Tensor]:
    """Weights, masters and optimizer state of this rank's experts by logical number, and all other weights."""
    of_experts = {
        (layer, kept.name, expert): kept.row(slot).detach().clone()
        for layer in balancer._runtime.registry.layers
        for kept in balancer._runtime.registry.of_home(layer)
        for slot, expert in enumerate(balancer._home_experts(layer))
    }
    others = {
        name: tensor.detach().clone()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if ".experts." not in name and torch.is_tensor(tensor)
    }
    return {**of_experts, **others}


def trained(way: str, move: bool) -> tuple[Any, ...]:
    """As `trained_with`, of a way."""
    return trained_with(*make(move=move, **WAYS[way]))


def compiled(rank: int) -> tuple[dict[str, Any], int]:
    """What both give where moved experts are trained by compiled functions, and how many graphs those have."""
    example()
    results = {f"{COMPILED}, static": trained(COMPILED, move=False)}
    made = make(move=True, **WAYS[COMPILED])
    with torch._dynamo.config.patch(disable=False):
        results[f"{COMPILED}, moving"] = trained_with(*made)
    return results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def trained_with(model: Any, optimizer: Any, balancer: eplb.Balancer) -> tuple[Any, ...]:
    """Losses and norms, state, how many experts moved, and what was counted in each step."""
    counted, advance = [], balancer._runtime.counter.advance

    def close_step() -> None:
        counted.append(balancer._runtime.counter.counts.tolist())
        advance()

    balancer._runtime.counter.advance = close_step
    seen, moved = train(model, optimizer, balancer, range(STEPS)), jobs.moved_by(balancer)
    state = state_of(balancer, model)
    sources = {event.moe_share_source for event in balancer.events.of_type(LoadMeasured)}
    assert "measured" in sources, f"expert work is between Megatron's own dispatch and combine: {sources}"
    balancer.close()
    return seen, state, moved, counted


def everything(rank: int, folder: str) -> dict[str, Any]:
    example()
    results: dict[str, Any] = {}
    for way in WAYS:
        results[f"{way}, static"] = trained(way, move=False)
        results[f"{way}, moving"] = trained(way, move=True)
    results["refused"] = refusals()
    results["recorded"] = recorded(Path(folder) / "recorded")
    results["saved"] = saved_and_loaded(Path(folder))
    return results


def recorded(run: Path) -> tuple[list[Any], list[Any], float]:
    """What is written of the job that the first way trains, without a balancer, and its losses."""
    import torch.distributed as dist

    model = example().model_of(
        **{key: value for key, value in WAYS["torch, three experts a token"].items() if key != "wrap"}
    )
    losses = []
    with eplb.record(model, run, interval=1) as recording:
        for step in range(STEPS):
            model.eval()  # which is no load of a model that is trained, ahead of its first step, too
            with torch.no_grad():
                example().loss_of(model, STEPS)
            model.train()
            losses.append(example().loss_of(model, step).item())
            recording.step()
    assert all(vars(layer.mlp).keys().isdisjoint({"route", "preprocess"}) for layer in model.decoder.layers)
    dist.barrier()
    return losses, read_load(run / "load").tolist(), read_series(run)[2].expert_seconds


def refusals() -> dict[str, str]:
    said = {}
    ours = example()

    def expect(what: str, call: Callable[[], Any], kind: type[Exception]) -> None:
        try:
            call()
            said[what] = ""
        except kind as error:
            said[what] = str(error)

    def attach(**options: Any) -> None:
        wrap = options.pop("wrap", None)
        settings = options.pop("settings", {})
        model = ours.model_of(**options)
        if wrap is None:
            optimizer: Any = torch.optim.AdamW(model.parameters())
        else:
            model, optimizer = ours.wrapped(model, **wrap)
        eplb.attach(model, optimizer, config=config_from_settings(settings))

    expect("copies", lambda: attach(settings={"replica_slots": 1}), AttachError)
    expect("dispatch", lambda: attach(settings={"dispatch": "hierarchical"}), AttachError)
    expect("padded", lambda: attach(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True), AttachError)
    expect("averaged twice", lambda: attach(wrap={}, settings={"dense_gradients": "allreduce"}), AttachError)
    model, optimizer = ours.wrapped(ours.model_of())
    expect("torch's optimizer", lambda: eplb.attach(model, torch.optim.SGD(model.parameters(), lr=1.0)), AttachError)
    expect("recorded", lambda: eplb.record(model, "", optimizer), AttachError)
    expect("inside", lambda: eplb.attach(model.module, optimizer), AttachError)
    balancer = eplb.attach([model], optimizer, config=config(True))
    expect("clip", lambda: balancer.clip_grad_norm_(1.0), RuntimeError)
    expect("two at once", lambda: balancer.at_once(lambda: 1, lambda: 2), RuntimeError)
    expect("logical_state_dict", lambda: eplb.logical_state_dict(model), ValueError)
    ours.loss_of(model, 0).backward()
    expect("rebalance", balancer.rebalance, RuntimeError)
    balancer.close()
    for what, trained in (("wrapped later", True), ("adopted", False)):
        bare = ours.model_of(bf16=False)
        settings = config_from_settings({**vars(config(True)), "dense_gradients": "allreduce" if trained else "host"})
        balancer = eplb.attach(bare, torch.optim.AdamW(bare.parameters()) if trained else None, config=settings)
        model, optimizer = ours.wrapped(bare)
        if trained:
            expect(what, lambda model=model: ours.loss_of(model, 0), RuntimeError)
        else:
            expect(what, lambda balancer=balancer, optimizer=optimizer: balancer.adopt(optimizer), AttachError)
        balancer.close()
    return said


def saved_and_loaded(folder: Path) -> dict[str, Any]:
    """Saved while balanced, in the middle; loaded by a model without us, and by one whose experts stand elsewhere."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    # With the distributed optimizer 0.16.1 loads only what TransformerEngine's or Apex's Adam keeps, also without us.
    way = WAYS["optimizer of float16, shared experts"]

    def sharded(model: Any, optimizer: Any, loading: bool, **metadata: Any) -> dict[str, Any]:
        metadata.setdefault("singleton_local_shards", False)
        of_model = model.module.sharded_state_dict(metadata=metadata)
        of_optimizer = optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=metadata)
        return {"model": of_model, "optimizer": of_optimizer}

    def load(model: Any, optimizer: Any) -> None:
        state = dist_checkpointing.load(sharded(model, optimizer, True), str(folder))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    model, optimizer, balancer = make(move=True, **way)
    train(model, optimizer, balancer, range(2))
    jobs.save(sharded(model, optimizer, False), folder)
    plain, plain_optimizer = model.state_dict(), optimizer.state_dict()
    balancer.close()
    options = {key: value for key, value in way.items() if key != "wrap"}
    model, optimizer = example().wrapped(example().model_of(**options), **way["wrap"])
    example().train(model, optimizer, range(1))  # Megatron loads what has stepped; all of it is overwritten
    load(model, optimizer)
    alone = example().train(model, optimizer, range(2, STEPS))
    said = {"plain, alone": said_by(lambda: model.load_state_dict(plain))}
    model, optimizer, balancer = make(move=True, **way)
    train(model, optimizer, balancer, range(1))
    there = balancer.placement.physical_to_logical.tolist()
    said["plain"] = said_by(lambda: model.load_state_dict(plain))
    said["plain, without metadata"] = said_by(lambda: model.load_state_dict(dict(plain)))
    said["plain, optimizer"] = said_by(lambda: optimizer.load_state_dict(plain_optimizer))
    load(model, optimizer)
    elsewhere = example().train(model, optimizer, range(2, STEPS))
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    balancer.close()
    model, optimizer, balancer = make(move=True, wrap={})
    train(model, optimizer, balancer, range(1))
    sharded(model, optimizer, False, distrib_optim_sharding_type="fully_reshardable")
    balancer.close()  # what is refused stays refused: experts stay where they stand
    for way_of_place in ("dp_reshardable", "dp_zero_gather_scatter"):
        said[way_of_place] = said_by(
            partial(sharded, model, optimizer, False, distrib_optim_sharding_type=way_of_place)
        )
    said["save_parameter_state"] = said_by(lambda: optimizer.save_parameter_state(str(folder / "places")))
    said["load_parameter_state"] = said_by(lambda: optimizer.load_parameter_state(str(folder / "places")))
    dist.barrier()
    return {"alone": alone, "elsewhere": elsewhere, "there": there, "said": said}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, everything, str(tmp_path_factory.mktemp("megatron")))


def whole(results: list[dict[str, Any]], key: str) -> dict[Any, Tensor]:
    return {**results[0][key][1], **results[1][key][1]}


@pytest.mark.parametrize("way", WAYS)
def test_moving_experts_changes_no_bit(results: list[dict[str, Any]], way: str) -> None:
    assert_no_bit_changes(results, way)


def assert_no_bit_changes(results: list[dict[str, Any]], way: str) -> None:
    for of_rank in results:
        static, moving = of_rank[f"{way}, static"], of_rank[f"{way}, moving"]
        assert static[2] == 0 < moving[2]
        assert moving[0] == static[0]
    static = whole(results, f"{way}, static")
    assert any("exp_avg_sq" in str(key) for key in static) and len({key[2] for key in static if len(key) == 3}) == 8
    assert jobs.differing(static, whole(results, f"{way}, moving")) == []


@pytest.mark.long
def test_moving_experts_changes_no_bit_where_megatron_compiles_functions_of_its_own() -> None:
    results, graphs = zip(*run_ranks(2, compiled), strict=True)
    assert min(graphs) > 0
    assert_no_bit_changes(list(results), COMPILED)


def test_choices_are_counted_by_logical_expert(results: list[dict[str, Any]]) -> None:
    for way, settings in WAYS.items():
        counted = results[0][f"{way}, moving"][3]
        assert counted == results[0][f"{way}, static"][3]
        of_a_layer = 2 * LENGTH * settings.get("moe_router_topk", 2)
        assert torch.tensor(counted).sum(dim=-1).tolist() == [[of_a_layer] * 2] * STEPS


def test_a_model_without_a_balancer_is_recorded(results: list[dict[str, Any]]) -> None:
    way = "torch, three experts a token, static"
    for of_rank in results:
        assert of_rank["recorded"][0][0] == of_rank[way][0][0][0]
    load, seconds = results[0]["recorded"][1:]
    assert seconds > 0, "of expert work"
    assert load[0] == sum(torch.tensor(of_rank[way][3][0]) for of_rank in results).tolist(), "nobody has trained yet"
    assert torch.tensor(load).sum(dim=-1).tolist() == [[2 * 2 * LENGTH * 3] * 2] * STEPS


def test_checkpoints_are_in_logical_order(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        static, saved = of_rank["optimizer of float16, shared experts, static"][0], of_rank["saved"]
        # Without us the norm is Megatron's own, of one sum in float32.
        assert saved["alone"][0][0] == static[2][0]
        for alone, balanced in zip(saved["alone"], static[2:], strict=True):
            assert alone == pytest.approx(balanced, rel=1e-3)
        assert saved["elsewhere"] == static[2:]
        assert saved["there"] != [sorted(row) for row in saved["there"]]


def test_state_by_place_is_not_taken_for_other_experts(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        said = dict(of_rank["saved"]["said"])
        assert "eplb_runtime_experts" in said.pop("plain, alone"), "a model without us knows no such key"
        for what in ("plain", "plain, without metadata", "plain, optimizer"):
            assert "here stand" in (line := said.pop(what)) and "sharded_state_dict" in line
        for what, line in said.items():
            assert f"by place ({what})" in line


def test_what_megatron_cannot_follow_is_refused(results: list[dict[str, Any]]) -> None:
    said = results[0]["refused"]
    assert "replica_slots" in said["copies"] and "nothing to balance" in said["padded"]
    assert "its own dispatchers carry tokens" in said["dispatch"]
    assert (
        "averages gradients itself" in said["averaged twice"] and "get_megatron_optimizer" in said["torch's optimizer"]
    )
    assert "attach the DistributedDataParallel" in said["inside"] and "call step()" in said["recorded"]
    assert "optimizer" in said["clip"] and "carries tokens itself" in said["two at once"]
    assert "was made after attach, and would scale gradients of experts once more" in said["wrapped later"]
    assert "is no torch.optim.Optimizer" in said["adopted"] and "call attach after" in said["adopted"]
    assert "its own checkpoints" in said["logical_state_dict"] and "optimizer's step" in said["rebalance"]
