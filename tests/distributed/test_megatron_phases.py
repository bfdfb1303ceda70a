"""Weights, gradients and optimizer state that are freed and loaded between phases, as verl does around its rollouts:
2 ranks, EP 2, Megatron's own model, DistributedDataParallel and optimizers, every home moved after each step.

What frees and loads is written anew here, by what verl's functions do to Megatron's buffers and state.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from examples import FOLDER, load_example
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.planner.shuffle import plan_shuffle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS, EXPERTS, LAYERS = 3, 8, 2
CASES: dict[str, dict[str, Any]] = {
    "distributed optimizer": {},
    "distributed optimizer, parameters gathered beside": {"overlap": True},
    "optimizer of float16": {"distributed": False},
}


def prepare() -> None:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)


class Phases:
    """Frees what a job trains, and loads it again.

    Args:
        model: Megatron's DistributedDataParallel.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self._buffers = [*model.buffers, *model.expert_parallel_buffers]
        self._parameters = list(model.parameters())
        self._leaves = [leaf for leaf in optimizer.chained_optimizers if not leaf.is_stub_optimizer]
        self._sizes: dict[int, int] = {}
        self.freed = 0

    def free(self) -> None:
        for buffer in self._buffers:
            if buffer.param_data is not None:
                buffer.param_data.in_host_memory = buffer.param_data.data.clone()
            for data in (buffer.param_data, buffer.grad_data):
                if data is not None and data.untyped_storage().size() > 0:
                    self.freed += 1
                    self._sizes[id(data)] = data.untyped_storage().size()
                    data.untyped_storage().resize_(0)
        if self._buffers[0].param_data is None:  # parameters of their own: `.data` is put elsewhere
            self._elsewhere(self._parameters)
        self._move_state()

    def load(self) -> None:
        # Whatever has taken the old place meanwhile: loaded memory begins at another address.
        self._taken = [torch.empty(size, dtype=torch.uint8) for size in self._sizes.values()]
        for buffer in self._buffers:
            for data in (buffer.param_data, buffer.grad_data):
                if data is not None:
                    data.untyped_storage().resize_(self._sizes[id(data)])
            buffer.grad_data.zero_()
            if buffer.param_data is not None:
                buffer.param_data.copy_(buffer.param_data.in_host_memory)
        if self._buffers[0].param_data is None:
            self._elsewhere(self._parameters)
        self._move_state()

    def _move_state(self) -> None:
        for leaf in self._leaves:
            masters = getattr(leaf, "shard_fp32_from_float16_groups", getattr(leaf, "fp32_from_float16_groups", []))
            self._elsewhere([master for group in masters for master in group])
            for state in leaf.optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in state:
                        state[key] = state[key].clone()

    @staticmethod
    def _elsewhere(tensors: list[Tensor]) -> None:
        for tensor in tensors:
            old = tensor.data
            tensor.data = tensor.data.clone()
            old.fill_(float("nan"))  # who keeps the old memory trains with it


def attached(case: str, move: bool, interval: int = 1) -> tuple[Any, Any, eplb.Balancer]:
    ours = load_example("megatron_gpt")
    model, optimizer = ours.wrapped(ours.model_of(moe_router_topk=3), **CASES[case])
    config = eplb.BalancerConfig(
        interval=interval,
        gate="always",
        policy="incremental" if move else "static",
        migration=eplb.MigrationConfig(lag=0),
    )
    balancer = eplb.attach([model], optimizer, config=config)
    if move:
        balancer._wait_until_compiled()
        balancer._plan_with(plan_shuffle)
    return model, optimizer, balancer


def moved_by(balancer: eplb.Balancer) -> int:
    return sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))


