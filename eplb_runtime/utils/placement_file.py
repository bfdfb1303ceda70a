"""Placement files: fields of a placement as JSON; ``placement.py`` knows which of them fit together."""

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .files import MIB, FileError, require_readable

FILE_FORMAT = "eplb-runtime-placement"
FILE_VERSION = 1
ENDINGS = (".json",)
MOST_BYTES = 256 * MIB  # no placement file is larger: 100 layers of 10,000 slots take 6 MiB
NUMBERS = ("version", "layers", "experts", "ranks", "slots_per_rank", "epoch")
ARRAYS = ("physical_to_logical", "home")


class PlacementError(FileError):
    """A placement that breaks a rule, or a file that is not a placement for this model."""


def to_json(fields: Mapping[str, Any]) -> str:
    """Return the text of a placement file. ``fields``: NUMBERS without the version, and ARRAYS; ``home`` may be
    None."""
    arrays = {name: None if fields[name] is None else fields[name].tolist() for name in ARRAYS}
    return json.dumps({"format": FILE_FORMAT, "version": FILE_VERSION, **fields, **arrays})


def from_json(text: str | bytes) -> Any:
    """Return what a JSON text holds, without checking the fields. PlacementError: it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # it may be no text
        raise PlacementError(f"not a JSON placement: {error}") from None


def read(path: Path) -> Any:
    """Return what a JSON file holds, fields unchecked. PlacementError: it is not JSON. FileError: it is too large."""
    require_readable(path, MOST_BYTES)
    return from_json(path.read_bytes())


def checked(fields: Any) -> Mapping[str, Any]:
    """Return ``fields`` as they are. PlacementError: they have another format or version, a field is missing, one of
    NUMBERS is no integer, or one of ARRAYS is no list of lists of integers (``home`` may be None)."""
    if not isinstance(fields, Mapping) or fields.get("format") != FILE_FORMAT:
        raise PlacementError(f'not a placement file: its "format" is not "{FILE_FORMAT}"')
    for name in (*NUMBERS, *ARRAYS):
        if name not in fields:
            raise PlacementError(f"the field {name!r} is missing")
        if name in NUMBERS and type(fields[name]) is not int:
            said = f"{reprlib.repr(fields[name])} is not a whole number"
            raise PlacementError(f"the field {name!r} has the wrong type: {said}")
        if name in ARRAYS and not (_holds_integers(fields[name]) or (name == "home" and fields[name] is None)):
            raise PlacementError(f"{name} must hold integers, [layers, slots] or [layers, experts] of them")
    if fields["version"] != FILE_VERSION:
        raise PlacementError(f"version {fields['version']} of the placement format; this release reads {FILE_VERSION}")
    return fields


def _holds_integers(values: Any) -> bool:
    """Return whether it is a list of lists of integers: nothing that numpy would unpack to more."""
    return isinstance(values, list) and all(isinstance(row, list) and set(map(type, row)) <= {int} for row in values)
