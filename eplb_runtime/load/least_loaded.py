"""The least of many values that change one at a time: a tournament, compiled; among equals the first wins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..utils.jit import jit


@jit(error_model="numpy")
def tournament(value_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 ``[2 M]`` for M >= N, a power of two: the values at the end, at each place before the lesser of two."""
    leaves = 1
    while leaves < value_N.size:
        leaves *= 2
    tree = np.full(2 * leaves, np.inf)
    tree[leaves : leaves + value_N.size] = value_N
    for place in range(leaves - 1, 0, -1):
        tree[place] = min(tree[2 * place], tree[2 * place + 1])
    return tree


@jit(error_model="numpy")
def set_value(tree: NDArray[np.float64], index: int, value: float) -> None:
    """Change one value; infinite: it takes no part."""
    place = tree.size // 2 + index
    tree[place] = value
    while place > 1:
        place //= 2
        least = min(tree[2 * place], tree[2 * place + 1])
        if tree[place] == least:
            break
        tree[place] = least


@jit(error_model="numpy")
def least_loaded(tree: NDArray[np.float64]) -> int:
    """The index of the least value, the first of several; -1 where all are infinite."""
    if tree[1] == np.inf:
        return -1
    place, leaves = 1, tree.size // 2
    while place < leaves:
        place *= 2
        if tree[place] > tree[place + 1]:
            place += 1
    return place - leaves
