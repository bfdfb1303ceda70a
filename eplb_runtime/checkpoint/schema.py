"""What `checkpoint.json` and the headers of its files may say: types, ranges, and how fields depend on each other.

A checksum tells that a file is as it was written, not that a right program wrote it. All of it is checked before any
of it is used, so that code that reads a checkpoint may take each field for what it is called.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import torch

from ..load.series import LONGEST, decode
from ..placement import Placement, PlacementError
from .tensor_file import DTYPES

FORMAT = "eplb-runtime-checkpoint"
VERSION = 2
PARTS = ("model", "optimizer", "extra")
"""What a tensor's key begins with."""
_HASH = re.compile(r"[0-9a-f]{32}")
_TOKEN = re.compile(r"[0-9a-f]{16}")
_OFFSETS = re.compile(r"(?:\d{1,18}(?:,\d{1,18})*)?", re.ASCII)
_LARGEST = 2**63 - 1
_MOST_DIMENSIONS = 64


class SchemaError(ValueError):
    """A field that is not what it must be; one line that names it."""


def from_text(text: str | bytes, place: str) -> Any:
    """JSON as it is written here."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"{place} is not JSON: {type(error).__name__}") from None


# -- the index ---------------------------------------------------------------------------------------------------------


def check_index(index: Any) -> None:
    """All of `checkpoint.json`, but for its own checksum.

    Raises:
        SchemaError: names the first field that is wrong.
    """
    fields = _fields(index, "it", {"format", "version", "save", "balancer", "files"})
    if type(fields["version"]) is not int or (fields["format"], fields["version"]) != (FORMAT, VERSION):
        found = f"{_shown(fields['format'])} of version {_shown(fields['version'])}"
        raise SchemaError(f"it is {found}; this reads {FORMAT!r} of version {VERSION}")
    save = _text(fields["save"], "save", _TOKEN)
    if fields["balancer"] is not None:
        _check_balancer(fields["balancer"])
    files = _list(fields["files"], "files")
    if not files:
        raise SchemaError("files is empty")
    for number, file in enumerate(files):
        place = f"files[{number}]"
        known = _fields(file, place, {"name", "bytes", "checksum"})
        name = f"tensors-{number:05d}-of-{len(files):05d}-{save}.safetensors"
        if known["name"] != name:
            raise SchemaError(f"{place}.name is {_shown(known['name'])}, not {name}")
        _whole(known["bytes"], f"{place}.bytes", least=8)
        _text(known["checksum"], f"{place}.checksum", _HASH)


def _check_balancer(state: Any) -> None:
    """What `Balancer.state_dict` gives."""
    known = _fields(state, "balancer", {"step", "placement"}, {"load", "track_record"})
    _whole(known["step"], "balancer.step")
    try:
        placement = Placement.from_json(_text(known["placement"], "balancer.placement"))
    except PlacementError as error:
        raise SchemaError(f"balancer.placement: {error}") from None
    for number, row in enumerate(_list(known.get("track_record", []), "balancer.track_record")):
        place = f"balancer.track_record[{number}]"
        if len(_list(row, place)) != 4 or not all(type(value) in (int, float) for value in row):
            raise SchemaError(f"{place} is {_shown(row)}, not four numbers")
    if "load" not in known:
        return
    load = _fields(known["load"], "balancer.load", {"steps_per_bucket"}, {"history", "open", "open_steps"})
    _whole(load["steps_per_bucket"], "balancer.load.steps_per_bucket", least=0)
    if ("open" in load) != ("open_steps" in load):
        raise SchemaError("balancer.load has one of open and open_steps without the other")
    if "open_steps" in load:
        _whole(load["open_steps"], "balancer.load.open_steps", least=1)
    for name in load.keys() & {"history", "open"}:
        place = f"balancer.load.{name}"
        _fields(load[name], place, {"shape", "data"})
        for length in _list(load[name]["shape"], f"{place}.shape"):
            _whole(length, f"{place}.shape")
        _text(load[name]["data"], f"{place}.data")
        try:
            counts = decode(load[name], placement.num_layers, placement.num_experts, LONGEST)
        except ValueError as error:
            raise SchemaError(f"{place}: {error}") from None
        if counts.size and counts.min() < 0:
            raise SchemaError(f"{place} has a count of {counts.min()} tokens")


# -- a file's header ---------------------------------------------------------------------------------------------------


def check_header(header: Any, data_bytes: int) -> tuple[dict[str, tuple[int, ...]], Mapping[str, str], Any]:
    """All of the header of one file.

    Args:
        data_bytes: of the file, after the header.

    Returns:
        The whole size of each tensor, the checksum of each part, and what it says of the optimizer (None: nothing).

    Raises:
        SchemaError: names the first field that is wrong.
    """
    if not isinstance(header, dict):
        raise SchemaError("its header is not an object")
    metadata = _fields(header.get("__metadata__"), "__metadata__", {"format", "sizes", "optimizer", "checksums"})
    if metadata["format"] != FORMAT:
        raise SchemaError(f"__metadata__.format is {_shown(metadata['format'])}, not {FORMAT}")
    inside = {
        name: from_text(_text(metadata[name], f"__metadata__.{name}"), f"__metadata__.{name}")
        for name in ("sizes", "optimizer", "checksums")
    }
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    sizes = _fields(inside["sizes"], "sizes", {name.rpartition("@")[0] for name in entries})
    checksums = _fields(inside["checksums"], "checksums", set(entries))
    for key, size in sizes.items():
        if key.partition(".")[0] not in PARTS or not key.partition(".")[2]:
            raise SchemaError(f"the key {_shown(key)} begins with none of {', '.join(PARTS)}")
        _shape(size, f"sizes[{_shown(key)}]")
    for name, entry in entries.items():
        _text(checksums[name], f"checksums[{_shown(name)}]", _HASH)
        _check_entry(name, entry, sizes[name.rpartition("@")[0]])
    at = 0
    for first, last in sorted(tuple(entry["data_offsets"]) for entry in entries.values()):
        if first != at:
            raise SchemaError(f"data_offsets leave out or repeat bytes at {min(first, at)}")
        at = last
    if at != data_bytes:
        raise SchemaError(f"data_offsets end at {at}, the file has {data_bytes} bytes of data")
    if inside["optimizer"] is not None:
        _check_optimizer(inside["optimizer"])
    return {key: tuple(size) for key, size in sizes.items()}, checksums, inside["optimizer"]


def _check_entry(name: str, entry: Any, size: list[int]) -> None:
    place = _shown(name)
    known = _fields(entry, place, {"dtype", "shape", "data_offsets"})
    dtype = known["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise SchemaError(f"{place}.dtype is {_shown(dtype)}; known are {', '.join(DTYPES)}")
    shape = _shape(known["shape"], f"{place}.shape")
    offsets = name.rpartition("@")[2]
    if not _OFFSETS.fullmatch(offsets):
        raise SchemaError(f"{place} does not end in offsets")
    begins = [int(offset) for offset in offsets.split(",")] if offsets else []
    if not len(begins) == len(shape) == len(size):
        raise SchemaError(f"{place} has {len(begins)} offsets and {len(shape)} dimensions in a tensor of {len(size)}")
    if any(begin + length > whole for begin, length, whole in zip(begins, shape, size, strict=True)):
        raise SchemaError(f"{place}, of shape {shape}, ends outside of its tensor of {size}")
    data = _list(known["data_offsets"], f"{place}.data_offsets")
    if len(data) != 2:
        raise SchemaError(f"{place}.data_offsets is not a first and a last")
    first, last = (_whole(end, f"{place}.data_offsets") for end in data)
    if last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise SchemaError(f"{place}.data_offsets are {last - first} bytes, for {shape} of {dtype}")


def _check_optimizer(optimizer: Any) -> None:
    known = _fields(optimizer, "optimizer", {"param_groups", "numbers"})
    names: Counter[str] = Counter()
    for number, group in enumerate(_list(known["param_groups"], "param_groups")):
        place = f"param_groups[{number}]"
        _fields(group, place, {"params"}, None)
        names.update(_text(name, f"{place}.params") for name in _list(group["params"], f"{place}.params"))
        for option, value in group.items():
            _check_value(value, f"{place}.{option}")
    for name, count in names.items():
        if count > 1:
            raise SchemaError(f"{_shown(name)} is in {count} param_groups")
    for name, values in _fields(known["numbers"], "numbers", set(), None).items():
        for key, value in _fields(values, f"numbers[{_shown(name)}]", set(), None).items():
            _check_value(value, f"numbers[{_shown(name)}].{key}")


def _check_value(value: Any, place: str) -> None:
    """An option or number: plain JSON, or a tensor as ``{"tensor": ..., "dtype": ...}``."""
    if not isinstance(value, dict):
        return
    known = _fields(value, place, {"tensor", "dtype"})
    dtype = known["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise SchemaError(f"{place}.dtype is {_shown(dtype)}; known are {', '.join(DTYPES)}")
    try:
        torch.tensor(known["tensor"], dtype=DTYPES[dtype])
    except (ValueError, TypeError, RuntimeError, OverflowError):
        raise SchemaError(f"{place}.tensor is {_shown(known['tensor'])}: no {dtype} tensor") from None


# -- parts of a tensor -------------------------------------------------------------------------------------------------


def covers(size: tuple[int, ...], shards: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether blocks ``(offsets, shape)`` within ``size`` fill it, each element exactly once.

    Blocks add up to the tensor exactly if their corners, each with the sign of its parity, cancel except for those of
    the tensor. Dimensions that every block spans are left out.
    """
    found = [(offsets, shape) for offsets, shape in shards if math.prod(shape)]
    if sum(math.prod(shape) for _, shape in found) != math.prod(size):
        return False
    cut = [d for d, length in enumerate(size) if any(shape[d] != length for _, shape in found)]
    corners: Counter[tuple[int, ...]] = Counter()
    whole = (tuple(0 for _ in size), size)
    for sign, each in ((1, found), (-1, [whole] if math.prod(size) else [])):
        for offsets, shape in each:
            for ends in product((0, 1), repeat=len(cut)):
                at = tuple(offsets[d] + end * shape[d] for d, end in zip(cut, ends, strict=True))
                corners[at] += sign * (-1) ** sum(ends)
    return not any(corners.values())


