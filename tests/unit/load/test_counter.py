"""Counting tokens per logical expert: what counts, what does not, and how history is kept."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from eplb_runtime.load.counter import MAX_BUCKETS, LoadCounter, in_recompute

CPU = torch.device("cpu")


def test_choices_are_counted_by_layer_and_expert() -> None:
    counter = LoadCounter(2, 4, interval=4, device=CPU)
    counter.count(0, torch.tensor([[0, 1], [1, 3]]))
    counter.count(1, torch.tensor([[2, 2]]))
    assert counter.counts.tolist() == [[1, 2, 0, 1], [0, 0, 2, 0]]


def test_padding_does_not_count() -> None:
    counter = LoadCounter(1, 4, interval=4, device=CPU)
    ids = torch.tensor([[0, 1], [1, 3], [2, 3]])
    counter.count(0, ids, torch.tensor([True, False, True]))
    assert counter.counts.tolist() == [[1, 1, 1, 1]]
    assert ids.tolist() == [[0, 1], [1, 3], [2, 3]], "the router's choices were changed"


def test_every_step_is_a_row_and_taking_starts_anew() -> None:
    counter = LoadCounter(1, 2, interval=3, device=CPU)
    for step in range(3):
        counter.count(0, torch.tensor([[0]] * (step + 1)))
        counter.advance()
    assert counter.take().tolist() == [[[1, 0]], [[2, 0]], [[3, 0]]]
    assert counter.buckets == 0
    counter.count(0, torch.tensor([[1]]))
    counter.advance()
    assert counter.take().tolist() == [[[0, 1]]]


def test_long_intervals_add_up_several_steps_a_row() -> None:
    counter = LoadCounter(1, 2, interval=100, device=CPU)
    for _ in range(100):
        counter.count(0, torch.tensor([[0]]))
        counter.advance()
    rows = counter.take()
    assert len(rows) <= MAX_BUCKETS
    assert rows.sum().item() == 100
    assert rows[0].tolist() == [[counter.steps_per_bucket, 0]]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_repeated_forward_of_activation_checkpointing_is_known(use_reentrant: bool) -> None:
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_recompute())
        return x.sin().exp()

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert not in_recompute()


def test_without_an_interval_all_steps_between_two_takes_are_one_row() -> None:
    counter = LoadCounter(1, 2, interval=None, device=CPU)
    assert counter.take().shape == (0, 1, 2)
    for steps in (3, 2 * MAX_BUCKETS + 1):
        for _ in range(steps):
            counter.count(0, torch.tensor([[0]]))
            counter.advance()
        assert (counter.buckets, counter.open_steps) == (1, steps)
        assert counter.take().tolist() == [[[steps, 0]]]
    assert counter.buckets == 0 and counter.take().shape == (0, 1, 2)
