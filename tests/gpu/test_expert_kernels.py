"""Whether an expert's numbers depend on where it stands, for each implementation and dtype on this GPU.

What bit-identical training under migration rests on: the rows of an expert give the same bits in whatever slot it is
and whatever experts stand beside it, forward and backward.
"""

from __future__ import annotations

import pytest
import torch
from device import DEVICE

from eplb_runtime.hosts.transformers.describe import describe
from eplb_runtime.moe.experts.compute import SlotCounts, run_rows

pytestmark = pytest.mark.gpu
ROWS_OF_EXPERT = (0, 1, 3, 17, 64, 129, 5, 200)
WIDTH, INNER = 256, 128


def expert_layer(implementation: str, dtype: torch.dtype):
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": WIDTH, "intermediate_size": INNER, "num_experts": len(ROWS_OF_EXPERT)}
    config = hf.OlmoeConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, num_experts_per_tok=2, pad_token_id=0)
    model = hf.OlmoeForCausalLM(config).to(DEVICE, dtype)
    model.set_experts_implementation(implementation)
    return describe(model).layers[0]


def run(layer, dtype: torch.dtype, order: list[int]) -> dict[str, torch.Tensor]:
    """Outputs and gradients by logical expert, with the experts in the slots that ``order`` names."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(n, WIDTH, generator=generator).to(DEVICE, dtype) for n in ROWS_OF_EXPERT]
    seeds = [torch.randn(n, WIDTH, generator=generator).to(DEVICE, dtype) for n in ROWS_OF_EXPERT]
    weights = [getattr(layer.experts, name).detach()[order].requires_grad_() for name in layer.parameters]
    rows_MD = torch.cat([rows[expert] for expert in order]).requires_grad_()
    sizes = [ROWS_OF_EXPERT[expert] for expert in order]
    router = [torch.rand(n, generator=generator).to(DEVICE, dtype) for n in ROWS_OF_EXPERT]
    router_M = torch.cat([router[expert] for expert in order]).requires_grad_()
    out_MD = run_rows(layer.compute, rows_MD, SlotCounts.of(sizes, DEVICE), weights, router_M)
    out_MD.backward(torch.cat([seeds[expert] for expert in order]))
    found = {}
    for slot, expert in enumerate(order):
        found[f"output of expert {expert}"] = out_MD.detach().split(sizes)[slot]
        found[f"input gradient of expert {expert}"] = rows_MD.grad.split(sizes)[slot]
        found[f"router weights' gradient of expert {expert}"] = router_M.grad.split(sizes)[slot]
        for name, weight in zip(layer.parameters, weights, strict=True):
            found[f"{name} gradient of expert {expert}"] = weight.grad[slot]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
def test_an_experts_bits_do_not_depend_on_its_slot(implementation: str, dtype: torch.dtype) -> None:
    layer = expert_layer(implementation, dtype)
    in_order = run(layer, dtype, list(range(len(ROWS_OF_EXPERT))))
    differ: dict[str, int] = {}
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):
        moved = run(layer, dtype, torch.randperm(len(ROWS_OF_EXPERT), generator=generator).tolist())
        for name, value in in_order.items():
            count = int((value != moved[name]).sum())
            if count:
                differ[name] = max(count, differ.get(name, 0))
    print(f"{implementation} in {dtype}: {len(differ)} of {len(in_order)} tensors depend on the slot")
    assert not differ
