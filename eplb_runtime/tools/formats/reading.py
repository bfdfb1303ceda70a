"""Files by their endings, and numbers out of them. Nothing here unpickles objects or runs what a file says."""

from __future__ import annotations

import json
import re
import sys
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

from ...placement import PlacementError
from ...utils.files import MIB, FileError, require_readable
from ...utils.text import one_line

LoadArray = NDArray[np.float64]

MOST_EXPERTS = 1 << 16
"""Experts of a layer: larger ids are none of it."""
MOST_TEXT_BYTES, MOST_BYTES = 128 * MIB, 4096 * MIB
"""Of JSON, whose objects take some twenty times that, and of other files."""


class FormatError(FileError):
    """A file of others that cannot be used, or an argument that does not fit it: one line with the mend."""


@contextmanager
def about(path: Path, reading: bool = True) -> Iterator[None]:
    """Name this file in each error of the block; of ``OSError`` where it is read."""
    try:
        yield
    except OSError as error:
        if not reading:
            raise
        raise FormatError(f"{path}: cannot be read: {error.strerror or error}") from None
    except PlacementError as error:
        raise PlacementError(f"{path}: {error}") from None
    except FileError as error:
        raise FormatError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


# -- numbers ---------------------------------------------------------------------------------------------------------


def numbers(values: Any, name: str) -> LoadArray:
    """Return nested lists, a numpy array or a torch tensor as float64, of any shape; ``name`` is for refusals."""
    return _plain_array(values, name, "iuf", "hold numbers").astype(np.float64)


def expert_ids(values: Any, name: str, shape: tuple[str, ...] = ("layers", "slots")) -> NDArray[np.integer]:
    """Return values as whole numbers of any kind, any ids; ``shape`` names the dimensions that they must have."""
    wanted = f"be [{', '.join(shape)}] of expert ids"
    array = _plain_array(values, name, "iu", wanted)
    if array.ndim != len(shape):
        raise FormatError(f"{name} must {wanted}")
    if array.size and array.max() > np.iinfo(np.int64).max:
        raise FormatError(f"{name} holds {array.max()}, which is no id")
    return array


def names_in(container: Iterable[Any]) -> str:
    """Return the first few names of a mapping, for messages."""
    found = list(container)
    shown = [repr(str(name)[:80]) for name in found[:6]]
    return ", ".join(shown + ["..."] * (len(found) > 6)) or "nothing"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, short enough to stand in ours."""
    if refused := re.search(r"GLOBAL ([\w.]+)", str(error)):  # torch's, of a class that it does not make
        return f"it holds a {refused[1]}"
    return re.sub(r"\x1b\[[\d;]*m", "", one_line(error))[:160]


def _plain_array(values: Any, name: str, kinds: str, wanted: str) -> NDArray[Any]:
    """Return values as an array of one of numpy's ``kinds`` of dtype; ``wanted`` ends the sentence of a refusal."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        try:
            plain = values.detach().cpu()
            # numpy lacks bfloat16 and the 8-bit floats
            values = (plain.to(torch.float64) if plain.is_floating_point() else plain).numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise FormatError(f"{name} is a tensor without plain values ({first_line(error)}): save another") from None
    elif not isinstance(values, np.ndarray | list | tuple):
        raise FormatError(f"{name} is a {type(values).__name__}; it must {wanted}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        raise FormatError(f"{name} is ragged: every window and layer needs the same number of entries") from None
    if array.dtype.kind not in kinds:
        held = "numbers beyond 64 bits" if array.dtype.kind == "O" else array.dtype
        raise FormatError(f"{name} holds {held}; it must {wanted}")
    return array


# -- files -----------------------------------------------------------------------------------------------------------


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
        """Return whether it is a mapping with all these names."""
        return isinstance(self.value, Mapping) and all(name in self.value for name in names)


def open_content(path: Path) -> Content:
    """Read a file, or note that it is a directory.

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
        raise FormatError(f"cannot tell what kind of file this is by its ending; give {endings}")
    return Content(path, path.suffix[1:], READERS[path.suffix](path))


def _read_json(path: Path) -> Any:
    require_readable(path, MOST_TEXT_BYTES)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({first_line(error)})") from None


def read_pt(path: Path) -> dict[str, Any]:
    """Return the dict in a ``torch.save`` file; an object that is no tensor and no plain value is refused."""
    require_readable(path, MOST_BYTES)
    import torch

    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(_arrays()):
            warnings.simplefilter("ignore")  # a refusal is one line
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, KeyError, ... for bad files
        raise FormatError(f"not a torch file of tensors and plain values ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise FormatError(f"holds a {type(content).__name__}; a dump holds a dict")
    return content


def _arrays() -> list[Any]:
    """Return what a pickled array of whole numbers names, for torch to allow."""
    rebuild = np.empty(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    return [*((rebuild, name) for name in names), np.ndarray, np.dtype, *(type(np.dtype(kind)) for kind in "bBhHiIlL")]


def read_named_pt(path: Path) -> dict[str, Any]:
    """Read one of several ``torch.save`` files in a folder; a refusal names it."""
    try:
        return read_pt(path)
    except FileError as error:
        raise FormatError(f"{path.name}: {error}") from None


def _read_npz(path: Path) -> dict[str, Any]:
    require_readable(path, MOST_BYTES)
    try:
        opened = np.load(path, allow_pickle=False)
        with opened:
            return {name: opened[name] if name == "load" else None for name in opened.files}
    except (OSError, MemoryError):
        raise
    except Exception as error:  # numpy and zipfile raise ValueError, EOFError, BadZipFile, KeyError, ...
        raise FormatError(f"not an .npz of plain numbers ({first_line(error)})") from None


READERS: dict[str, Callable[[Path], Any]] = {
    ".npz": _read_npz,
    ".json": _read_json,
    ".pt": read_pt,
    ".jsonl": lambda path: None,
}
"""By the ending of the name."""
