"""Files by their endings, and expert ids out of them. Nothing here unpickles objects or runs what a file says."""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOENT
from os import strerror
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.files import MIB, FileError, require_readable
from ...utils.text import one_line

MOST_EXPERTS = 1 << 16
"""Experts of a layer: larger ids are none of it."""
MOST_TEXT_BYTES, MOST_BYTES = 128 * MIB, 4096 * MIB
"""Of JSON, whose objects take some twenty times that, and of other files."""


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Turn each OSError of the block into a FileError, and begin the message of each FileError with ``path``."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except FileError as error:
        raise type(error)(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def expert_ids(values: Any, name: str, shape: tuple[str, ...] = ("layers", "slots")) -> NDArray[np.integer]:
    """Return nested lists, an array or a tensor as an array of whole numbers; their range is not checked. FileError:
    they are none, or have not as many dimensions as ``shape`` has names; the message begins with ``name``."""
    wanted = f"must be [{', '.join(shape)}] of expert ids"
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError, RuntimeError):
        raise FileError(f"{name} is ragged, or no plain array; it {wanted}") from None
    if array.dtype.kind not in "iu" or array.ndim != len(shape):
        raise FileError(f"{name} {wanted}; it is {list(array.shape)} of {array.dtype}")
    if array.size and array.max() > np.iinfo(np.int64).max:
        raise FileError(f"{name} holds {array.max()}, which is no id")
    return array


def names_in(container: Iterable[Any]) -> str:
    """Return up to six names in quotes, for messages; more are shown by "...". No names: "nothing"."""
    found = list(container)
    shown = [repr(str(name)[:80]) for name in found[:6]]
    return ", ".join(shown + ["..."] * (len(found) > 6)) or "nothing"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, without colours, cut to 160 characters. If torch
    refused to unpickle a class, the line names that class instead."""
    if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):  # torch's, of a class that it does not make
        return f"it holds a {refused[1]}"
    return re.sub(r"\x1b\[[\d;]*m", "", one_line(error))[:160]


@dataclass(frozen=True)
class Content:
    """A file or folder before any engine is asked whose it is.

    Args:
        kind: the ending without its dot, or ``"directory"``.
        value: of ``npz`` arrays by name, None for those that are no ``load``; of a directory and of ``jsonl`` nothing.
    """

    path: Path
    kind: str
    value: Any = None

    def holds(self, *names: str) -> bool:
        """Return whether ``value`` is a mapping with all these names."""
        return isinstance(self.value, Mapping) and all(name in self.value for name in names)


def open_content(path: Path) -> Content:
    """Return what a file holds, read by its ending. Of a directory and of ``.jsonl`` only the kind is returned.

    Raises:
        FileError: an unknown ending, not what the ending says, or too large to be read.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return Content(path, "directory")
    if not path.exists():
        raise FileNotFoundError(ENOENT, strerror(ENOENT), str(path))
    if path.suffix not in READERS:
        endings = ", ".join(READERS)
        raise FileError(f"cannot tell what kind of file this is by its ending; give {endings}")
    read, what, most_bytes = READERS[path.suffix]
    if what:
        require_readable(path, most_bytes)
    try:
        return Content(path, path.suffix[1:], read(path))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # json, numpy, zipfile and torch raise many kinds for bad files
        raise FileError(f"not {what} ({first_line(error)})") from None


def _read_pt(path: Path) -> Any:
    import torch

    with warnings.catch_warnings(), torch.serialization.safe_globals(_arrays()):
        warnings.simplefilter("ignore")  # a refusal is one line
        return torch.load(path, map_location="cpu", weights_only=True)


def _arrays() -> list[Any]:
    """Return what a pickled array of whole numbers names, for torch to allow."""
    rebuild = np.empty(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((rebuild, name) for name in names), np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in "bBhHiIlL")]


def _read_npz(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as opened:
        return {name: opened[name] if name == "load" else None for name in opened.files}


READERS: dict[str, tuple[Callable[[Path], Any], str, int]] = {
    ".npz": (_read_npz, "an .npz of plain numbers", MOST_BYTES),
    ".json": (lambda path: json.loads(path.read_text(encoding="utf-8")), "JSON", MOST_TEXT_BYTES),
    ".pt": (_read_pt, "a torch file of tensors and plain values", MOST_BYTES),
    ".jsonl": (lambda path: None, "", 0),
}
"""By the ending of the name: how it is read, what it is, and the most bytes of it; of ``.jsonl`` the lines are read by
who knows them."""
