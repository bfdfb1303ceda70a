"""Megatron-Core's own context parallelism, tensor and sequence parallelism, activation recompute and expert bias, with
every home moved after each step: 2 ranks that hold half of the experts each.

On a CPU, by the answers of ``launch/examples/megatron_cpu.py`` to what Megatron asks of CUDA. Its attention that knows
context parallelism is TransformerEngine's; `GatheredAttention` is in its place here.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import FOLDER, load_example
from megatron_jobs import EXPERTS, LENGTH, MICRO_BATCHES, STEPS, Job, attached, differing, forget_state, whole
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
LAYERS, UPDATE = 2, 1 / 16
CASES: dict[str, dict[str, Any]] = {
    "context parallelism": {"context_parallel_size": 2, "moe_router_topk": 3},
    "tensor and sequence parallelism": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
        "moe_router_topk": 3,
    },
    "full recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "moe_router_topk": 3,
    },
    "selective recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "moe"],
        "moe_router_topk": 3,
        "distributed": False,
    },
    "expert bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": UPDATE,
        "moe_router_topk": 3,
    },
}
"""Settings of Megatron's TransformerConfig, and `Job`'s own."""


class SmallJob(Job):
    """A job without pipeline stages on 2 ranks, which share the sequence or parts of the dense weights."""

    def __init__(self, **options: Any) -> None:
        initialize(options)
        super().__init__(**{"num_layers": LAYERS, "pipeline_model_parallel_size": 1, **options})

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        return self.train_by(forward_step, steps)

    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Tensor]:
        """As of `Job`; dense tensors by tensor-parallel rank, too."""
        from megatron.core import parallel_state

        part = parallel_state.get_tensor_model_parallel_rank()
        return {
            (*key, part) if key[0] == "dense" else key: tensor for key, tensor in super().tensors(placement).items()
        }


def initialize(options: dict[str, Any]) -> None:
    """Make Megatron's process groups, unless those that are there have these sizes."""
    from megatron.core import parallel_state

    sizes = {
        "tensor_model_parallel": options.get("tensor_model_parallel_size", 1),
        "pipeline_model_parallel": 1,
        "context_parallel": options.get("context_parallel_size", 1),
        "expert_model_parallel": 2,
    }
    sizes["expert_tensor_parallel"] = options.get("expert_tensor_parallel_size", sizes["tensor_model_parallel"])
    if parallel_state.is_initialized():
        there = {name: getattr(parallel_state, f"get_{name}_world_size")() for name in sizes}
        if there == sizes:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**{f"{name}_size": size for name, size in sizes.items()})


