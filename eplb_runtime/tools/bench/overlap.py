"""Measure what DualPipeV hides when its pairs of a forward and a backward run at once, beside one after the other.

Links are slowed: an exchange of tokens is over when so many bytes a second have carried it, so waiting is most of what
an exchange takes. With ``shared_link`` exchanges of a rank that are under way at once wait for each other as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.nn import functional

from ... import hosts
from ...balancer.balancer import Balancer
from ...config import BalancerConfig
from ...hosts import pipelining
from ...moe.experts.compute import SlotCounts
from .overlap_spans import BLOCK, TOKENS, OverlapSpans, SlowLink, Span, SpanBlocks, write_trace

PIPELINE_RANKS, STAGES = 2, 4
HIDDEN, EXPERTS, TOP_K = 256, 8, 2
IN_TURN, AT_ONCE = "in turn", "at once"


class ExpertBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, width, HIDDEN) / HIDDEN**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, width) / width**0.5)

    def run(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError("the balancer runs them")


class OverlapLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(HIDDEN, width), nn.SiLU(), nn.Linear(width, HIDDEN))
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = ExpertBlock(width)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        hidden_TD = hidden_TD + self.mix(functional.rms_norm(hidden_TD, (HIDDEN,)))
        normed_TD = functional.rms_norm(hidden_TD, (HIDDEN,))
        weights_TK, ids_TK = self.router(normed_TD).softmax(dim=-1).topk(TOP_K)
        return hidden_TD + self.experts.run(normed_TD, ids_TK, weights_TK)


def compute(rows: Tensor, counts: SlotCounts, weights: Mapping[str, Tensor]) -> Tensor:
    results = []
    for slot, mine in enumerate(rows.split(list(counts.known()))):
        results.append(functional.linear(functional.silu(mine @ weights["up"][slot].T), weights["down"][slot]))
    return torch.cat(results)


def run(
    device: torch.device,
    repeats: int = 5,
    *,
    micro_batches: int = 16,
    tokens: int = 256,
    width: int = 512,
    layers_per_stage: int = 2,
    link_share: float = 1.5,
    shared_link: bool = False,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Train the same steps both ways in turns, over the same slow links. Collective.

    Args:
        device: of this rank.
        repeats: steps of each way that count.
        tokens: of a micro-batch.
        link_share: seconds of carrying for each second that a rank computes in its blocks while links are fast.
        shared_link: whether exchanges that are under way at once wait for each other.
        trace: folder for a Chrome trace of each rank's last step either way.

    Returns:
        JSON-able. ``rows``, one each way: ``step_ms`` (median); and per rank and step, in its blocks of a forward and a
        backward: ``block_ms``, ``waiting_ms`` for tokens (of all threads), ``exposed_ms`` of it in which the rank does
        not compute. ``hidden_share``: of what is exposed in turn, the share that is not at once. ``same_bits``: whether
        losses and gradients were equal both ways.

    Raises:
        ValueError: not an even number of ranks, 4 at least.
    """
    if dist.get_world_size() % PIPELINE_RANKS or dist.get_world_size() < 2 * PIPELINE_RANKS:
        raise ValueError(f"bench overlap wants an even number of ranks, 4 at least: {dist.get_world_size()}")
    torch.set_num_threads(1)
    job = _OverlapJob(device, micro_batches, tokens, width, layers_per_stage)
    job.link.shared = shared_link
    for way in (IN_TURN, AT_ONCE):
        job.step(way)
    carried = job.link.carried
    spans = job.step(IN_TURN)[1]
    blocks = SpanBlocks.of(spans)
    share_in_blocks = mean(blocks.total) / mean(sum(s.end - s.begin for s in spans if s.name == "step"))
    slow_down(job.link, (job.link.carried - carried) * share_in_blocks, blocks, link_share)
    job.step(IN_TURN), job.step(AT_ONCE)
    compared = compare(job.step, repeats)
    if trace is not None:
        write_trace(trace, dist.get_rank(), list(compared.last.items()))
    job.balancer.close()
    link = job.link.bytes_per_second
    assert link is not None
    return {
        "ranks": dist.get_world_size(),
        "pipeline_ranks": PIPELINE_RANKS,
        "micro_batches": micro_batches,
        "link_mbit_per_second": link * 8e-6,
        **compared.result,
    }


@dataclass(frozen=True)
class Compared:
    """Both ways.

    Args:
        result: ``rows``, ``hidden_share``, ``step_ratio`` and ``same_bits``, as `run` returns them.
        last: the spans of the last step of each.
    """

    result: dict[str, Any]
    last: dict[str, list[Span]]


def compare(step: Callable[[str], tuple[float, list[Span], list[Tensor]]], repeats: int) -> Compared:
    """Take turns. Collective.

    Args:
        step: of a way; seconds, where they went, and what must be the same both ways.
    """
    taken: dict[str, list[tuple[float, SpanBlocks]]] = {IN_TURN: [], AT_ONCE: []}
    seen: dict[str, list[Tensor]] = {}
    last: dict[str, list[Span]] = {}
    for _ in range(repeats):
        for way, of_way in taken.items():
            seconds, last[way], seen[way] = step(way)
            of_way.append((seconds, SpanBlocks.of(last[way])))
    same = all(torch.equal(one, other) for one, other in zip(seen[IN_TURN], seen[AT_ONCE], strict=True))
    rows = [_row(way, of_way) for way, of_way in taken.items()]
    result = {
        "rows": rows,
        "hidden_share": 1 - rows[1]["exposed_ms"] / rows[0]["exposed_ms"],
        "step_ratio": rows[1]["step_ms"] / rows[0]["step_ms"],
        "same_bits": bool(mean(float(same)) == 1.0),
    }
    return Compared(result, last)


