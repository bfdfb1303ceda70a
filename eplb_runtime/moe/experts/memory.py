"""Memory of weights between phases: loops of reinforcement learning free it and load it again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .slices import has_memory, local


class WeightMemory:
    """Weights by name, with the number of elements that each has had on this rank."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[tuple[Tensor, ...], int]] = {}

    def add(self, name: str, *parts: Tensor) -> None:
        """Remember a weight, of one tensor or several, with its size as it is now."""
        self._weights[name] = parts, elements_of(parts)

    def forget(self, name: str) -> None:
        """Forget a weight, if it is known."""
        self._weights.pop(name, None)

    def name_of_freed(self) -> str:
        """Return the name of the first weight that has no memory now, or another size; empty if all have."""
        return next((name for name, (parts, elements) in self._weights.items() if is_freed(parts, elements)), "")

    def why_freed(self) -> str:
        """Return a line that names such a weight; empty if there is none."""
        return line_of(self.name_of_freed())


def elements_of(parts: Sequence[Tensor]) -> int:
    """Number of elements on this rank."""
    return sum(local(part).numel() for part in parts)


def is_freed(parts: Sequence[Tensor], elements: int) -> bool:
    """Return whether a weight of so many elements has no storage now, or other elements: its ``.data`` may be an empty
    tensor between phases, which looks like a weight and would move as nothing."""
    return elements_of(parts) != elements or not all(map(has_memory, parts))


def line_of(name: str) -> str:
    """Return the line about a weight that `is_freed`; empty without a name."""
    return f"{name}: its memory is freed or of another size: load it first" if name else ""