def trained(case: str, move: bool, phases: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> Any:
    model, optimizer, balancer = attached(case, move)
    spoil(balancer)
    between, seen = Phases(model, optimizer), []
    for step in range(STEPS):
        seen += load_example("megatron_gpt").train(model, optimizer, [step])
        if phases:
            between.free()
            between.load()
    if model.ddp_config.overlap_param_gather:
        model.start_param_sync(force_sync=True)
    result = {
        "seen": seen,
        "tensors": tensors_of(model, optimizer, balancer.placement),
        "moved": moved_by(balancer),
        "freed": between.freed,
    }
    balancer.close()
    return result


def tensors_of(model: Any, optimizer: Any, placement: eplb.Placement) -> dict[Any, Tensor]:
    """All that this rank trains, read from Megatron's objects; experts by layer and logical number."""
    import torch.distributed as dist

    found: dict[Any, Tensor] = {}
    layers = [module for module in model.modules() if type(module).__name__ == "MoELayer"]
    for row, module in enumerate(layers):
        for slot, expert in enumerate(module.experts.local_experts, start=dist.get_rank() * EXPERTS // 2):
            number = int(placement.physical_to_logical[row, slot])
            for name, parameter in expert.named_parameters():
                found[(row, number, name, "weight")] = parameter
                for what, value in kept(optimizer, parameter).items():
                    found[(row, number, name, what)] = value
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if ".experts." not in name and torch.is_tensor(tensor):
            found[("dense", name)] = tensor
    return {key: tensor.detach().clone() for key, tensor in found.items()}


def kept(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    for leaf in optimizer.chained_optimizers:
        if leaf.is_stub_optimizer:
            continue
        if hasattr(leaf, "model_param_group_index_map"):
            if parameter in leaf.model_param_group_index_map:
                return dict(leaf._get_main_param_and_optimizer_states(parameter))
        elif any(parameter is one for group in leaf.float16_groups for one in group):
            return {"param": parameter.main_param, **leaf.optimizer.state[parameter.main_param]}
    raise KeyError


def forget_state(balancer: eplb.Balancer) -> None:
    """Weights move, and what their optimizer keeps stays."""
    balancer._runtime.registry._optimizers.clear()


def remember_state(balancer: eplb.Balancer) -> None:
    """What was looked up once is taken for what is there."""
    (optimizer,) = balancer._runtime.registry._optimizers
    own, first = optimizer.state_of, {}

    def state_of(parameter: Tensor) -> Any:
        found = own(parameter)
        if len(found) < 3:
            return found
        return first.setdefault(parameter, {key: value.detach() for key, value in found.items()})

    optimizer.state_of = state_of


def decided_without_memory(guard: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """What a decision says while weights have no memory on some ranks, and whether training goes on."""
    import torch.distributed as dist

    model, optimizer, balancer = attached("distributed optimizer", move=True, interval=2)
    if guard == "off":
        balancer._guard._mode = "off"
    phases = Phases(model, optimizer)
    ours = load_example("megatron_gpt")
    ours.train(model, optimizer, range(1))
    before, epoch, events = moved_by(balancer), balancer.placement.epoch, len(list(balancer.events))
    if dist.get_rank() in ranks:
        phases.free()
    ours_moved = balancer.rebalance()
    if dist.get_rank() in ranks:
        phases.load()
    said = [repr(event) for event in list(balancer.events)[events:]]
    same = balancer.placement.epoch == epoch and moved_by(balancer) == before
    ours.train(model, optimizer, range(1, 4))
    later = moved_by(balancer)
    balancer.close()
    return {"moved": ours_moved, "same": same, "said": said, "later": later - before}


def not_resizable() -> tuple[int, int]:
    """Number of parameters whose storage torch lets nobody resize after attach and a move, and of all."""
    model, optimizer, balancer = attached("optimizer of float16", move=True)
    load_example("megatron_gpt").train(model, optimizer, range(2))
    found = [parameter.untyped_storage().resizable() for parameter in model.parameters()]
    found += list(resizable_state(optimizer))
    balancer.close()
    return found.count(False), len(found)


def resizable_state(optimizer: Any) -> Iterator[bool]:
    for leaf in optimizer.chained_optimizers:
        for state in leaf.optimizer.state.values():
            yield from (value.untyped_storage().resizable() for value in state.values())


def everything(rank: int) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = {
            "static": trained(case, move=False, phases=False),
            "static, freed": trained(case, move=False, phases=True),
            "moving, freed": trained(case, move=True, phases=True),
        }
    first = next(iter(CASES))
    results["state stays"] = trained(first, move=True, phases=True, spoil=forget_state)
    results["state is remembered"] = trained(first, move=True, phases=True, spoil=remember_state)
    results["not resizable"] = not_resizable()
    for guard in ("on", "off"):
        for ranks in ((0, 1), (1,)):
            results[f"{guard} {ranks}"] = decided_without_memory(guard, ranks)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def whole(of_ranks: list[dict[str, Any]]) -> dict[Any, Tensor]:
    """All tensors of the job. Those that several ranks have must be the same on them."""
    found: dict[Any, Tensor] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank["tensors"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
    return found


def differing(some: dict[Any, Tensor], others: dict[Any, Tensor]) -> list[Any]:
    assert some.keys() == others.keys()
    return [key for key in some if not torch.equal(some[key], others[key])]


@pytest.mark.parametrize("case", CASES)
def test_experts_move_between_phases_that_free_all_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static, freed, moving = (
        whole([of_rank[case][which] for of_rank in results]) for which in ("static", "static, freed", "moving, freed")
    )
    for of_rank in results:
        assert of_rank[case]["moving, freed"]["seen"] == of_rank[case]["static"]["seen"]
        assert of_rank[case]["moving, freed"]["freed"] >= 2 * STEPS
    moved = results[0][case]["moving, freed"]["moved"]
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves")
    assert results[0][case]["static"]["moved"] == 0 < moved
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert differing(static, freed) == [] and differing(static, moving) == []


@pytest.mark.parametrize("control", ["state stays", "state is remembered"])
def test_control_state_that_is_left_behind_shows(results: list[dict[str, Any]], control: str) -> None:
    static = whole([of_rank[next(iter(CASES))]["static"] for of_rank in results])
    assert differing(static, whole([of_rank[control] for of_rank in results])) != []


def test_parameters_and_state_stay_resizable(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        fixed, of_all = of_rank["not resizable"]
        assert fixed == 0 < of_all


@pytest.mark.parametrize("guard", ["on", "off"])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_decision_while_weights_have_no_memory_moves_nothing_and_says_so(
    results: list[dict[str, Any]], guard: str, ranks: tuple[int, ...]
) -> None:
    for of_rank in results:
        found = of_rank[f"{guard} {ranks}"]
        assert found["moved"] is False and found["same"]
        line = "weights have no memory now" if guard == "on" else "its memory is freed"
        assert any(line in event for event in found["said"]), found["said"]
        assert "setStorage" not in str(found["said"])
        assert found["later"] > 0, "once they are loaded, experts move"
