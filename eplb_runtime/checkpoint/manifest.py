"""Manifest of a checkpoint folder: its index, the headers of its files, and where the bytes of each tensor are.

The index says which files belong together and what their headers' checksums are; a header has a checksum for every part
of a tensor. So a bit that changed anywhere is noticed, and nothing is believed before it is checked. No pickle.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from ..utils.files import FileError, require_readable
from .schema import FORMAT, VERSION, SchemaError, check_header, check_index, covers, from_text
from .shards import Shard
from .state import CheckpointError
from .tensor_file import DTYPES, header_checksum

INDEX = "checkpoint.json"
MOST_HEADER_BYTES = 100 << 20
"""safetensors' own limit, for the index too."""
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class StoredSpan:
    """A saved shard: its place in the tensor, and the place of its bytes."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    begin: int
    nbytes: int
    checksum: str

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + length for offset, length in zip(self.offsets, self.shape, strict=True))

    def read_rows(self, first: int, last: int) -> Tensor:
        """Read rows ``first:last`` of dimension 0, counted within the shard; all of a shard without dimensions."""
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        values = torch.empty(shape, dtype=self.dtype)
        raw = values.reshape(-1).view(torch.uint8)
        row_bytes = self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes
        self._read_into(raw, self.begin + first * row_bytes)
        return values

    def is_intact(self) -> bool:
        """Return whether its bytes are those that were written."""
        hasher = xxhash.xxh3_128()
        block = torch.empty(min(_BLOCK_BYTES, max(1, self.nbytes)), dtype=torch.uint8)
        for at in range(0, self.nbytes, _BLOCK_BYTES):
            piece = block[: min(_BLOCK_BYTES, self.nbytes - at)]
            self._read_into(piece, self.begin + at)
            hasher.update(piece.numpy().data)
        return hasher.hexdigest() == self.checksum

    def _read_into(self, raw: Tensor, begin: int) -> None:
        with self.file.open("rb", buffering=0) as file:
            file.seek(begin)
            target = raw.numpy().data
            while target.nbytes:
                count = file.readinto(target)
                if not count:
                    raise CheckpointError(f"{self.file} ends before its last tensor")
                target = target[count:]


@dataclass(frozen=True)
class Saved:
    """One tensor of a checkpoint."""

    size: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[StoredSpan, ...]


@dataclass(frozen=True)
class Manifest:
    """A folder's index and headers, checked against each other.

    Args:
        index: what `checkpoint.json` says.
        tensors: by the keys of `logical_state_dict`.
        optimizers: what the files say of param groups and of optimizer state that is no tensor.
    """

    folder: Path
    index: Mapping[str, Any]
    tensors: Mapping[str, Saved]
    optimizers: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a folder's index and headers, but no tensor.

        Raises:
            CheckpointError: it is damaged, or of another version.
        """
        return cls.of(folder, read_index(folder / INDEX))

    @classmethod
    def of(cls, folder: Path, index: Mapping[str, Any]) -> Manifest:
        """Read the headers that an index names; the index need not be in the folder yet."""
        try:
            check_index(index)
        except SchemaError as error:
            raise CheckpointError(f"{folder / INDEX} cannot be used: {error}") from None
        sizes: dict[str, tuple[int, ...]] = {}
        parts: dict[str, dict[tuple[int, ...], StoredSpan]] = {}
        optimizers: dict[str, Mapping[str, Any]] = {}
        for file in index["files"]:
            path = folder / file["name"]
            text, begin = _read_header(path, file["bytes"], file["checksum"])
            try:
                header = from_text(text, "its header")
                own_sizes, checksums, optimizer = check_header(header, file["bytes"] - begin)
            except SchemaError as error:
                raise CheckpointError(f"{path} cannot be used: {error}") from None
            metadata = header.pop("__metadata__")
            if optimizer is not None:
                optimizers[metadata["optimizer"]] = optimizer
            for key, size in own_sizes.items():
                if sizes.setdefault(key, size) != size:
                    raise CheckpointError(_two_tensors(folder, key))
            for name, entry in header.items():
                key, _, offsets = name.rpartition("@")
                first, last = entry["data_offsets"]
                part = StoredSpan(
                    tuple(int(offset) for offset in offsets.split(",")) if offsets else (),
                    tuple(entry["shape"]),
                    DTYPES[entry["dtype"]],
                    path,
                    begin + first,
                    last - first,
                    checksums[name],
                )
                same = parts.setdefault(key, {}).setdefault(part.offsets, part)
                if (same.shape, same.dtype, same.checksum) != (part.shape, part.dtype, part.checksum):
                    raise CheckpointError(_two_tensors(folder, key))
        tensors = {}
        for key, found in parts.items():
            values = tuple(found.values())
            if not covers(sizes[key], [(part.offsets, part.shape) for part in values]):
                raise CheckpointError(f"{folder}: parts of {key} are missing, or overlap")
            if len({part.dtype for part in values}) > 1:
                raise CheckpointError(f"{folder}: parts of {key} have different dtypes")
            tensors[key] = Saved(sizes[key], values[0].dtype, values)
        return cls(folder, index, tensors, tuple(optimizers.values()))

    def verify(self, number: int, of: int) -> None:
        """Read this rank's share of all bytes and compare their checksums.

        Args:
            number, of: this rank among those that verify together.

        Raises:
            CheckpointError: the first part that is damaged.
        """
        shares = [0] * of
        for key, saved in self.tensors.items():
            for part in saved.parts:
                mine = shares.index(min(shares))
                shares[mine] += part.nbytes
                if mine == number and not part.is_intact():
                    raise CheckpointError(
                        f"{part.file} is damaged: {key} at {part.offsets} has another checksum than when it was saved"
                    )

    def fill(self, shard: Shard) -> None:
        """Fill a live shard from the saved shards that overlap it; values are cast to its dtype."""
        saved = self.tensors[shard.key]
        shape = tuple(shard.tensor.shape)
        for part in saved.parts:
            cut = _overlap(part, shard.offsets, shape)
            if cut is None:
                continue
            inside, outside = cut
            rows = inside[0] if inside else slice(0, 0)
            values = part.read_rows(rows.start, rows.stop)
            shard.tensor[outside].copy_(values[(slice(None), *inside[1:])] if inside else values)