def slow_down(link: SlowLink, carried: float, blocks: SpanBlocks, link_share: float) -> None:
    """Let a link be busy for ``link_share`` seconds for each second that a rank computes in its blocks. Collective.

    Args:
        carried: bytes, in the blocks.
    """
    link.bytes_per_second = mean(float(carried)) / mean(max(1e-6, blocks.total - blocks.waiting)) / link_share


def _row(way: str, taken: list[tuple[float, SpanBlocks]]) -> dict[str, Any]:
    """Means over ranks and steps; of the whole step the median."""
    return {
        "way": way,
        "step_ms": 1e3 * mean(statistics.median(seconds for seconds, _ in taken)),
        "block_ms": 1e3 * mean(statistics.fmean(blocks.total for _, blocks in taken)),
        "waiting_ms": 1e3 * mean(statistics.fmean(blocks.waiting for _, blocks in taken)),
        "exposed_ms": 1e3 * mean(statistics.fmean(blocks.exposed for _, blocks in taken)),
    }


def mean(value: float) -> float:
    """Over the ranks. Collective."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class _OverlapJob:
    """One rank's stages, with everything in place that measures."""

    def __init__(self, device: torch.device, micro_batches: int, tokens: int, width: int, layers: int) -> None:
        ep = dist.get_world_size() // PIPELINE_RANKS
        rank = dist.get_rank()
        pipelines = [dist.new_group(list(range(column, PIPELINE_RANKS * ep, ep))) for column in range(ep)]
        experts = [dist.new_group(list(range(first, first + ep))) for first in range(0, PIPELINE_RANKS * ep, ep)]
        torch.manual_seed(0)
        modules = [nn.Sequential(*(OverlapLayer(width) for _ in range(layers))) for _ in range(STAGES)]
        hidden = torch.empty(tokens, HIDDEN, requires_grad=True)
        held = (rank // ep, STAGES - 1 - rank // ep)
        stages: list[Any] = [
            PipelineStage(
                modules[n], n, STAGES, device, input_args=hidden, output_args=hidden, group=pipelines[rank % ep]
            )
            for n in held
        ]
        self._schedule = ScheduleDualPipeV(stages, micro_batches, loss_fn=functional.mse_loss)
        named = [[hosts.MoE(f"{n}.experts", run="run", compute=compute) for n in range(layers)] for _ in held]
        self._parameters = [p for n in held for p in modules[n].parameters()]
        optimizer = torch.optim.SGD(self._parameters, lr=0.0)
        config = BalancerConfig(policy="static", dense_gradients="allreduce", guard="off")
        self.balancer: Balancer = pipelining.attach(
            self._schedule, optimizer, layers=named, config=config, ep_group=experts[rank // ep]
        )
        self._parameters = [p for n in held for p in modules[n].parameters()]
        generator = torch.Generator().manual_seed(1 + rank % ep)
        self._batch, self._target = torch.randn(2, micro_batches * tokens, HIDDEN, generator=generator)
        self._spans = OverlapSpans()
        self.link = SlowLink(partial(self._spans.span, TOKENS))
        self._channels = _Measured(self.balancer, self._schedule, self.link, self._spans)

    def step(self, way: str) -> tuple[float, list[Span], list[Tensor]]:
        """Seconds, where they went, and losses with gradients. The weights stay."""
        for parameter in self._parameters:
            parameter.grad = None
        self._channels.way = way
        self._spans.take()
        losses: list[Tensor] = []
        dist.barrier()
        began = time.perf_counter()
        with self._spans.span("step"):
            self._schedule.step(self._batch, target=self._target, losses=losses)
        dist.barrier()
        seconds = time.perf_counter() - began
        gradients = [p.grad.clone() for p in self._parameters if p.grad is not None]
        return seconds, self._spans.take(), [*(loss.detach() for loss in losses), *gradients]


class _Measured:
    """Puts itself between a balancer's channels and a schedule's pairs.

    Attributes:
        way: how the next pairs run.
    """

    def __init__(self, balancer: Balancer, schedule: ScheduleDualPipeV, link: SlowLink, spans: OverlapSpans) -> None:
        self.way = IN_TURN
        together: Any = pipelining.overlap(schedule, balancer)
        layer: Any = balancer._runtime.layers[0]
        channels, dispatcher = balancer._runtime.channels, layer._dispatcher
        self._spans, self._at_once = spans, channels.both
        for instance, name, value in (
            (together, "forward", spans.part("forward", together.forward)),
            (together, "backward", spans.part("backward", together.backward)),
            (together, "arrived", spans.pipeline(together.arrived)),
            (dispatcher, "_exchange", link.slowed(dispatcher._exchange)),
            (channels, "both", self._both),
        ):
            setattr(instance, name, value)

    def _both(self, here: Callable[[], None], beside: Callable[[], None], turned: bool = False) -> None:
        with self._spans.span(BLOCK):
            if self.way == AT_ONCE:
                self._at_once(here, beside, turned)
            else:
                here()
                beside()
