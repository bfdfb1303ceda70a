"""Files by their endings, whoever wrote them. Nothing here unpickles objects or runs what a file says."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...utils.files import MIB, FileError, require_readable
from .arrays import require_few
from .errors import FormatError, first_line

MOST_TEXT_BYTES, MOST_BYTES = 128 * MIB, 4096 * MIB
"""Of JSON and YAML, whose objects take some twenty times that, and of other files."""
NUMPY_LACKS = {"BF16", "F8_E4M3", "F8_E5M2"}
"""Dtypes of safetensors that torch reads."""


def read_npz(path: Path) -> Mapping[str, Any]:
    """The arrays of a ``numpy.savez`` file by name, opened without pickles; an array is read when it is asked for.

    Raises:
        FileError: no such file, or too large; when an array is asked for: broken, or of objects.
    """
    require_readable(path, MOST_BYTES)
    try:
        opened = np.load(path, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy and zipfile raise ValueError, EOFError, BadZipFile, KeyError, ...
        raise _not_npz(error) from None
    if isinstance(opened, np.ndarray):
        raise FormatError("one bare array; save it with numpy.savez(file, load=counts)")
    return _NpzArrays(opened)


class _NpzArrays(Mapping[str, Any]):
    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __getitem__(self, name: str) -> Any:
        if name not in self._opened.files:
            raise KeyError(name)
        try:
            array = self._opened[name]
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise _not_npz(error) from None
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iuf":
            raise FormatError(f"not an .npz of plain numbers: {name} holds {getattr(array, 'dtype', 'bytes')}")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._opened.files)

    def __len__(self) -> int:
        return len(self._opened.files)


def _not_npz(error: BaseException) -> FormatError:
    return FormatError(f"not an .npz of plain numbers ({first_line(error)})")


def read_json(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        FileError: not JSON, or too large.
    """
    require_readable(path, MOST_TEXT_BYTES)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({first_line(error)})") from None


def read_yaml(path: Path) -> Any:
    """The first document of a YAML file without aliases, which let few bytes stand for any amount of data.

    Raises:
        FileError: not YAML, too large or with aliases; or PyYAML is missing.
    """
    try:
        import yaml
    except ImportError:
        raise FormatError("reading YAML needs PyYAML: pip install 'eplb-runtime[convert]'") from None

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise FormatError("YAML with aliases (*name) is not read: write the values out")
            return super().compose_node(parent, index)

    require_readable(path, MOST_TEXT_BYTES)
    try:
        loader = Loader(path.read_text(encoding="utf-8"))
        return loader.get_data() if loader.check_data() else None
    except FileError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"not YAML ({first_line(error)})") from None


def read_pt(path: Path) -> dict[str, Any]:
    """The dict in a ``torch.save`` file; every object that is no tensor and no plain value is refused.

    Raises:
        FileError: not such a file, or too large.
    """
    require_readable(path, MOST_BYTES)
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a refusal is one line
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, EOFError, KeyError, ... for bad files
        raise FormatError(f"not a torch file of tensors and plain values ({first_line(error)})") from None
    if not isinstance(content, dict):
        raise FormatError(f"holds a {type(content).__name__}; a dump holds a dict")
    return content


class SafetensorsArrays(Mapping[str, Any]):
    """The arrays of a safetensors file by name, read when they are asked for: of numpy, or of torch where numpy lacks
    the dtype. ``metadata``: the texts in its header.

    Raises:
        FileError: not such a file, or too large; when an array is asked for: of a dtype that is no number.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._path = path
        require_readable(path, MOST_BYTES)
        try:
            with safe_open(path, framework="numpy") as file:
                self._names: tuple[str, ...] = tuple(file.keys())
                self.metadata: dict[str, str] = dict(file.metadata() or {})
        except SafetensorError as error:
            raise FormatError(f"not a safetensors file ({first_line(error)})") from None

    def __getitem__(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name not in self._names:
            raise KeyError(name)
        try:
            with safe_open(self._path, framework="numpy") as file:
                entry = file.get_slice(name)
                dtype = entry.get_dtype()
                require_few(math.prod(entry.get_shape()), name)
                if dtype[0] in "IUF" and dtype not in NUMPY_LACKS and not dtype.startswith(("F8", "F4", "F6")):
                    return file.get_tensor(name)
            if dtype not in NUMPY_LACKS:
                raise FormatError(f"{name} holds {dtype}; it must hold integers or floats")
            with safe_open(self._path, framework="pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise FormatError(f"not a safetensors file ({first_line(error)})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