def gathered_attention() -> type:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class GatheredAttention(DotProductAttention):
        """Megatron's attention without TransformerEngine, which has keys and values of all context-parallel ranks:
        what TransformerEngine's does with ``cp_comm_type="all_gather"``."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1  # its constructor takes no other
            super().__init__(alone, *args, **kwargs)

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            group = parallel_state.get_context_parallel_group()
            if group.size() > 1:
                key, value = (gather_from_sequence_parallel_region(one, group=group) for one in (key, value))
            output: Tensor = super().forward(query, key, value, *args, **kwargs)
            return output

    return GatheredAttention


def mark_norms_of_sequence_parts() -> None:
    """Let Megatron's norm of torch's stand under sequence parallelism: gradients of its weights are added up, as of
    Apex's and TransformerEngine's norms."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    own = WrappedTorchNorm.__new__

    def new(kind: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False  # it takes no other
        norm = own(kind, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = staticmethod(new)


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """Of this context-parallel rank's part of the sequence; queries of later parts see all keys before them."""
    from megatron.core import parallel_state

    ids = next(batches)
    length = LENGTH // parallel_state.get_context_parallel_world_size()
    first = length * parallel_state.get_context_parallel_rank()
    mine = slice(first, first + length)
    positions = torch.arange(LENGTH).expand_as(ids)[:, mine]
    causal = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)[:, :, mine]
    output = model(input_ids=ids[:, mine], position_ids=positions, attention_mask=causal, labels=ids[:, mine])

    def loss_of(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = output.float().mean()
        return loss, loss.detach()

    return output, loss_of


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    """What came of a training.

    Returns:
        ``seen`` losses and norms, ``tensors``, ``moved`` experts, ``placement``, ``counted`` tokens of each logical
        expert on this rank ``[steps][L][E]``, and how often the first router has ``routed``.
    """
    job = SmallJob(**CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    counted, advance, routed = [], balancer._runtime.counter.advance, [0]

    def close_step() -> None:
        counted.append(balancer._counted.tolist())
        advance()

    def count(*_: Any) -> None:
        routed[0] += 1

    balancer._runtime.counter.advance = close_step
    router = next(module for module in job.models[0].modules() if type(module).__name__ == "TopKRouter")
    router.register_forward_hook(count)
    result = {
        "seen": job.train(range(STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "placement": balancer.placement.physical_to_logical.tolist(),
        "counted": counted,
        "routed": routed[0],
    }
    balancer.close()
    return result


def prepare() -> None:
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    import megatron.core.models.backends as backends

    backends.DotProductAttention = gathered_attention()
    mark_norms_of_sequence_parts()


def everything(rank: int, cases: list[str]) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {"rank": rank}
    for case in cases:
        results[case] = {
            "static": trained(case, move=False),
            "moving": trained(case, move=True),
            "control": trained(case, move=True, spoil=forget_state),
            "alone": SmallJob(**CASES[case]).train(range(STEPS)) if "parallelism" in case else None,
        }
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything, list(CASES))


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_moved_without_a_change(results, case)


def assert_moved_without_a_change(results: list[dict[str, Any]], case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    moving = whole([of_rank[case]["moving"] for of_rank in results])
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
    assert differing(static, whole([of_rank[case]["control"] for of_rank in results])) != [], "state that stays shows"


@pytest.mark.parametrize("case", CASES)
def test_each_choice_is_counted_once_and_by_logical_expert(results: list[dict[str, Any]], case: str) -> None:
    assert_counted(results, case)


def assert_counted(results: list[dict[str, Any]], case: str) -> None:
    tokens = MICRO_BATCHES * 2 * LENGTH // (2 if "parallelism" in case else 1)  # which 2 ranks share then
    passes = 2 if "recompute" in case else 1
    for of_rank in results:
        moving = of_rank[case]["moving"]
        assert moving["counted"] == of_rank[case]["static"]["counted"]
        assert torch.tensor(moving["counted"]).sum(dim=-1).tolist() == [[3 * tokens] * LAYERS] * STEPS
        assert moving["routed"] == passes * MICRO_BATCHES * STEPS


@pytest.mark.parametrize("case", [case for case in CASES if "parallelism" in case])
def test_losses_and_norms_are_those_of_megatron_alone(results: list[dict[str, Any]], case: str) -> None:
    for of_rank in results:
        alone, moving = of_rank[case]["alone"], of_rank[case]["moving"]["seen"]
        assert moving[0] == pytest.approx(alone[0], rel=1e-5)
        for of_alone, of_moving in zip(alone[1:], moving[1:], strict=True):  # after steps in bfloat16
            assert of_moving == pytest.approx(of_alone, rel=1e-2)


def test_the_bias_of_experts_follows_the_load_of_all_steps(results: list[dict[str, Any]]) -> None:
    moving = [of_rank["expert bias"]["moving"] for of_rank in results]
    load_SLE = sum(torch.tensor(of_rank["counted"]) for of_rank in moving)
    wanted_LE = UPDATE * (load_SLE.float().mean(dim=-1, keepdim=True) - load_SLE).sign().sum(dim=0)
    biases = {key[2]: tensor for key, tensor in whole(moving).items() if key[0] == "dense" and "expert_bias" in key[2]}
    assert len(biases) == LAYERS and wanted_LE.count_nonzero() > 0
    for name, wanted in zip(sorted(biases), wanted_LE, strict=True):
        assert torch.equal(biases[name], wanted), name
