"""Megatron-Core's flex dispatcher with its DeepEP and HybridEP backends, with every home moved after each step: two
experts a token, also in the combined schedule of ``overlap_moe_expert_parallel_comm``; with three, equal to rounding.

DeepEP itself has a stand-in, `flex_dispatch_double`.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import flex_dispatch_double
import pytest
import test_megatron_parallelisms as parallelisms
from megatron_jobs import assert_moved_without_a_change, attached, three, trained
from ranks import run_ranks
from test_megatron_overlap import OverlapJob, answer_streams
from test_megatron_parallelisms import SmallJob

from eplb_runtime.hosts import AttachError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
CASES: dict[str, dict[str, Any]] = {
    "deepep": {**FLEX, "moe_flex_dispatcher_backend": "deepep"},
    "hybridep": {**FLEX, "moe_flex_dispatcher_backend": "hybridep", "distributed": False},
    "deepep, overlap": {**FLEX, "moe_flex_dispatcher_backend": "deepep", **OVERLAP},
    "hybridep, overlap": {**FLEX, "moe_flex_dispatcher_backend": "hybridep", **OVERLAP},
}
CONTROLS = ("deepep", "hybridep, overlap")
THREE = {**CASES["deepep"], "moe_router_topk": 3, "bf16": False}


def refused() -> str:
    job = SmallJob(**CASES["deepep"])
    job.config.moe_flex_dispatcher_backend = "ncclep"
    with pytest.raises(AttachError) as error:
        attached(job, move=False)
    return str(error.value)


def everything(rank: int) -> dict[str, Any]:
    parallelisms.prepare()
    answer_streams()
    flex_dispatch_double.use()
    results: dict[str, Any] = {
        case: three(partial(OverlapJob if "overlap" in case else SmallJob, **options), control=case in CONTROLS)
        for case, options in CASES.items()
    }
    results["said"] = refused()
    results["three"] = {move: trained(partial(SmallJob, **THREE), move=move)["seen"] for move in (False, True)}
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_with_two_experts_a_token_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_moved_without_a_change(results, case)


def test_with_three_training_is_equal_to_rounding(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        static, moving = of_rank["three"][False], of_rank["three"][True]
        assert static != moving
        for one, other in zip(static, moving, strict=True):
            assert other == pytest.approx(one, rel=1e-3)


def test_other_backends_are_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "moe_flex_dispatcher_backend=ncclep: nothing has been run with it" in of_rank["said"]
