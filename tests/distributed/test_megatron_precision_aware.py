"""Megatron-Core's precision-aware optimizer on the device, with every home moved after each step: its own model,
schedule, DistributedDataParallel and distributed optimizer; 2 ranks that hold half of the experts each, then 4, of
which 2 hold the same.

TransformerEngine's FusedAdam, which it is made of, has a stand-in here (`fused_adam_double`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import fused_adam_double
import megatron_jobs as jobs
import pytest
import test_megatron_divided as divided
import torch
from megatron_jobs import SmallJob, assert_moved_without_a_change, assert_read_back, both, read_back, save_into, trained
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb

pytestmark = jobs.long_megatron
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


class AwareJob(SmallJob):
    """A job with TransformerEngine's optimizer, whose state is read from its own dictionaries."""

    def __init__(self, *, stepped: dict[str, Any], **options: Any) -> None:
        super().__init__(stepped={"use_precision_aware_optimizer": True, **stepped}, **options)

    def state_of(self, leaf: Any, parameter: Tensor) -> dict[str, Tensor]:
        group, place = leaf.model_param_group_index_map[parameter]
        given = leaf.optimizer.param_groups[group]["params"][place]
        scales = {f"scale of {key}": scale for key, scale in leaf.optimizer._scales.get(given, {}).items()}
        return {**leaf.optimizer.state[given], **scales}


class DividedAwareJob(divided.DividedJob, AwareJob):
    """On ranks that hold the same experts, of which each has parts of their state. Its scales are 1."""

    def state_of(self, leaf: Any, parameter: Tensor) -> dict[str, Tensor]:
        return {key: value for key, value in super().state_of(leaf, parameter).items() if "scale" not in key}


def leave_out_of_norm(balancer: eplb.Balancer) -> None:
    (optimizer,) = balancer._runtime.registry._optimizers
    optimizer._gradient_of = lambda parameter: None


def without_scales(job: AwareJob) -> None:
    for leaf in job.optimizer.chained_optimizers:
        vars(leaf.optimizer).pop("_scales", None)


def refused() -> str:
    return jobs.refusal(partial(AwareJob, **CASES[SCALED]), without_scales)


def prepare() -> None:
    jobs.prepare_small()
    fused_adam_double.install()
    from megatron.core.optimizer import distrib_optimizer

    distrib_optimizer.HAVE_APEX_OR_TE = True  # it asks whether each state has a number of steps, when it saves


def on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {}
    for case, options in CASES.items():
        make = partial(AwareJob, **options)
        results[case] = {
            "static": trained(make, move=False),
            "moving": trained(make, move=True, also=save_into(folder) if case == REMAINDERS else jobs.nothing),
        }
    remainders = partial(AwareJob, **CASES[REMAINDERS])  # float16 is scaled anew, and rounded, when it is read
    results["left out of the norm"] = trained(remainders, move=False, spoil=leave_out_of_norm)["seen"]
    results["refused"] = refused()
    results["checkpoint"] = read_back(folder, remainders)
    return results


def on_four_ranks(rank: int) -> dict[str, Any]:
    prepare()
    return {REMAINDERS: both(partial(DividedAwareJob, **CASES[REMAINDERS]))}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_two_ranks, str(tmp_path_factory.mktemp("precision aware")))


@pytest.mark.parametrize("case", CASES)
def test_state_in_dtypes_of_its_own_moves_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    kinds = assert_moved_without_a_change(results, case)
    assert kinds >= {"weight", "exp_avg", "exp_avg_sq", "master_param"}
    assert case != SCALED or "scale of exp_avg" in kinds


def test_parts_of_it_on_ranks_that_hold_the_same_experts_move_and_no_bit_changes() -> None:
    kinds = assert_moved_without_a_change(run_ranks(4, on_four_ranks), REMAINDERS, divided.whole)
    assert kinds >= {"weight", "exp_avg", "exp_avg_sq", "master_param"}


def test_experts_are_in_the_norm(results: list[dict[str, Any]]) -> None:
    assert results[0]["left out of the norm"] != results[0][REMAINDERS]["static"]["seen"]


def test_an_optimizer_with_another_layout_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "in another way than TransformerEngine's FusedAdam" in of_rank["refused"]


def test_megatron_alone_reads_what_it_saved_after_moves(results: list[dict[str, Any]]) -> None:
    assert_read_back(results, REMAINDERS, "checkpoint")
