"""Megatron-Core's precision-aware optimizer on the device, with every home moved after each step: its own model,
schedule, DistributedDataParallel and distributed optimizer; 2 ranks that hold half of the experts each, then 4, of
which 2 hold the same.

TransformerEngine's FusedAdam, which it is made of, has a stand-in here (`fused_adam_double`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fused_adam_double
import pytest
import test_megatron_parallelisms as parallelisms
import torch
from megatron_jobs import EXPERTS, attached, differing, forget_state, held, save, whole
from ranks import run_ranks
from test_megatron_parallelisms import LAYERS, STEPS, SmallJob
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
HALF = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
FLOAT16, SMALL = (
    {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    {"main_params_dtype": torch.float16},
)
CASES: dict[str, dict[str, Any]] = {
    "remainders of masters, moments in bfloat16": {"stepped": HALF, "moe_router_topk": 3},
    "masters in float16, moments in bfloat16": {
        "stepped": HALF | SMALL,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
    },
    "masters in float32, moments in float16": {"stepped": {**FLOAT16, "store_param_remainders": False}},
    "moments in float32": {"stepped": {}},
}
REMAINDERS, SCALED = "remainders of masters, moments in bfloat16", "masters in float32, moments in float16"
DIVIDED = "ranks that hold the same experts"


class AwareJob(SmallJob):
    """A job with TransformerEngine's optimizer, whose state is read from its own dictionaries."""

    def __init__(self, *, stepped: dict[str, Any], **options: Any) -> None:
        super().__init__(stepped={"use_precision_aware_optimizer": True, **stepped}, **options)

    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Tensor]:
        """All that this rank trains, experts by layer and logical number; parts of them by their first element."""
        from megatron.core import parallel_state

        for model in self.models:
            if model.ddp_config.overlap_param_gather:
                model.start_param_sync(force_sync=True)
        leaves = [leaf for leaf in self.optimizer.chained_optimizers if not leaf.is_stub_optimizer]
        leaf_of = {id(parameter): leaf for leaf in leaves for parameter in held(leaf)}
        first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // 2
        found: dict[Any, Tensor] = {}
        for row, module in enumerate(part for part in self.models[0].modules() if type(part).__name__ == "MoELayer"):
            for slot, expert in enumerate(module.experts.local_experts, start=first):
                number = slot if placement is None else int(placement.physical_to_logical[row, slot])
                for name, parameter in expert.named_parameters():
                    found[(row, number, name, "weight")] = parameter
                    leaf = leaf_of.get(id(parameter))
                    if leaf is None:
                        continue
                    group, place = leaf.model_param_group_index_map[parameter]
                    given = leaf.optimizer.param_groups[group]["params"][place]
                    begin = leaf._get_model_param_range_map(parameter)["param"].start
                    for key, value in leaf.optimizer.state[given].items():
                        found[(row, number, name, key, begin)] = value
                        if key in leaf.optimizer._scales.get(given, {}):
                            found[(row, number, name, f"scale of {key}")] = leaf.optimizer._scales[given][key]
        found |= self.dense()
        return {key: tensor.detach().clone() for key, tensor in found.items() if torch.is_tensor(tensor)}


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    job = AwareJob(**CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    result = {
        "seen": job.train(range(STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
    }
    balancer.close()
    return result


def leave_scales(_: eplb.Balancer) -> None:
    """Only numbers move, and not what they are to be multiplied by."""
    from eplb_runtime.hosts.megatron import optimizers

    own = optimizers.raw_state
    optimizers.raw_state = lambda *args: {key: value for key, value in own(*args).items() if "scale" not in key}


def leave_out_of_norm(balancer: eplb.Balancer) -> None:
    (optimizer,) = balancer._runtime.registry._optimizers
    optimizer._gradient_of = lambda parameter: None


def refused() -> str:
    job = AwareJob(**CASES[SCALED])
    for leaf in job.optimizer.chained_optimizers:
        vars(leaf.optimizer).pop("_scales", None)
    with pytest.raises(AttachError) as error:
        attached(job, move=False)
    return str(error.value)


def saved_and_read_back(folder: Path) -> dict[str, Any]:
    """Saved by Megatron after moves, and read by Megatron alone into a job that has trained something else."""
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.HAVE_APEX_OR_TE = True  # it asks whether each state has a number of steps

    def state_of(job: AwareJob, loading: bool) -> dict[str, Any]:
        metadata = {"singleton_local_shards": False, "distrib_optim_sharding_type": "fully_reshardable"}
        of_model = job.models[0].module.sharded_state_dict(metadata=metadata)
        state = job.optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=metadata)
        return {"model": of_model, "optimizer": state}

    job = AwareJob(**CASES[REMAINDERS])
    balancer = attached(job, move=True)
    job.train(range(STEPS))
    save(state_of(job, loading=False), folder)
    saved, moved = job.tensors(balancer.placement), balancer.placement.physical_to_logical.tolist()
    balancer.close()
    job = AwareJob(**CASES[REMAINDERS])  # float16 is scaled anew, and rounded, when it is read
    job.train(range(STEPS, STEPS + 1))
    before = job.tensors(None)
    state = dist_checkpointing.load(state_of(job, loading=True), str(folder))
    job.models[0].module.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    read = job.tensors(None)
    return {"saved": {"tensors": saved}, "before": {"tensors": before}, "read": {"tensors": read}, "placement": moved}


def on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    parallelisms.prepare()
    fused_adam_double.install()
    results: dict[str, Any] = {
        case: {"static": trained(case, move=False), "moving": trained(case, move=True)} for case in CASES
    }
    results["state stays"] = trained(REMAINDERS, move=True, spoil=forget_state)
    results["left out of the norm"] = trained(REMAINDERS, move=False, spoil=leave_out_of_norm)
    results["refused"] = refused()
    results["checkpoint"] = saved_and_read_back(Path(folder))
    results["scales stay"] = trained(SCALED, move=True, spoil=leave_scales)
    return results


def on_four_ranks(rank: int) -> dict[str, Any]:
    parallelisms.prepare()
    fused_adam_double.install()
    return {"static": trained(REMAINDERS, move=False), "moving": trained(REMAINDERS, move=True)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, str(tmp_path_factory.mktemp("precision aware")))


def joined(tensors: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """State of whole experts, of which ranks that hold the same keep other parts wherever the expert is."""
    parts: dict[Any, list[Tensor]] = {}
    for key in sorted(key for key in tensors if len(key) == 5):
        parts.setdefault(key[:4], []).append(tensors[key])
    rest = {key: tensor for key, tensor in tensors.items() if len(key) != 5}
    return {**rest, **{key: torch.cat(of_expert) for key, of_expert in parts.items()}}


def assert_equal(static: list[dict[str, Any]], moving: list[dict[str, Any]]) -> None:
    assert [one["seen"] for one in static] == [one["seen"] for one in moving]
    assert static[0]["moved"] == 0 < moving[0]["moved"]
    all_static, all_moving = joined(whole(static)), joined(whole(moving))
    experts = [key for key in all_static if key[0] != "dense"]
    print(f"{len(experts)} tensors of experts, {moving[0]['moved']} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert {key[3] for key in experts} >= {"weight", "exp_avg", "exp_avg_sq", "master_param"}
    assert differing(all_static, all_moving) == []


@pytest.mark.parametrize("case", CASES)
def test_state_in_dtypes_of_its_own_moves_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_equal(*([of_rank[case][which] for of_rank in results] for which in ("static", "moving")))


def test_parts_of_it_on_ranks_that_hold_the_same_experts_move_and_no_bit_changes() -> None:
    results = run_ranks(4, on_four_ranks)
    assert_equal(*([of_rank[which] for of_rank in results] for which in ("static", "moving")))


@pytest.mark.parametrize(("control", "case"), [("state stays", REMAINDERS), ("scales stay", SCALED)])
def test_control_what_stays_behind_shows(results: list[dict[str, Any]], control: str, case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    assert differing(static, whole([of_rank[control] for of_rank in results])) != []


def test_control_experts_left_out_of_the_norm_show(results: list[dict[str, Any]]) -> None:
    assert results[0]["left out of the norm"]["seen"] != results[0][REMAINDERS]["static"]["seen"]


def test_an_optimizer_with_another_layout_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "in another way than TransformerEngine's FusedAdam" in of_rank["refused"]


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    saved, before, read = (
        whole([of_rank["checkpoint"][when] for of_rank in results]) for when in ("saved", "before", "read")
    )
    assert all(row != sorted(row) for row in results[0]["checkpoint"]["placement"])
    assert differing(before, saved) != []
    assert differing(read, saved) == []
