"""Megatron-Core's distributed optimizer over several ranks that hold the same experts, with state in host memory: 4
ranks, EP 2 x EDP 2, with every home moved after each step.

What is on a device is made up, as in `test_megatron_offload`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import test_megatron_offload as offload
import torch
from megatron_jobs import assert_moved_without_a_change, both
from ranks import run_ranks
from test_megatron_divided import SIX, DividedJob, whole

pytestmark = jobs.long_megatron
CASES: dict[str, dict[str, Any]] = {
    "masters, half in host memory": {"fraction": 0.5},
    "precision-aware, half in host memory": {"fraction": 0.5, "aware": True},
    "precision-aware, all in host memory": {"fraction": 1.0, "overlap": True, "aware": True},
}


class Job(DividedJob, offload.OffloadedJob):
    pass


def prepare(**parallel: int) -> None:
    offload.prepare(**parallel)
    torch.cuda.is_current_stream_capturing = lambda: False  # asked of parameters that are said to be on a device


def everything(rank: int) -> dict[str, Any]:
    prepare()
    return {case: both(partial(Job, **SIX, **options)) for case, options in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("case", CASES)
def test_divided_experts_with_state_in_host_memory_move_and_no_bit_changes(
    results: list[dict[str, Any]], case: str
) -> None:
    kinds = assert_moved_without_a_change(results, case, whole)
    assert kinds == {"weight", "given", "inner", "exp_avg", "exp_avg_sq", "step"}
