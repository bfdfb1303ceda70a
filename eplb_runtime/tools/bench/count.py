"""Measure counting on this machine: tokens a second beside torch.bincount, and its share of a step of experts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...load.counter import LoadCounter

SHAPES = ((4096, 8, 64), (4096, 8, 256), (32768, 8, 256))
"""(tokens, choices of each, experts)"""


def run(
    repeats: int = 20,
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    hidden: int = 256,
    width: int = 256,
    on_progress: Callable[[str], None] = lambda said: None,
) -> dict[str, Any]:
    """Count router choices of one layer; the ways take turns, and the least time of each counts.

    Args:
        repeats: of each timing.
        shapes: (tokens, choices of each, experts).
        hidden, width: of the experts in whose step the share is taken: as many rows as tokens have choices, through one
            gated expert, forward and backward. Larger ones make the share smaller.
        on_progress: told what is measured next.

    Returns:
        JSON-able; ``"count"``: a row for each shape with ``tokens``, ``top_k``, ``experts``, ``tokens_per_second`` and
        ``bincount_tokens_per_second``, ``ratio`` (above 1: faster than bincount), ``masked_ratio`` (the same with a
        padding mask) and ``share_of_step`` (seconds of counting by seconds of the experts).
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for number, shape in enumerate(shapes, start=1):
        on_progress(f"{number}/{len(shapes)}: {shape[0]} tokens, {shape[1]} of {shape[2]} experts each")
        rows.append(_row(*shape, repeats, hidden, width, device))
    return {"device": device.type, "count": rows}


def _row(
    tokens: int, top_k: int, experts: int, repeats: int, hidden: int, width: int, device: torch.device
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(experts, (tokens, top_k), generator=generator).to(device)
    real_T = (torch.rand(tokens, generator=generator) < 0.9).to(device)
    counter = LoadCounter(1, experts, 1, device)
    gate_up, down = nn.Linear(hidden, 2 * width, bias=False), nn.Linear(width, hidden, bias=False)
    layer = nn.Sequential(gate_up, nn.GLU(), down).to(device)
    rows = torch.randn(tokens * top_k, hidden, generator=generator).to(device)
    seconds = _least_seconds(
        {
            "count": lambda: counter.count(0, ids_TK),
            "masked": lambda: counter.count(0, ids_TK, real_T),
            "bincount": lambda: torch.bincount(ids_TK.reshape(-1), minlength=experts),
        },
        repeats,
        device,
    )
    step = _least_seconds({"step": lambda: layer(rows).sum().backward()}, max(2, repeats // 5), device)
    return {
        "tokens": tokens,
        "top_k": top_k,
        "experts": experts,
        "tokens_per_second": tokens / seconds["count"],
        "bincount_tokens_per_second": tokens / seconds["bincount"],
        "ratio": seconds["bincount"] / seconds["count"],
        "masked_ratio": seconds["bincount"] / seconds["masked"],
        "share_of_step": seconds["count"] / step["step"],
    }


def _least_seconds(ways: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    least = dict.fromkeys(ways, float("inf"))
    for repeat in range(repeats + 1):
        for name, work in ways.items():
            _synchronize(device)
            began = time.perf_counter()
            work()
            _synchronize(device)
            if repeat:  # the first one warms up
                least[name] = min(least[name], time.perf_counter() - began)
    return least


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
