"""CUDA graphs of parts without experts (``attn``, ``moe_router``, ``moe_preprocess``), captured and replayed by
Megatron-Core's own code, with every home moved after each step: 2 ranks that hold half of the experts each.

A graph itself is a stand-in (`cuda_graph_double`), which runs the captured operators again on the captured memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import cuda_graph_double
import pytest
import test_megatron_parallelisms as parallelisms
import torch
from megatron_jobs import EXPERTS, LENGTH, attached, differing, forget_state, whole
from ranks import run_ranks
from test_megatron_parallelisms import LAYERS, MICRO_BATCHES, SmallJob

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS = 3
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


def job_of(case: str, **options: Any) -> SmallJob:
    return SmallJob(**{"cuda_graph_impl": "transformer_engine", **CASES[case], **options})


def capture(job: SmallJob) -> None:
    from megatron.core import num_microbatches_calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    if num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 2 * MICRO_BATCHES * 2, 2, 2)
    helper = TECudaGraphHelper(job.models, job.config, LENGTH, 2, [job.optimizer])
    helper.create_cudagraphs()
    if job.models[0].ddp_config.overlap_param_gather:
        helper.cuda_graph_set_manual_hooks()


def trained(
    case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None, graphs: bool = True
) -> dict[str, Any]:
    """What came of a training.

    Returns:
        ``seen`` losses and norms, ``tensors``, ``moved`` experts, ``placement``, ``counted`` tokens of each logical
        expert on this rank ``[steps][L][E]``, and how often Python has passed through the first router after the first
        step, when graphs are captured (``routed``).
    """
    job = job_of(case) if graphs else job_of(case, cuda_graph_impl="none")
    balancer = attached(job, move)
    spoil(balancer)
    counted, advance, routed = [], balancer._runtime.counter.advance, [0]

    def close_step() -> None:
        counted.append(balancer._counted.tolist())
        advance()

    def count(*_: Any) -> None:
        routed[0] += 1

    balancer._runtime.counter.advance = close_step
    seen = job.train(range(1))  # Megatron captures after some steps
    if graphs:
        capture(job)
    next(part for part in job.models[0].modules() if type(part).__name__ == "TopKRouter").register_forward_hook(count)
    result = {
        "seen": seen + job.train(range(1, STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "placement": balancer.placement.physical_to_logical.tolist(),
        "counted": counted,
        "routed": routed[0],
    }
    balancer.close()
    return result


def read_once(balancer: eplb.Balancer) -> None:
    """Let graphs read the placement of now for ever: as if a commit put it into other memory."""
    from megatron.core.transformer.cuda_graphs import is_graph_capturing

    table = balancer._runtime.layers[0]._table
    own, orders = table.logical_of_slots, [table.logical_of_slots(layer).clone() for layer in range(LAYERS)]
    table.logical_of_slots = lambda layer: orders[layer] if is_graph_capturing() else own(layer)


def read_once_unseen(balancer: eplb.Balancer) -> None:
    read_once(balancer)
    for layer in balancer._runtime.layers:
        own = layer.begin_after_graph
        layer.begin_after_graph = lambda rows, counts, order, own=own, layer=layer: own(
            rows, counts, layer.logical_of_slots
        )


def watched() -> dict[str, Any]:
    """One step of a job that nobody has attached to: its choices as `eplb.record` sees them, and marks of its expert
    work."""
    from eplb_runtime.hosts.megatron.layer import mark_work, watch
    from eplb_runtime.load.expert_clock import ExpertClock

    job, clock = job_of(PREPROCESSED), ExpertClock()
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
    job = job_of(PREPROCESSED)
    capture(job)
    attached(job, move=True)


def everything(rank: int) -> dict[str, Any]:
    parallelisms.prepare()
    cuda_graph_double.install()
    results: dict[str, Any] = {"rank": rank}
    for case in CASES:
        results[case] = {"static": trained(case, move=False), "moving": trained(case, move=True)}
    for case in ALSO_WITHOUT:
        results[case]["without"] = trained(case, move=False, graphs=False)
    results["state stays"] = trained(PREPROCESSED, move=True, spoil=forget_state)
    results["stale"] = trained(PREPROCESSED, move=True, spoil=read_once_unseen)
    results["watched"] = watched()
    results["said"] = {
        "stale": said(lambda: trained(PREPROCESSED, move=True, spoil=read_once)),
        "captured first": said(captured_first),
    }
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_replays_follow_experts_that_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static, moving = (whole([of_rank[case][which] for of_rank in results]) for which in ("static", "moving"))
    for of_rank in results:
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
        assert all(row != sorted(row) for row in of_rank[case]["moving"]["placement"])
    moved = results[0][case]["moving"]["moved"]
    assert results[0][case]["static"]["moved"] == 0 < moved
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert {key[3] for key in experts} >= {"weight", "param", "exp_avg", "exp_avg_sq"}
    assert differing(static, moving) == []


@pytest.mark.parametrize("case", CASES)
def test_replays_run_no_python_and_each_choice_is_counted_once(results: list[dict[str, Any]], case: str) -> None:
    choices = CASES[case].get("moe_router_topk", 2) * MICRO_BATCHES * 2 * LENGTH
    in_graph = "moe_router" in CASES[case]["cuda_graph_scope"]
    for of_rank in results:
        moving = of_rank[case]["moving"]
        assert moving["routed"] == (0 if in_graph else MICRO_BATCHES * (STEPS - 1))
        assert moving["counted"] == of_rank[case]["static"]["counted"]
        assert torch.tensor(moving["counted"]).sum(dim=-1).tolist() == [[choices] * LAYERS] * STEPS


@pytest.mark.parametrize("case", ALSO_WITHOUT)
def test_graphs_train_to_the_bits_of_a_job_without(results: list[dict[str, Any]], case: str) -> None:
    without, moving = (whole([of_rank[case][which] for of_rank in results]) for which in ("without", "moving"))
    assert differing(without, moving) == []
    for of_rank in results:
        assert of_rank[case]["without"]["seen"] == of_rank[case]["moving"]["seen"]
        assert of_rank[case]["without"]["counted"] == of_rank[case]["moving"]["counted"]


@pytest.mark.parametrize("control", ["state stays", "stale"])
def test_control_what_stays_behind_shows(results: list[dict[str, Any]], control: str) -> None:
    static = whole([of_rank[PREPROCESSED]["static"] for of_rank in results])
    assert differing(static, whole([of_rank[control] for of_rank in results])) != []


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
