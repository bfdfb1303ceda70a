"""What an engine's file in this room answers; ``engines.py`` has the list of those who are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...placement import Placement
from .arrays import LoadArray, expert_ids
from .content import Content
from .errors import ConvertError


@dataclass(frozen=True)
class ExpertMap:
    """An engine's physical-to-logical rows, before the number of ranks is known.

    Args:
        rows: integers [layers, slots], in any container.
        num_ranks: R, where the file says it.
        num_experts: E, where the file says it; None: the largest id that stands somewhere, plus 1.
        layers: the rows' layer numbers in the model, ascending, where the file gives them.
    """

    rows: Any
    num_ranks: int | None = None
    num_experts: int | None = None
    layers: tuple[int, ...] | None = None

    def placement(self, num_ranks: int, dense_layers: int) -> Placement:
        """The map without its first ``dense_layers`` rows, as a ``free`` placement.

        Raises:
            ConvertError, PlacementError: not a map, or not one for so many ranks.
        """
        if self.num_ranks not in (None, num_ranks):
            raise ConvertError(f"the map is for {self.num_ranks} ranks, not {num_ranks}")
        rows = expert_ids(self.rows, "the map")
        if dense_layers and dense_layers >= len(rows):
            raise ConvertError(f"{dense_layers} dense layers of {len(rows)}: none would be left")
        rows = rows[dense_layers:]
        experts = int(rows.max(initial=-1)) + 1 if self.num_experts is None else self.num_experts
        return Placement(rows, experts, num_ranks)


class Engine:
    """One engine's files."""

    name = ""
    numbers_dense_layers = False
    """Its layer numbers count the model's dense layers too; otherwise MoE layers only."""
    has_dense_rows = False
    """Its files have a row for each dense layer, too."""
    needs_ranks = False
    """Its placements say how many ranks they are for."""
    keeps_homes = False
    """Its placements say which slots are homes, and may have replica slots without an expert."""
    placement_endings: tuple[str, ...] = ()
    load_endings: tuple[str, ...] = ()
    """Endings of the files that are written; none: no such file is."""
    load_names: ClassVar[Mapping[str, str]] = {}
    """By kind of file, the names under which its loads stand: for messages."""

    def placement(self, content: Content) -> Placement | ExpertMap | None:
        """The placement in a file; None: this is no placement of ours."""
        return None

    def load(self, content: Content) -> Any | None:
        """Tokens per logical expert [L, E] or [T, L, E]; None: this is no load of ours."""
        return None

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        """Write a placement under one of ``placement_endings``; so many layers of the model come before its first."""
        raise NotImplementedError

    def save_load(self, path: Path, load: LoadArray, dense_layers: int) -> None:
        """Write tokens per expert [T, L, E], under one of ``load_endings``."""
        raise NotImplementedError