def _overlap(
    part: StoredSpan, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of a saved and a live shard, as slices of each; None: they do not overlap."""
    inside, outside = [], []
    for first, last, offset, length in zip(part.offsets, part.ends, offsets, shape, strict=True):
        low, high = max(first, offset), min(last, offset + length)
        if low >= high:
            return None
        inside.append(slice(low - first, high - first))
        outside.append(slice(low - offset, high - offset))
    return tuple(inside), tuple(outside)


def read_index(path: Path) -> dict[str, Any]:
    """An index whose own checksum fits.

    Raises:
        CheckpointError: it is damaged, or not one of this version.
    """
    try:
        require_readable(path, MOST_HEADER_BYTES)
        index = json.loads(path.read_text())
        own = index.pop("checksum")
        known = (index["format"], index["version"])
    except (OSError, FileError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {type(error).__name__}: {error}") from None
    if known != (FORMAT, VERSION):
        found = f"{reprlib.repr(known[0])} of version {reprlib.repr(known[1])}"
        raise CheckpointError(f"{path} is {found}; this reads {FORMAT!r} of version {VERSION}")
    if own != index_checksum(index):
        raise CheckpointError(f"{path} is damaged: it has another checksum than when it was saved")
    return dict(index)


def index_checksum(index: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(index, sort_keys=True).encode()).hexdigest()


def _read_header(path: Path, nbytes: int, expected: str) -> tuple[bytes, int]:
    """The text of a file's header, and where its tensors begin."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = file.read(8)
            count = int.from_bytes(length, "little")
            text = file.read(count) if count <= MOST_HEADER_BYTES else b""
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if size != nbytes or header_checksum(length + text).hex() != expected:
        raise CheckpointError(f"{path} is damaged: its size or its header is not what was saved")
    return text, 8 + count


def names_of(tensors: Mapping[str, Saved], part: str) -> Iterator[str]:
    """Keys of one part of the state: ``"model"``, ``"optimizer"`` or ``"extra"``."""
    return (key for key in tensors if key.startswith(f"{part}."))


def _two_tensors(folder: Path, key: str) -> str:
    return f"{folder}: ranks have different tensors under the name {key}: pipeline stages need names of their own"
