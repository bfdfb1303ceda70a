"""The tournament gives what looking at all values gives."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_runtime.load.least_loaded import least_loaded, set_value, tournament


@pytest.mark.parametrize("count", [1, 2, 5, 64, 100])
def test_the_first_of_the_least_is_found_after_every_change(count: int) -> None:
    generator = np.random.default_rng(count)
    values = generator.integers(0, 9, count).astype(float)
    tree = tournament(values)
    for _ in range(500):
        expected = int(values.argmin()) if np.isfinite(values).any() else -1
        assert least_loaded(tree) == expected
        index = int(generator.integers(count))
        values[index] = np.inf if generator.random() < 0.3 else generator.integers(0, 9)
        set_value(tree, index, values[index])
