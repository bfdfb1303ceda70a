"""Buffers are used again when nobody holds them, and never before."""

from __future__ import annotations

import torch

from eplb_runtime.moe.dispatch.permute import RowMemory

WIDTH = 512
EXAMPLE = torch.empty(0, WIDTH)


def test_a_buffer_that_nobody_holds_is_used_again() -> None:
    memory = RowMemory()
    first = memory.like(EXAMPLE, 1000)
    address = first.data_ptr()
    del first
    assert memory.like(EXAMPLE, 990).data_ptr() == address


def test_a_view_keeps_its_buffer() -> None:
    memory = RowMemory()
    view = memory.like(EXAMPLE, 1000)[5:7]
    view.fill_(1.0)
    memory.like(EXAMPLE, 1000).fill_(2.0)
    assert (view == 1.0).all()


def test_a_graph_keeps_its_buffer_until_its_backward() -> None:
    memory = RowMemory()
    weight = torch.ones(WIDTH, requires_grad=True)
    rows = memory.like(EXAMPLE, 1000).fill_(3.0)
    address = rows.data_ptr()
    total = (rows * weight).sum()
    del rows
    other = memory.like(EXAMPLE, 1000).fill_(0.0)
    assert other.data_ptr() != address
    total.backward()
    assert (weight.grad == 3000.0).all()
    assert memory.like(EXAMPLE, 1000).data_ptr() == address


def test_what_is_computed_in_place_on_a_buffer_is_not_a_view_for_autograd() -> None:
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, source: torch.Tensor) -> torch.Tensor:
            return memory.like(source, len(source)).copy_(source)

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
            return grad

    memory = RowMemory()
    source = torch.ones(1000, WIDTH, requires_grad=True)
    Rows.apply(source).mul_(2.0).sum().backward()
    assert (source.grad == 2.0).all()
