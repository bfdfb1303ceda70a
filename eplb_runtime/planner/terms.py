"""On what terms a plan is made: the arguments of ``plan`` besides sizes and what stands now, in one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from numpy.typing import ArrayLike

from .cost import CostModel

Gate = Literal["payoff", "always", "off"]


class Terms(TypedDict, total=False):
    """The further arguments of ``plan``, all by name; what each means, and what it is when left out, stands there."""

    groups: int
    max_moves: int | None
    max_bytes: int | None
    cost: CostModel | None
    gate: Gate
    forecast: str
    declared: ArrayLike | None
    rank_speed: ArrayLike | None
    sources: ArrayLike | None
    trust: float
    deadline: float | None


@dataclass(frozen=True)
class Settled:
    """``Terms`` with what was left out."""

    groups: int = 1
    max_moves: int | None = None
    max_bytes: int | None = None
    cost: CostModel | None = None
    gate: Gate = "always"
    forecast: str = "auto"
    declared: ArrayLike | None = None
    rank_speed: ArrayLike | None = None
    sources: ArrayLike | None = None
    trust: float = 1.0
    deadline: float | None = None
