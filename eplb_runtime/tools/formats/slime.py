"""slime's rollout data: the experts that the engine has chosen for each token, which the training step replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.files import FileError
from .arrays import MOST_EXPERTS, LoadArray, expert_ids, require_few
from .base import Engine
from .content import Content
from .errors import FormatError
from .readers import read_pt

FIELDS = ("rollout_id", "samples")
ROUTING = "rollout_routed_experts"


class Slime(Engine):
    name = "slime"
    numbers_dense_layers = True
    has_dense_rows = True

    def load(self, content: Content) -> LoadArray | None:
        """A file that ``--save-debug-rollout-data`` has written, or a folder of them; see `replayed_load`."""
        if content.kind == "pt":
            return replayed_load([content.value]) if content.holds(*FIELDS) else None
        files = rollout_files(content.path) if content.kind == "directory" else []
        first = _read(files[0]) if files else {}
        if not all(name in first for name in FIELDS):
            return None
        return replayed_load(chain([first], map(_read, files[1:])))


def rollout_files(directory: Path) -> list[Path]:
    """Files whose names are numbers, in their order: ``--save-debug-rollout-data FOLDER/{rollout_id}.pt``. Evaluations
    (``eval_N.pt``) are left out."""
    numbered = {int(path.stem): path for path in directory.glob("*.pt") if path.stem.isdecimal()}
    return [numbered[number] for number in sorted(numbered)]


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_pt(path)
    except FileError as error:
        raise FormatError(f"{path.name}: {error}") from None


def replayed_load(rollouts: Iterable[Mapping[str, Any]]) -> LoadArray:
    """Tokens per expert by rollout and layer of the model.

    Checked against slime's ``observability/rollout_data_utils.py`` (``save_debug_rollout_data``) and
    ``utils/types.py``: a sample has ``rollout_routed_experts`` ``[tokens, layers, topk]``, a row for each layer of the
    model. Dense layers have expert 0 in every place, and no load here. The number of experts is one more than the
    largest id.

    Returns:
        float64 ``[T, L, E]``, one window a rollout.

    Raises:
        FormatError: no sample, one without routing, or of other layers than the first.
    """
    windows: list[NDArray[np.int64]] = []
    for rollout in rollouts:
        if not all(name in rollout for name in FIELDS):
            raise FormatError("the files in this directory are of different kinds: give slime's rollout data alone")
        counts = np.zeros((0, 0), np.int64)
        for number, sample in enumerate(rollout["samples"]):
            where = f"rollout {rollout['rollout_id']}, sample {number}"
            chosen = sample.get(ROUTING) if isinstance(sample, Mapping) else None
            if chosen is None:
                raise FormatError(f"{where} has no {ROUTING}: start slime with --use-rollout-routing-replay")
            of_sample = _counted(expert_ids(chosen, f"{where}: {ROUTING}", ("tokens", "layers", "topk")), where)
            if counts.size and len(counts) != len(of_sample):
                raise FormatError(f"{where} has {len(of_sample)} layers, those before have {len(counts)}")
            counts = _added(counts, of_sample)
        if not counts.size:
            raise FormatError(f"rollout {rollout['rollout_id']} has no samples")
        if windows and len(windows[0]) != len(counts):
            raise FormatError(f"rollout {rollout['rollout_id']} has {len(counts)} layers, the first {len(windows[0])}")
        windows.append(counts)
        require_few(len(windows) * counts.size, "the rollouts")
    experts = max((window.shape[1] for window in windows), default=0)
    return np.stack([_added(np.zeros((len(window), experts), np.int64), window) for window in windows]).astype(float)


def _counted(ids_TLK: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """``[L, E]``, E one more than the largest id."""
    layers = ids_TLK.shape[1]
    largest = int(ids_TLK.max(initial=0))
    if not 0 <= ids_TLK.min(initial=0) <= largest < MOST_EXPERTS:
        raise FormatError(f"{where}: experts {ids_TLK.min(initial=0)} to {largest} in {ROUTING}")
    counts = np.stack([np.bincount(ids_TLK[:, layer].reshape(-1), minlength=largest + 1) for layer in range(layers)])
    if ids_TLK.shape[2] > 1:
        counts[~ids_TLK.any(axis=(0, 2))] = 0  # no router gives one expert twice to a token: a dense layer
    return counts


def _added(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sum of two, the smaller one with zeros behind."""
    layers, experts = np.maximum(one.shape, other.shape)
    total = np.zeros((layers, experts), np.int64)
    for counts in (one, other):
        total[: counts.shape[0], : counts.shape[1]] += counts
    return total
