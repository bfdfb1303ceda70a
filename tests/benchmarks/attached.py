"""The cost of a balancer that has nothing to move: training steps attached, on one rank, beside steps that are not.

The model is a stack of MoE blocks as OLMoE has them, in bfloat16: a router, the library's experts, a norm. There is no
attention, so a balancer's share of a step is larger here than in a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from eplb_runtime.config import BalancerConfig
from eplb_runtime.hosts import attach
from eplb_runtime.tools.bench.timing import ratio, timed

from .harness import command


@dataclass(frozen=True)
class Block:
    """Sizes of the model and of a batch; OLMoE-1B-7B has 64 experts, 8 choices, 2048 columns, experts of 1024."""

    layers: int = 2
    experts: int = 64
    top_k: int = 8
    hidden: int = 2048
    width: int = 1024
    tokens: int = 4096


ON_A_CPU = Block(layers=2, experts=16, top_k=4, hidden=512, width=256, tokens=1024)


class StepBlocks(nn.Module):
    """Residual MoE blocks: norm, router, experts."""

    def __init__(self, work: Block) -> None:
        from transformers import OlmoeConfig
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

        super().__init__()
        config = OlmoeConfig(
            hidden_size=work.hidden,
            intermediate_size=work.width,
            num_experts=work.experts,
            num_experts_per_tok=work.top_k,
        )
        config._experts_implementation = "grouped_mm"
        self._top_k = work.top_k
        self.routers = nn.ModuleList(nn.Linear(work.hidden, work.experts, bias=False) for _ in range(work.layers))
        self.experts = nn.ModuleList(OlmoeExperts(config) for _ in range(work.layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            normed_TD = functional.rms_norm(hidden_TD, hidden_TD.shape[-1:])
            weights_TK, ids_TK = router(normed_TD).softmax(dim=-1, dtype=torch.float32).topk(self._top_k)
            hidden_TD = hidden_TD + experts(normed_TD, ids_TK, weights_TK.to(hidden_TD.dtype))
        return hidden_TD.float().square().mean()


def run(device: torch.device, repeats: int = 30, *, work: Block | None = None) -> dict[str, Any]:
    """Steps attached and not attached, in turns; one that is not attached beside another says what chance does.

    Args:
        device: of this rank, which is the only one.
        repeats: steps of each that count.
        work: sizes; None: OLMoE's on a device, smaller ones on a CPU.

    Returns:
        JSON-able. ``step_ms`` not attached and ``attached_ms``: medians; ``attached_over_not`` and, as control,
        ``not_over_not``: medians of the ratios of steps that followed each other.

    Raises:
        ValueError: there are more ranks.
    """
    if dist.get_world_size() > 1:
        raise ValueError(f"it compares with a whole model: one rank, not {dist.get_world_size()}")
    if device.type == "cpu":
        torch.set_num_threads(1)
    work = work or (ON_A_CPU if device.type == "cpu" else Block())
    ways = [_stepping(work, device, attached) for attached in (False, True, False)]
    for way in ways * 2:  # the first steps compile, and are followed by more of the guard's checks
        way()
    plain, attached, again = timed(ways, repeats, device).T.tolist()
    return {
        "step_ms": median(plain) * 1e3,
        "attached_ms": median(attached) * 1e3,
        "attached_over_not": ratio(attached, plain),
        "not_over_not": ratio(again, plain),
    }


def _stepping(work: Block, device: torch.device, attached: bool) -> Callable[[], None]:
    """A step of a model of its own."""
    torch.manual_seed(0)
    model = StepBlocks(work).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if attached:
        attach(model, optimizer, config=BalancerConfig(interval=None, policy="static"))
    generator = torch.Generator().manual_seed(1)
    hidden_TD = torch.randn(work.tokens, work.hidden, generator=generator).to(device, torch.bfloat16)

    def step() -> None:
        model(hidden_TD).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    command(run, ranks=1)
