"""Megatron-Core's settings that are exact to rounding, in float64: three experts a token through the flex dispatcher,
the all-gather dispatcher and CUDA graphs of ``moe_preprocess``, with every home moved after each step, 2 ranks.

What Megatron computes in float32 is computed in float64 here, so that two trainings which differ by rounding alone
differ by 1e-10 and not by a float32's last bit. DeepEP, HybridEP and CUDA graphs have their stand-ins.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cuda_graph_double
import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import EXPERTS, STEPS, SmallJob, both, whole
from ranks import run_ranks
from test_megatron_cases import FLEX, prepare_flex
from test_megatron_graphs import GraphedJob
from torch import Tensor

pytestmark = jobs.long_megatron
WIDE = {
    "moe_router_topk": 3,
    "bf16": False,
    "distributed": False,  # Megatron's takes no float64
    "params_dtype": torch.float64,
    "pipeline_dtype": torch.float64,
    "stepped": {"params_dtype": torch.float64},
}
CASES: dict[str, dict[str, Any]] = {
    "flex, deepep": {**FLEX, "moe_flex_dispatcher_backend": "deepep"},
    "flex, hybridep": {**FLEX, "moe_flex_dispatcher_backend": "hybridep"},
    "all-gather": {"moe_token_dispatcher_type": "allgather"},
    "graphs of the preprocessing": {
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_scope": ["moe_router", "moe_preprocess"],
    },
}
CLOSE = 1e-10


class WideTorch:
    """``torch`` for a module that names narrow types."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32", "bfloat16") else getattr(torch, name)


def compute_in_float64() -> None:
    """In this process, from now on, where Megatron computes in float32 whatever its weights are."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer import module
    from megatron.core.transformer.moe import moe_utils, router, token_dispatcher

    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    for one in (clip_grads, module, moe_utils, router, token_dispatcher):
        one.torch = WideTorch()
    own = torch.Tensor.type

    def named(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = own(tensor, *args, **kwargs)
        return name.replace("Double", "Float") if isinstance(name, str) else name

    torch.Tensor.type = named


def everything(rank: int) -> dict[str, Any]:
    prepare_flex()
    cuda_graph_double.install()
    compute_in_float64()
    found = {}
    for case, options in CASES.items():
        kind = GraphedJob if "cuda_graph_impl" in options else SmallJob
        found[case] = both(partial(kind, **WIDE, **options))
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def furthest(results: list[dict[str, Any]], case: str) -> float:
    """The largest difference that moves make, over that of the tensor's largest number."""
    some, others = (whole([of_rank[case][which] for of_rank in results]) for which in ("static", "moving"))
    assert some.keys() == others.keys()
    return max(
        float((some[key].double() - others[key].double()).abs().max() / some[key].double().abs().max().clamp_min(1e-30))
        for key in some
    )


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_training_is_equal_to_rounding(results: list[dict[str, Any]], case: str) -> None:
    experts = [key for key in results[0][case]["moving"]["tensors"] if key[0] != "dense"]
    tensors = results[0][case]["moving"]["tensors"]
    assert all(tensors[key].dtype == torch.float64 for key in experts if key[3] != "step")
    assert len({key[1] for key in experts}) == EXPERTS // 2
    assert results[0][case]["static"]["moved"] == 0
    assert results[0][case]["moving"]["moved"] > EXPERTS * STEPS
    far = furthest(results, case)
    print(f"{case}: {far:.1e}")
    assert 0 < far < CLOSE
    for of_rank in results:
        pairs = zip(of_rank[case]["static"]["seen"], of_rank[case]["moving"]["seen"], strict=True)
        for static, moving in pairs:
            assert moving == pytest.approx(static, rel=CLOSE)
