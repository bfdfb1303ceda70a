"""slime's rollout data: the experts that the engine has chosen for each token, which the training step replays."""

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...load.series import RecordedJob
from ...observe.run_state import JobRecord
from ...utils.files import FileError
from .reading import MOST_EXPERTS, Content, about, expert_ids, open_content

FIELDS = ("rollout_id", "samples")
ROUTING = "rollout_routed_experts"


def load_in(content: Content) -> JobRecord | None:
    """Return the load of a file that ``--save-debug-rollout-data FOLDER/{rollout_id}.pt`` has written, or of a folder
    of them, without evaluations (``eval_N.pt``): one window a rollout. None: there is no such file.

    Checked against slime's ``observability/rollout_data_utils.py`` (``save_debug_rollout_data``) and
    ``utils/types.py``: a sample has ``rollout_routed_experts`` ``[tokens, layers, topk]``. L is all layers of the
    model: dense ones, with expert 0 in every place, are zeros here (for top-1 not told, and so counted). E: the largest
    id + 1. The layers take no replicas. FileError: samples have no routing, or do not fit together."""
    files = iter([content])
    if content.kind == "directory":  # one after the other, in the order of their numbers
        numbered = {int(path.stem): path for path in content.path.glob("*.pt") if path.stem.isdecimal()}
        files = map(_read, (numbered[number] for number in sorted(numbered)))
    first = next(files, None)
    if first is None or first.kind != "pt" or not first.holds(*FIELDS):
        return None
    load = _replayed(chain([first], files))
    return JobRecord(load, (1,) * len(load), RecordedJob(takes_no_replicas=1))


def _read(path: Path) -> Content:
    with about(Path(path.name)):
        return open_content(path)


def _replayed(files: Iterable[Content]) -> NDArray[np.int64]:
    """Return int64 ``[T, L, E]``, tokens per expert by rollout and layer of the model."""
    windows: list[NDArray[np.int64]] = []
    for file in files:
        if not file.holds(*FIELDS) or not isinstance(file.value["samples"], list):
            have = "the files in this directory are of different kinds, or samples are no list"
            raise FileError(f"{have}: give slime's rollout data alone")
        rollout, counts = file.value, np.zeros((0, 0), np.int64)
        for number, sample in enumerate(rollout["samples"]):
            where = f"rollout {rollout['rollout_id']}, sample {number}"
            chosen = sample.get(ROUTING) if isinstance(sample, Mapping) else None
            if chosen is None:
                raise FileError(f"{where} has no {ROUTING}: start slime with --use-rollout-routing-replay")
            ids_TLK = expert_ids(chosen, f"{where}: {ROUTING}", ("tokens", "layers", "topk"))
            if hasattr(sample.get("tokens"), "__len__") and len(ids_TLK) != len(sample["tokens"]) - 1:
                have = f"{len(ids_TLK)} rows of {ROUTING} and {len(sample['tokens'])} tokens"
                raise FileError(f"{where} has {have}: a row for each token but the last is expected")
            of_sample = _counted(ids_TLK, where)
            if counts.size and len(counts) != len(of_sample):
                raise FileError(f"{where} has {len(of_sample)} layers, those before have {len(counts)}")
            counts = _added(counts, of_sample)
        if not counts.size:
            raise FileError(f"rollout {rollout['rollout_id']} has no samples")
        if windows and len(windows[0]) != len(counts):
            raise FileError(f"rollout {rollout['rollout_id']} has {len(counts)} layers, the first {len(windows[0])}")
        windows.append(counts)
    experts = max(window.shape[1] for window in windows)
    return np.stack([_added(np.zeros((1, experts), np.int64), one) for one in windows])


def _counted(ids_TLK: NDArray[np.integer], where: str) -> NDArray[np.int64]:
    """Return ``[L, E]``, E one more than the largest id."""
    least, largest = int(ids_TLK.min(initial=0)), int(ids_TLK.max(initial=0))
    if not 0 <= least <= largest < MOST_EXPERTS:
        raise FileError(f"{where}: experts {least} to {largest} in {ROUTING}")
    of_layers = (layer.reshape(-1).astype(np.int64) for layer in ids_TLK.swapaxes(0, 1))
    counts = np.array([np.bincount(ids, minlength=largest + 1) for ids in of_layers], np.int64)
    counts = counts.reshape(-1, largest + 1)  # there may be no layers
    if ids_TLK.shape[2] > 1:
        counts[~ids_TLK.any(axis=(0, 2))] = 0  # no router gives one expert twice to a token: a dense layer
    return counts


def _added(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of two, the smaller one with zeros behind."""
    layers, experts = np.maximum(one.shape, other.shape)
    total = np.zeros((layers, experts), np.int64)
    for counts in (one, other):
        total[: counts.shape[0], : counts.shape[1]] += counts
    return total
