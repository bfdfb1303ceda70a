"""Reads checkpoint folders of version 2, whose files have blocks of tensors; such folders are written no more."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..utils.checksums import as_bytes, checksum
from ..utils.errors import one_line
from .restore import Saved, from_json
from .state import CheckpointError
from .weights import TensorSpec

VERSION = 2

_Block = tuple[tuple[int, ...], str, Any]
"""Where a block begins, its name in its file, and the file."""


def verify(folder: Path, index: Mapping[str, Any], number: int, of: int) -> None:
    """Compare the checksums of this rank's share of all blocks."""
    for file in index["files"][number::of]:
        path = folder / file["name"]
        try:
            with path.open("rb") as opened:
                length = opened.read(8)
                header = length + opened.read(min(int.from_bytes(length, "little"), file["bytes"]))
            whole = path.stat().st_size == file["bytes"]
            if not whole or xxhash.xxh3_128_hexdigest(header) != file["checksum"]:
                raise CheckpointError(f"{path} is damaged: its size or its header is not what was saved")
            with safe_open(path, framework="pt") as tensors:
                for name, known in json.loads(tensors.metadata()["checksums"]).items():
                    if checksum([as_bytes(tensors.get_tensor(name))]).hex() != known:
                        raise CheckpointError(f"{path} is damaged: {name} has another checksum than when it was saved")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from None


class OldFolder(Saved):
    """A verified folder, open for reading."""

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.name = str(folder)
        self._blocks: dict[str, list[_Block]] = {}
        tensors: dict[str, TensorSpec] = {}
        self.balancer = index["balancer"]
        optimizers: dict[str, Any] = {}
        for file in index["files"]:
            opened: Any = safe_open(folder / file["name"], framework="pt")
            metadata = opened.metadata()
            optimizers[metadata["optimizer"]] = json.loads(metadata["optimizer"], object_hook=from_json)
            sizes = json.loads(metadata["sizes"])
            for name in opened.keys():  # noqa: SIM118
                key, _, offsets = name.rpartition("@")
                begin = tuple(int(offset) for offset in offsets.split(",")) if offsets else ()
                if key not in tensors:
                    dtype = opened.get_slice(name)[(slice(0, 0),) if begin else ()].dtype
                    tensors[key] = TensorSpec(tuple(sizes[key]), dtype)
                if begin not in {other for other, *_ in self._blocks.get(key, ())}:
                    self._blocks.setdefault(key, []).append((begin, name, opened))
        for key, spec in tensors.items():
            found = sum(torch.Size(file.get_slice(name).get_shape()).numel() for _, name, file in self._blocks[key])
            if found != torch.Size(spec.shape).numel():
                raise CheckpointError(f"{folder}: blocks of {key} are missing, or overlap")
        self.tensors = tensors
        self.optimizers = [one for one in optimizers.values() if one is not None]

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        for begin, name, file in self._blocks[key]:
            saved = file.get_slice(name)
            inside, outside = [], []
            for first, length, offset, here in zip(begin, saved.get_shape(), offsets, block.shape, strict=True):
                low, high = max(first, offset), min(first + length, offset + here)
                inside.append(slice(low - first, high - first))
                outside.append(slice(low - offset, high - offset))
            if all(cut.start < cut.stop for cut in inside):
                block[tuple(outside)].copy_(saved[tuple(inside)])
