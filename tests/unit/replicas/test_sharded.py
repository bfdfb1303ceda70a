"""Replicas that are gathered for each pass: what the backward pass computes again is what the forward computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eplb_runtime.moe.experts.compute import SlotCounts
from eplb_runtime.replicas.compute import ReplicaGather, ShardedReplicas


def test_dropout_and_what_a_compute_closes_over_get_the_gradients_of_the_forward() -> None:
    home, closed_over = nn.Parameter(torch.full((1, 8), 2.0)), nn.Parameter(torch.tensor(3.0))
    replicas, rows, weights = torch.full((1, 8), 5.0), torch.rand(6, 8, requires_grad=True), torch.rand(6)
    collected: list[Any] = []
    sync = SimpleNamespace(
        check_homes=lambda layer: None,
        has_copies=lambda layer: True,
        wait=lambda layer: None,
        takes=lambda layer, edges: True,
        collect=lambda layer, gradients, edges: collected.append(gradients),
    )
    bank = SimpleNamespace(homes_per_rank=1, replicas=[replicas], parameters=[home])

    def compute(rows_MD: Tensor, counts_S: SlotCounts, parameters: list[Tensor]) -> Tensor:
        return functional.dropout(rows_MD * parameters[0][0] * closed_over, 0.5)

    layer = ShardedReplicas(
        compute,
        lambda: [home],
        1.0,
        0,
        bank,
        sync,
        gather=ReplicaGather(None, None),
    )
    out = layer(rows, SlotCounts.of([2, 4], torch.device("cpu")), weights.requires_grad_())
    torch.rand(100)  # others draw, too
    out.sum().backward()
    kept = (out.detach() != 0) * 2.0
    assert 0 < kept[2:].count_nonzero() < kept[2:].numel(), "control: it drops some"
    weight = torch.cat([home.detach().expand(2, 8), replicas.expand(4, 8)])
    by_row = weights.detach().unsqueeze(1) * kept
    torch.testing.assert_close(rows.grad, by_row * weight * 3)
    torch.testing.assert_close(closed_over.grad, (by_row * weight * rows.detach()).sum())
    torch.testing.assert_close(collected[0][0], (by_row * rows.detach() * 3)[2:].sum(0, keepdim=True))
    torch.testing.assert_close(home.grad, (by_row * rows.detach() * 3)[:2].sum(0, keepdim=True))
    torch.testing.assert_close(weights.grad, out.detach().sum(1))
