"""An engine's file in this room answers to `Engine`; ``engines.py`` has the list of those who are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ...observe.run_folder import JobRecord
from ...placement import Placement
from .reading import Content, FormatError, LoadArray, expert_ids


@dataclass(frozen=True)
class ExpertMap:
    """An engine's physical-to-logical rows, before the number of ranks is known.

    Args:
        rows: integers [layers, slots], in any container.
        layers: the rows' layer numbers in the model, ascending, where the file gives them.
    """

    rows: Any
    layers: tuple[int, ...] | None = None

    def placement(self, num_ranks: int, dense_layers: int) -> Placement:
        """Return the map without its first ``dense_layers`` rows, in the free layout.

        Raises:
            FormatError, PlacementError: not a map, or not one for so many ranks.
        """
        rows = expert_ids(self.rows, "the map")
        if dense_layers and dense_layers >= len(rows):
            raise FormatError(f"{dense_layers} dense layers of {len(rows)}: none would be left")
        rows = rows[dense_layers:]
        return Placement(rows, int(rows.max(initial=-1)) + 1, num_ranks)


class Engine:
    """One engine's files."""

    name = ""
    numbers_dense_layers = False
    """Its layer numbers count the model's dense layers too; otherwise MoE layers only."""
    has_dense_rows = False
    """Its files have a row for each dense layer, too."""
    keeps_homes = False
    """Its placements say how many ranks they are for and which slots are homes, and may have empty replica slots."""
    placement_endings: tuple[str, ...] = ()
    load_endings: tuple[str, ...] = ()
    """Endings of the files that are written; none: no such file is."""
    load_names: ClassVar[Mapping[str, str]] = {}
    """By kind of file, the names under which its loads are found: for messages."""

    def placement(self, content: Content) -> Placement | ExpertMap | None:
        """Return the placement in a file; None: it holds none of this engine's."""
        return None

    def load(self, content: Content) -> JobRecord | None:
        """Return tokens per logical expert [L, E] or [T, L, E], unchecked; None: it holds no load of this engine's."""
        return None

    def save_placement(self, path: Path, placement: Placement, dense_layers: int) -> None:
        """Write a placement under one of ``placement_endings``; so many layers of the model come before its first."""
        raise NotImplementedError

    def save_load(self, path: Path, load: LoadArray, dense_layers: int) -> None:
        """Write tokens per expert [T, L, E], under one of ``load_endings``."""
        raise NotImplementedError
