"""Placement files: fields of a placement as JSON or safetensors; ``placement.py`` knows which of them fit together."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .files import MIB, FileError, require_readable, write_file

FILE_FORMAT = "eplb-runtime-placement"
FILE_VERSION = 1
ENDINGS = (".json", ".safetensors")
MOST_BYTES = 256 * MIB
"""No placement file is larger: 100 layers of 10,000 slots take 6 MiB as JSON."""

NUMBERS = ("layers", "experts", "ranks", "slots_per_rank", "epoch")
ARRAYS = ("physical_to_logical", "home")


def to_json(fields: Mapping[str, Any]) -> str:
    """``fields``: every one of NUMBERS and ARRAYS; ``home`` may be None."""
    arrays = {name: None if fields[name] is None else fields[name].tolist() for name in ARRAYS}
    return json.dumps({"format": FILE_FORMAT, "version": FILE_VERSION, **fields, **arrays})


def from_json(text: str) -> dict[str, Any]:
    """Return the fields of what ``to_json`` made."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"not a JSON placement: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FILE_FORMAT:
        raise FileError(f'not a placement file: its "format" is not "{FILE_FORMAT}"')
    return fields


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Write ``.json`` or ``.safetensors``, by the file's ending; see :func:`utils.files.replacing`."""
    if path.suffix not in ENDINGS:
        raise FileError(f"a placement is written as {' or '.join(ENDINGS)}")
    write_file(path, to_json(fields) if path.suffix == ".json" else _to_safetensors(fields))


def read(path: Path) -> dict[str, Any]:
    """Return the fields of a file, unchecked."""
    require_readable(path, MOST_BYTES)
    if path.suffix == ".safetensors":
        return _from_safetensors(path)
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise FileError("not a text file; a placement is .json or .safetensors") from None


def checked(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with NUMBERS as ints, which may be texts, and ARRAYS of integers; ``home`` may be None."""
    try:
        version = _whole_number(fields["version"])
        if version != FILE_VERSION:
            raise FileError(f"version {version} of the placement format; this release reads {FILE_VERSION}")
        known = {name: _whole_number(fields[name]) for name in NUMBERS}
        arrays = {name: fields[name] for name in ARRAYS}
    except KeyError as error:
        raise FileError(f"the field {error} is missing") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"a field has the wrong type: {error}") from None
    for name, values in arrays.items():
        if not (values is None and name == "home") and not _holds_integers(values):
            raise FileError(f"{name} must hold integers, [layers, slots] or [layers, experts] of them")
    return {**known, **arrays}


def _to_safetensors(fields: Mapping[str, Any]) -> bytes:
    from safetensors.numpy import save

    arrays = {name: np.array(fields[name]) for name in ARRAYS if fields[name] is not None}
    scalars = {"format": FILE_FORMAT, "version": FILE_VERSION, **{name: fields[name] for name in NUMBERS}}
    return bytes(save(arrays, metadata={key: str(value) for key, value in scalars.items()}))


def _from_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            fields: dict[str, Any] = dict(file.metadata() or {})
            if fields.get("format") != FILE_FORMAT:
                raise FileError(f'its "format" is not "{FILE_FORMAT}"')
            fields["home"] = None
            for name in set(file.keys()) & set(ARRAYS):
                dtype = file.get_slice(name).get_dtype()
                if dtype[0] not in "IU":  # numpy lacks some of the others
                    raise FileError(f"{name} holds {dtype}; it must hold integers")
                fields[name] = file.get_tensor(name)
            return fields
    except SafetensorError as error:
        raise FileError(f"not a safetensors file: {error}") from None


def _holds_integers(values: Any) -> bool:
    """Whether it is an array of integers, or a list of lists of them: nothing that numpy would unpack to more."""
    if isinstance(values, np.ndarray):
        return np.issubdtype(values.dtype, np.integer)
    return isinstance(values, list) and all(isinstance(row, list) and set(map(type, row)) <= {int} for row in values)


def _whole_number(value: Any) -> int:
    """A whole number of a file, which safetensors keeps as text."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{reprlib.repr(value)} is not a whole number")
    return int(value)
