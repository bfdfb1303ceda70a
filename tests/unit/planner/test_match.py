"""Renaming ranks: pairs that share nothing need not be looked at, and change nothing."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_runtime.planner.search.settle import _match


def looking_at_all(worth: np.ndarray) -> list[int]:
    """Dearest pairs first, the rest in order; then exchanges between any two rows while one gains."""
    size = len(worth)
    name = [-1] * size
    for pair in np.argsort(-worth.ravel(), kind="stable").tolist():
        row, column = divmod(pair, size)
        if worth[row, column] > 0 and name[row] < 0 and column not in name:
            name[row] = column
    unnamed = iter(sorted(set(range(size)) - set(name)))
    name = [next(unnamed) if column < 0 else column for column in name]
    better = True
    while better:
        better = False
        for row in range(size):
            for other in range(row):
                now = worth[row, name[row]] + worth[other, name[other]]
                if worth[row, name[other]] + worth[other, name[row]] > now:
                    name[row], name[other] = name[other], name[row]
                    better = True
    return name


@pytest.mark.parametrize("size", [1, 2, 7, 24])
@pytest.mark.parametrize("filled", [0.0, 0.1, 0.5, 1.0])
def test_exchanges_are_those_of_looking_at_all_pairs(size: int, filled: float) -> None:
    generator = np.random.default_rng([size, int(10 * filled)])
    for _ in range(20):
        worth = generator.integers(1, 6, (size, size)) * (generator.random((size, size)) < filled).astype(float)
        assert _match(worth).tolist() == looking_at_all(worth)
