"""Measure training steps on this machine: experts fixed, homes moved, homes moved with a replica slot, and the ideal.

The model is MoE layers and nothing else, so experts dominate the step; its router is a table, so the skew is what it is
said to be. All variants train in one run and take turns in blocks of steps, so that drift of the machine cancels out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...balancer.balancer import Balancer
from ...config import BalancerConfig, MigrationConfig
from ...events import LoadMeasured, RebalanceCommitted
from ...hosts import attach
from . import ratio, slowest


@dataclass(frozen=True)
class Workload:
    """The model, its batches and how long it trains."""

    layers: int = 2
    experts: int = 8  # a multiple of twice the ranks
    hidden: int = 256
    width: int = 1024
    top_k: int = 2
    tokens: int = 1024  # of each rank's batch, a multiple of `experts`
    skew: float = 0.6  # load of an expert by that of the one before it; 1: balanced
    interval: int = 10  # steps between decisions, and of a block
    settle_blocks: int = 2  # before timing, in which experts find their places
    blocks: int = 8  # timed


class MoEStack(nn.Module):
    """Residual MoE layers of the Transformers library's experts; who gets which token is given."""

    def __init__(self, work: Workload, implementation: str = "grouped_mm") -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(
            hidden_size=work.hidden, intermediate_size=work.width, num_local_experts=work.experts, hidden_act="silu"
        )
        config._experts_implementation = implementation
        self.layers = nn.ModuleList(MixtralExperts(config) for _ in range(work.layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden_TD: Tensor, topk_ids_LTK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        for layer, ids_TK in zip(self.layers, topk_ids_LTK, strict=True):
            hidden_TD = hidden_TD + layer(hidden_TD, ids_TK, topk_weights_TK)
        return hidden_TD.square().mean()


class _Variant:
    """One model in training with its balancer."""

    def __init__(self, name: str, work: Workload, skew: float, **options: Any) -> None:
        torch.manual_seed(0)
        self.name, self._work, self._skew, self._step = name, work, skew, 0
        self._model = MoEStack(work)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)
        settings = {"interval": work.interval, "window": 2 * work.interval, **options}
        config = BalancerConfig(migration=MigrationConfig(moe_share=1.0), **settings)
        self.balancer: Balancer = attach(self._model, self._optimizer, config=config)
        self._model.train()
        self._weights_TK = torch.full((work.tokens, work.top_k), 1 / work.top_k)

    def steps(self, count: int) -> float:
        """Train for ``count`` steps, and return the seconds that this rank took without making batches. Collective."""
        work, batches = self._work, []
        for _ in range(count):
            self._step += 1
            generator = torch.Generator().manual_seed(self._step * 1009 + dist.get_rank())
            hidden_TD = torch.randn(work.tokens, work.hidden, generator=generator)
            ids = [choices(work, self._skew, generator) for _ in range(work.layers)]
            batches.append((hidden_TD, torch.stack(ids)))
        dist.barrier()
        began = time.perf_counter()
        for hidden_TD, ids_LTK in batches:
            self._model(hidden_TD, ids_LTK, self._weights_TK).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        dist.barrier()
        return time.perf_counter() - began


def choices(work: Workload, skew: float, generator: torch.Generator) -> Tensor:
    """Return int64 ``[T, K]``, the expert ids of a batch, different ones for each token.

    Skewed ones are drawn by shares ``skew ** expert``; with ``skew`` 1 every expert gets the same number of tokens.
    """
    if skew < 1:
        shares = skew ** torch.arange(work.experts, dtype=torch.float64)
        return torch.multinomial(shares.expand(work.tokens, -1), work.top_k, generator=generator)
    first = torch.arange(work.tokens) % work.experts
    first = first[torch.randperm(work.tokens, generator=generator)]
    apart = work.experts // work.top_k
    return (first[:, None] + apart * torch.arange(work.top_k)) % work.experts


def run(device: torch.device, repeats: int = Workload.blocks, work: Workload | None = None) -> dict[str, Any]:
    """Train the variants on the CPU ranks of the process group, and set torch to one thread. Collective.

    Args:
        device: not used.
        repeats: timed blocks of each variant, without ``work``.
        work: all sizes; None: `Workload`'s.

    Returns:
        JSON-able. ``"timed"`` says of what the medians are. ``"train"``: a row for each variant of skewed load
        (``static``, ``homes``, ``replicas``), for ``even``, the same model with fixed experts and as many tokens for
        each, and for ``attached``, even load with a balancer that decides every interval: ``step_ms``,
        ``slowest_over_fastest`` of its blocks (near 1 on a quiet machine), ``imbalance`` (max / mean rank load in the
        timed steps), ``homes_moved`` and ``over_static`` (steps in the time of a static one, the median over blocks
        that followed each other). ``"overhead"`` of ``attached`` over ``even``.
    """
    torch.set_num_threads(1)
    work = work or Workload(blocks=repeats)
    variants = [
        _Variant("static", work, work.skew, policy="static"),
        _Variant("homes", work, work.skew),
        _Variant("replicas", work, work.skew, replica_slots=1),
        _Variant("even", work, 1.0, policy="static", interval=None),
        _Variant("attached", work, 1.0),
    ]
    for variant in variants:
        # Half a block more: decisions fall into the middle of blocks, and with them what they do in the background.
        settling = 0 if variant.name in ("static", "even") else work.settle_blocks  # what never moves settles at once
        variant.steps(settling * work.interval + work.interval // 2)
    taken: dict[_Variant, list[float]] = {variant: [] for variant in variants}
    for block in range(work.blocks):
        for variant in variants if block % 2 == 0 else reversed(variants):
            taken[variant].append(variant.steps(work.interval))
    static, *_, even, attached = blocks = [slowest(seconds).tolist() for seconds in taken.values()]
    rows = [_row(*one, work, static) for one in zip(variants, blocks, strict=True)]
    for variant in variants:
        variant.balancer.close()
    timed = f"medians of {work.blocks} blocks of {work.interval} steps"
    timed += f": {work.blocks * work.interval} calls of each variant, in turns"
    return {"ranks": dist.get_world_size(), "timed": timed, "train": rows, "overhead": ratio(attached, even) - 1}


def _row(variant: _Variant, blocks: Sequence[float], work: Workload, static: Sequence[float]) -> dict[str, Any]:
    """Return the figures of a variant, by its blocks and those of the static one."""
    events = variant.balancer.events
    measured = [event for event in events if isinstance(event, LoadMeasured)][-work.blocks :]
    imbalance = [value for event in measured for row in event.imbalance for value in row]
    step_ms, spread = median(blocks) / work.interval * 1e3, max(blocks) / min(blocks)
    return {
        **{"variant": variant.name, "step_ms": step_ms, "slowest_over_fastest": spread},
        "imbalance": fmean(imbalance or [1.0]),
        "homes_moved": sum(event.moved_experts for event in events if isinstance(event, RebalanceCommitted)),
        "over_static": ratio(static, blocks),
    }
