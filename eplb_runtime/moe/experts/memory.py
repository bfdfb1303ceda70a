"""Memory of weights between phases: loops of reinforcement learning free it and load it again."""

from __future__ import annotations

from torch import Tensor

from .slices import has_memory, local


class WeightMemory:
    """Weights by name, with the number of elements that each has had on this rank."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[tuple[Tensor, ...], int]] = {}

    def add(self, name: str, *parts: Tensor) -> None:
        """Remember a weight, of one tensor or several, with its size as it is now."""
        self._weights[name] = parts, sum(local(part).numel() for part in parts)

    def forget(self, name: str) -> None:
        """Forget a weight, if it is known."""
        self._weights.pop(name, None)

    def name_of_freed(self) -> str:
        """Return the name of the first weight that has no storage now, or another number of elements; empty if all
        have. Between phases ``.data`` may be an empty tensor, which looks like a weight and would move as nothing."""
        for name, (parts, elements) in self._weights.items():
            if sum(local(part).numel() for part in parts) != elements or not all(map(has_memory, parts)):
                return name
        return ""

    def why_freed(self) -> str:
        """Return a line that names such a weight; empty if there is none."""
        name = self.name_of_freed()
        return f"{name}: its memory is freed or of another size: load it first" if name else ""
