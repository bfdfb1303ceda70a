"""CUDA graphs of parts without experts (``attn``, ``moe_router``, ``moe_preprocess``), captured and replayed by
Megatron-Core's own code, with every home moved after each step: 2 ranks that hold half of the experts each.

A graph itself is a stand-in (`cuda_graph_double`), which runs the captured operators again on the captured memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cuda_graph_double
import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import (
    EXPERTS,
    LENGTH,
    MICRO_BATCHES,
    SmallJob,
    assert_counted,
    assert_moved_without_a_change,
    attached,
    both,
    differing,
    trained,
    whole,
)
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

pytestmark = jobs.long_megatron
STEPS, LAYERS = 3, 2
"""Graphs are captured after the first, and replayed before and after a move."""
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: dict[str, dict[str, Any]] = {
    "attention": {"cuda_graph_scope": ["attn"], "moe_router_topk": 3},
    "attention, router": {"cuda_graph_scope": ["attn", "moe_router"], "moe_router_topk": 3, **AUX_LOSS},
    "router, preprocessing": {"cuda_graph_scope": ["moe_router", "moe_preprocess"], "distributed": False},
    "attention, router, preprocessing": {
        "cuda_graph_scope": ["attn", "moe_router", "moe_preprocess"],
        **OVERLAP,
        **AUX_LOSS,
    },
    "router, preprocessing, all-gather, shared experts": {
        "cuda_graph_scope": ["moe_router", "moe_preprocess"],
        "moe_token_dispatcher_type": "allgather",
        "moe_shared_expert_intermediate_size": 32,
    },
}


PREPROCESSED = "attention, router, preprocessing"
ALSO_WITHOUT = ("attention, router", PREPROCESSED)


class GraphedJob(SmallJob):
    """Megatron captures after the first step. ``routed`` is seen, too: how often Python has passed through the first
    router since then."""

    routed: int | None = None

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        seen = super().train(steps[:1])
        if self.config.cuda_graph_impl == "none":
            return seen + super().train(steps[1:])
        capture(self)
        self.routed = 0
        router = next(part for part in self.models[0].modules() if type(part).__name__ == "TopKRouter")
        router.register_forward_hook(self._count)
        return seen + super().train(steps[1:])

    def _count(self, *_: Any) -> None:
        assert self.routed is not None
        self.routed += 1


def job_of(case: str, kind: type[SmallJob] = GraphedJob, **options: Any) -> SmallJob:
    return kind(**{"cuda_graph_impl": "transformer_engine", **CASES[case], **options})


def routed(job: GraphedJob, _: eplb.Balancer) -> dict[str, Any]:
    return {"routed": job.routed}


def capture(job: SmallJob) -> None:
    from megatron.core import num_microbatches_calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    if num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2 * MICRO_BATCHES * 2, 2, 2)
    helper = TECudaGraphHelper(job.models, job.config, LENGTH, 2, [job.optimizer])
    helper.create_cudagraphs()
    if job.models[0].ddp_config.overlap_param_gather:
        helper.cuda_graph_set_manual_hooks()


def read_once(balancer: eplb.Balancer) -> None:
    """Let graphs read the placement of now for ever: as if a commit put it into other memory."""
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    table = balancer._runtime.layers[0]._table
    own, orders = table.logical_of_slots, [table.logical_of_slots(layer).clone() for layer in range(LAYERS)]
    table.logical_of_slots = lambda layer: orders[layer] if is_graph_capturing() else own(layer)


def watched() -> dict[str, Any]:
    """One step of a job that nobody has attached to: its choices as `eplb.record` sees them, and marks of its expert
    work."""
    from eplb_runtime.hosts.megatron.layer import mark_work, watch
    from eplb_runtime.load.expert_clock import ExpertClock

    job, clock = job_of(PREPROCESSED, SmallJob), ExpertClock()
    layers = list(job.layers().values())
    counts = torch.zeros(LAYERS, EXPERTS, dtype=torch.int64)
    for number, layer in enumerate(layers):
        watch(layer, lambda chosen, *_, number=number: counts[number].add_(chosen.sum(dim=0)))
        mark_work(layer, clock)
    capture(job)
    clock.begin_step()
    job.train(range(1))
    clock.end_step()
    return {"counted": counts.tolist(), "spans": [len(step.spans) for step in clock.take()]}


def said(function: Callable[[], Any]) -> str:
    with pytest.raises((RuntimeError, AttachError)) as error:
        function()
    return str(error.value)


def captured_first() -> None:
    job = job_of(PREPROCESSED, SmallJob)
    capture(job)
    attached(job, move=True)


def everything(rank: int) -> dict[str, Any]:
    jobs.prepare_small()
    cuda_graph_double.install()
    results: dict[str, Any] = {}
    for case in CASES:
        results[case] = both(partial(job_of, case), steps=STEPS, also=routed)
    for case in ALSO_WITHOUT:
        results[case]["without"] = trained(partial(job_of, case, cuda_graph_impl="none"), move=False, steps=STEPS)
    results["watched"] = watched()
    results["said"] = {
        "stale": said(lambda: trained(partial(job_of, PREPROCESSED), True, read_once, STEPS)),
        "captured first": said(captured_first),
    }
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_replays_follow_experts_that_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) >= {"weight", "param", "exp_avg", "exp_avg_sq"}
    assert_counted(results, case, CASES[case].get("moe_router_topk", 2) * MICRO_BATCHES * 2 * LENGTH)


@pytest.mark.parametrize("case", CASES)
def test_replays_run_no_python(results: list[dict[str, Any]], case: str) -> None:
    in_graph = "moe_router" in CASES[case]["cuda_graph_scope"]
    for of_rank in results:
        assert of_rank[case]["moving"]["routed"] == (0 if in_graph else MICRO_BATCHES * (STEPS - 1))


@pytest.mark.parametrize("case", ALSO_WITHOUT)
def test_graphs_train_to_the_bits_of_a_job_without(results: list[dict[str, Any]], case: str) -> None:
    without, moving = (whole([of_rank[case][which] for of_rank in results]) for which in ("without", "moving"))
    assert differing(without, moving) == []
    for of_rank in results:
        assert of_rank[case]["without"]["seen"] == of_rank[case]["moving"]["seen"]
        assert of_rank[case]["without"]["counted"] == of_rank[case]["moving"]["counted"]


def test_a_graph_that_does_not_follow_a_move_ends_the_forward(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "does not follow the placement" in of_rank["said"]["stale"]


def test_graphs_that_were_captured_before_attach_are_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "captured before attach" in of_rank["said"]["captured first"]


def test_a_recording_sees_what_replays_choose_and_marks_their_expert_work(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["watched"]["counted"] == of_rank[PREPROCESSED]["static"]["counted"][0]
        assert of_rank["watched"]["spans"] == [2 * LAYERS * MICRO_BATCHES], "forwards and backward passes"
