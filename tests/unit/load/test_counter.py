"""Counting tokens per logical expert: what counts, what does not, and how history is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from eplb_runtime.load import declared
from eplb_runtime.load.counter import MAX_BUCKETS, LoadCounter, in_recompute
from eplb_runtime.load.declared import DeclaredLoadError, checked_declaration

CPU = torch.device("cpu")


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


# -- What is taken for a load that somebody declares, or plans for


def replayed(seed: int, tokens: int, layers: int, experts: int, top_k: int, padded: float) -> np.ndarray:
    """int64 ``[N, L, K]``: distinct experts of each token, -1 for padded tokens and dropped choices."""
    generator = np.random.default_rng(seed)
    ids = np.argsort(generator.random((tokens, layers, experts)), axis=2)[:, :, :top_k]
    ids[generator.random(tokens) < padded] = -1
    ids[generator.random(ids.shape) < padded / 4] = -1
    return ids


def counted(ids: np.ndarray, experts: int) -> np.ndarray:
    """float64 ``[L, E]``, token by token."""
    load = np.zeros((ids.shape[1], experts))
    for token in ids:
        for layer, choices in enumerate(token):
            for expert in choices[choices >= 0]:
                load[layer, expert] += 1
    return load


@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 30),
    layers=st.integers(1, 3),
    experts=st.integers(3, 9),
    top_k=st.integers(1, 2),
    padded=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([np.int8, np.int16, np.int32, np.int64]),
    chunk=st.sampled_from([1, 7, 1 << 22]),
)
def test_the_experts_of_tokens_count_as_their_load_whatever_is_padding(
    seed: int, tokens: int, layers: int, experts: int, top_k: int, padded: float, dtype: type, chunk: int
) -> None:
    ids = replayed(seed, tokens, layers, experts, top_k, padded).astype(dtype)
    wanted = counted(ids, experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(declared, "_CHUNK_IDS", chunk)
        for given_ids in (ids, torch.from_numpy(ids)):
            assert (checked_declaration(given_ids, layers, experts) == wanted[None]).all()
        parts = [torch.from_numpy(part) for part in np.array_split(ids, 3)]
        found = checked_declaration(parts, layers, experts)
    assert (found == np.stack([counted(part.numpy(), experts) for part in parts])).all()
    if wanted.any():
        assert (checked_declaration(wanted, layers, experts) == wanted[None]).all()


WRONG: list[tuple[Any, str]] = [
    (torch.tensor([[[0, 4], [0, 1]]]), "an id 4: give logical ids from 0 to 3"),
    (torch.tensor([[[0, -2], [0, 1]]]), "an id -2"),
    (torch.ones(5, 2, 3), "give [2, 4]"),
    (torch.ones(5, 3, 2, dtype=torch.int64), "give [2, 4]"),
    ([torch.ones(2, 4), torch.ones(2, 3)], "the declared load has shape (2, 3)"),
    ([np.zeros((2, 4)), np.zeros((2, 4))], "not all 0"),
    ([np.ones((2, 4)), -np.ones((2, 4))], "is -1.0, negative: give token counts"),
]


@pytest.mark.parametrize(("load", "said"), WRONG)
def test_what_is_neither_a_load_nor_experts_of_tokens_is_refused_in_a_line(load: Any, said: str) -> None:
    with pytest.raises(DeclaredLoadError) as refused:
        checked_declaration(load, 2, 4)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_token_may_choose_an_expert_twice() -> None:
    assert checked_declaration(torch.tensor([[[1, 1], [3, 0]]]), 2, 4).tolist() == [[[0, 2, 0, 0], [1, 0, 0, 1]]]
