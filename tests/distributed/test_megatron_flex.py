"""Megatron-Core's flex dispatcher with its DeepEP and HybridEP backends, with every home moved after each step: two
experts a token, also in the combined schedule of ``overlap_moe_expert_parallel_comm``.

DeepEP itself has a stand-in, `flex_dispatch_double`. With three experts a token, see `test_megatron_rounding`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flex_dispatch_double
import megatron_jobs as jobs
import pytest
from megatron_jobs import SmallJob, assert_moved_without_a_change, both
from ranks import run_ranks
from test_megatron_overlap import OverlapJob, answer_streams

pytestmark = jobs.long_megatron
FLEX = {"moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
CASES: dict[str, dict[str, Any]] = {
    "deepep": {**FLEX, "moe_flex_dispatcher_backend": "deepep"},
    "hybridep": {**FLEX, "moe_flex_dispatcher_backend": "hybridep", "distributed": False},
    "deepep, overlap": {**FLEX, "moe_flex_dispatcher_backend": "deepep", **OVERLAP},
    "hybridep, overlap": {**FLEX, "moe_flex_dispatcher_backend": "hybridep", **OVERLAP},
}


def everything(rank: int) -> dict[str, Any]:
    jobs.prepare_small()
    answer_streams()
    flex_dispatch_double.use()
    results: dict[str, Any] = {
        case: both(partial(OverlapJob if "overlap" in case else SmallJob, **options)) for case, options in CASES.items()
    }
    results["said"] = jobs.refusal(
        partial(SmallJob, **CASES["deepep"]), lambda job: setattr(job.config, "moe_flex_dispatcher_backend", "ncclep")
    )
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_with_two_experts_a_token_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_moved_without_a_change(results, case)


def test_other_backends_are_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "moe_flex_dispatcher_backend=ncclep: nothing has been run with it" in of_rank["said"]
