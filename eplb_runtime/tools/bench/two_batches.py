"""Measure what two batches at once hide of each other's exchanges, as in evaluation and generation, beside one after
the other, over links slowed as in `overlap.py`. There is no pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import hosts
from ...balancer.balancer import Balancer
from ...config import BalancerConfig
from .overlap import AT_ONCE, HIDDEN, IN_TURN, OverlapLayer, compare, compute, slow_down
from .overlap_spans import BLOCK, TOKENS, OverlapSpans, SlowLink, Span, SpanBlocks, write_trace


def run(
    device: torch.device,
    repeats: int = 5,
    *,
    tokens: int = 512,
    width: int = 512,
    layers: int = 4,
    link_share: float = 1.5,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Evaluate the same two batches both ways in turns. Collective.

    Args:
        device: of this rank.
        repeats: of each way that count.
        tokens: of a batch.
        link_share, trace: as of `overlap.run`.

    Returns:
        JSON-able, as of `overlap.run`; a block is both batches.

    Raises:
        ValueError: one rank alone.
    """
    if dist.get_world_size() < 2:
        raise ValueError("bench two-batches wants two ranks at least: one alone has nothing to exchange")
    torch.set_num_threads(1)
    job = _TwoBatchesJob(tokens, width, layers)
    for way in (IN_TURN, AT_ONCE):
        job.step(way)
    carried = job.link.carried
    spans = job.step(IN_TURN)[1]
    slow_down(job.link, job.link.carried - carried, SpanBlocks.of(spans), link_share)
    for way in (IN_TURN, AT_ONCE):
        job.step(way)
    compared = compare(job.step, repeats)
    if trace is not None:
        write_trace(trace, dist.get_rank(), list(compared.last.items()))
    job.balancer.close()
    link = job.link.bytes_per_second
    assert link is not None
    return {"ranks": dist.get_world_size(), "link_mbit_per_second": link * 8e-6, **compared.result}


class _TwoBatchesJob:
    """One rank's model and its two batches, with everything in place that measures."""

    def __init__(self, tokens: int, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self._model = nn.Sequential(*(OverlapLayer(width) for _ in range(layers)))
        named = [hosts.MoE(f"{n}.experts", run="run", compute=compute) for n in range(layers)]
        config = BalancerConfig(policy="static", guard="off")
        self.balancer: Balancer = hosts.attach(self._model, None, layers=named, config=config)
        self._model.eval()
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._batches = torch.randn(2, tokens, HIDDEN, generator=generator)
        self._spans = OverlapSpans()
        self.link = SlowLink(partial(self._spans.span, TOKENS))
        layer: Any = self.balancer._runtime.layers[0]
        layer._dispatcher._exchange = self.link.slowed(layer._dispatcher._exchange)

    def step(self, way: str) -> tuple[float, list[Span], list[Tensor]]:
        """Seconds, where they went, and what the model said."""
        self._spans.take()
        dist.barrier()
        began = time.perf_counter()
        with self._spans.span("step"), self._spans.span(BLOCK), torch.no_grad():
            halves = self._half(0), self._half(1)
            said = self.balancer.at_once(*halves) if way == AT_ONCE else [half() for half in halves]
        dist.barrier()
        return time.perf_counter() - began, self._spans.take(), list(said)

    def _half(self, number: int) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with self._spans.span(f"batch {number}"):
                said: Tensor = self._model(self._batches[number])
                return said

        return forward
