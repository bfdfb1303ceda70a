"""Load files: tokens per logical expert, window after window, as people and serving engines store them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...load import checked_load as plain_load
from ...load.series import NAME, holds_series, read_series
from ...observe.run_state import JobRecord
from ...utils.files import FileError, replacing, require_writable
from . import megatron, slime
from .reading import Content, about, names_in, open_content

LoadArray = NDArray[np.float64]
SAMPLE = "sample"
ENDINGS = (".npz",)
"""Of load files that are written."""
ENOUGH, FEW = 4, 0.25
"""Tokens for each expert with which all get some, as a rule, and the share of them that is too few."""
PARTS = {2: ("half", 0.02), 3: ("third", 0.0), 4: ("quarter", 0.0)}
"""Parts of all experts, and the share of a layer's tokens that is next to none of one."""
MOST_TOKENS = 2.0**53
"""Whole numbers stay below it: larger ones have lost digits, and their sums lose more."""


def read_load(path: str | Path, dense_layers: int = 0) -> LoadArray:
    """Return the load that `read_record` reads: float64 ``[T, L, E]``, tokens; T = 1 for a file of one window."""
    return np.asarray(read_record(path, dense_layers).load)


def read_record(path: str | Path, dense_layers: int = 0) -> JobRecord:
    """Read tokens per logical expert from a file or a folder, with what it says of the job.

    Understood, by the name's ending and then by content:

    * ``.npz`` with an array ``load`` of shape [L, E] or [T, L, E], oldest window first;
    * ``.json``: ``{"load": ...}``, the same shapes as nested lists;
    * ``.pt`` or ``.json`` with ``logical_count``: dumps of SGLang's expert distribution recorder in mode ``stat``;
    * a folder in which a run or ``eplb.record`` has recorded its load, see `load.series`;
    * a folder that Megatron-LM's ``--moe-routing-trace-path`` has filled, or one rank's file of it, see `megatron`;
    * slime's ``--save-debug-rollout-data``, a file or a folder of them, one window a rollout, see `slime`;
    * the word ``sample``, where nothing has this name: a series that comes along, to try things out. It was drawn, not
      measured: 60 windows of 4 layers of 64 experts, 16,384 choices a layer, over three domains of 20 windows.

    Args:
        dense_layers: leading layers without experts that the file counts too (SGLang numbers all layers of the
            model, 3 of DeepSeek-V3's 61 are dense); they are left out.

    Raises:
        FileError: missing, of another format, or with values that are no token counts.
    """
    path = resolved_path(path)
    with about(path):
        content = open_content(path)
        found = find_load(content)
        if found is None:
            mend = "" if content.kind == "directory" else ': store tokens per expert as "load"'
            raise FileError(held_in(content) + mend)
        return replace(found[1], load=checked_load(found[1].load, dense_layers))


def resolved_path(path: str | Path) -> Path:
    """Return the path; for ``sample``, if no file has this name, that of the sample load of this package."""
    path = Path(path)
    return Path(__file__).with_name("sample.npz") if path == Path(SAMPLE) and not path.exists() else path


def find_load(content: Content) -> tuple[str, JobRecord] | None:
    """Return the name of the format and the load of a file, unchecked. None: the file holds no load."""
    found = ((name, read(content)) for name, read in READERS.items())
    return next(((name, record) for name, record in found if record is not None), None)


def held_in(content: Content) -> str:
    """Return a phrase for messages: what the file or folder holds instead of a load or placement."""
    if content.kind == "directory":
        if (content.path / "load").is_dir() or content.path.name == "load":
            return "its load/ is of an earlier release: in it, awk 1 load/*.jsonl > load.jsonl"
        return "it is no run's folder, and has no router_trace_rank*.jsonl of Megatron and no *.pt of slime"
    held = names_in(content.value) if isinstance(content.value, Mapping) else f"a {type(content.value).__name__}"
    return f"it holds {held}"


def write_load(path: str | Path, load: ArrayLike) -> None:
    """Write tokens per logical expert, [L, E] or [T, L, E], as ``.npz``; a file at ``path`` is replaced.

    Raises:
        FileError: another ending, or values that are no token counts.
    """
    require_writable(path := Path(path), ENDINGS)
    counts = checked_load(load, 0)
    array = counts.astype(np.int64) if np.array_equal(counts, np.floor(counts)) else counts
    with replacing(path) as file:
        np.savez_compressed(file, load=array)


def looks_partial(load: LoadArray) -> str:
    """Return a sentence if a [T, L, E] load looks like the counts of some ranks alone, else "". It does where few
    experts of each layer and window have tokens; or where a half, third or quarter of the experts, side by side or
    dealt out in turn, has next to none. Layers and windows with few tokens are ignored."""
    rows_NE, experts = load[load.sum(axis=2) >= ENOUGH * load.shape[2]], load.shape[2]
    most = int((rows_NE > 0).sum(axis=1).max(initial=0))
    if 0 < most <= experts * FEW:
        return f"at most {most} of {experts} experts of a layer have tokens in a window: one rank's counts?"
    rows_NE = rows_NE / rows_NE.sum(axis=1, keepdims=True)
    for parts, (name, limit) in PARTS.items():
        if experts % parts == 0 and experts >= 2 * parts and most:
            beside_NP = rows_NE.reshape(-1, parts, experts // parts).sum(axis=2)
            in_turn_NP = rows_NE.reshape(-1, experts // parts, parts).sum(axis=1)
            if min(beside_NP.max(axis=0).min(), in_turn_NP.max(axis=0).min()) <= limit:
                return f"a {name} of {experts} experts has next to no tokens: counts of some ranks seem to be missing."
    return ""


def checked_load(values: ArrayLike, dense_layers: int) -> LoadArray:
    """Return token counts as float64 [T, L, E] without the first ``dense_layers`` layers.

    Raises:
        FileError: values that are no token counts, or another shape.
    """
    load = plain_load(values, "load", FileError)
    if not 0 <= dense_layers < load.shape[1]:
        raise FileError(f"{dense_layers} dense layers of {load.shape[1]}: none would be left")
    if load.max() >= MOST_TOKENS:
        raise FileError(f"load goes up to {load.max():.3g}: token counts are from 0 to 2**53")
    return np.ascontiguousarray(load[:, dense_layers:])


# -- readers: the load in a file, unchecked; None: it holds none of the kind --------------------------------------


def _own(content: Content) -> JobRecord | None:
    folder = content.path.parent if content.path.name == NAME else content.path
    if content.kind in ("directory", "jsonl") and holds_series(folder):
        return JobRecord(*read_series(folder))
    return JobRecord(content.value["load"]) if content.kind != "pt" and content.holds("load") else None


def _sglang(content: Content) -> JobRecord | None:
    """Return ``logical_count`` [passes, L, E], already summed over ranks.

    It is a ring buffer: passes that were never filled are zero, and left out here; once the ring has turned, its first
    row is not its oldest. Checked against SGLang's ``srt/eplb/expert_distribution.py``.
    """
    if content.holds("records", "last_physical_to_logical_map"):
        raise FileError("it holds single passes: record with --expert-distribution-recorder-mode stat")
    if not content.holds("logical_count"):
        return None
    counts = plain_load(content.value["logical_count"], "logical_count", FileError)
    filled = counts.any(axis=(1, 2))
    return JobRecord(counts[filled] if filled.any() else counts[:1])


READERS: dict[str, Callable[[Content], JobRecord | None]] = {
    "eplb-runtime": _own,
    "megatron": megatron.load_in,
    "slime": slime.load_in,
    "sglang": _sglang,
}
"""By the name of the format, in the order in which they are asked."""