# -- fields ------------------------------------------------------------------------------------------------------------


def _fields(value: Any, place: str, needed: set[str], also: set[str] | None = frozenset()) -> Mapping[str, Any]:  # type: ignore[assignment]
    """An object with these fields, and perhaps some of ``also`` (None: any), and no others."""
    if not isinstance(value, dict):
        raise SchemaError(f"{place} is {_shown(value)}, not an object")
    for name in sorted(needed - value.keys()):
        raise SchemaError(f"{place} has no {_shown(name)}")
    for name in sorted(value.keys() - needed - also) if also is not None else ():
        raise SchemaError(f"{place} has a field {_shown(name)} that is not known")
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise SchemaError(f"{place} is {_shown(value)}, not a list")
    return value


def _text(value: Any, place: str, pattern: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
        raise SchemaError(f"{place} is {_shown(value)}, not {'a text' if pattern is None else pattern.pattern}")
    return value


def _whole(value: Any, place: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise SchemaError(f"{place} is {_shown(value)}, not a whole number from {least} on")
    return value


def _shape(value: Any, place: str) -> list[int]:
    lengths = [_whole(length, place) for length in _list(value, place)]
    if len(lengths) > _MOST_DIMENSIONS or math.prod(lengths) > _LARGEST:
        raise SchemaError(f"{place} is {_shown(value)}: too large for a tensor")
    return lengths


def _shown(value: Any) -> str:
    return reprlib.repr(value)
