"""Agrees on the records of a job: the bytes of an expert of each layer, their messages, and who holds the layer.

With pipelines a rank holds some of the layers, yet all ranks compute the same rounds. So they exchange a few words a
layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from ..distributed.consensus import Agreement, Verdict, has_another
from ..moe.experts.registry import (
    ExpertTensor,
    ExpertTensors,
    Record,
    RecordFormat,
    RegistryError,
    Shard,
    why_not_written,
)
from ..utils.errors import one_line

DIRECT_BYTES = 1 << 20
"""Rows of this many bytes or more are sent from their place; smaller ones are packed (measured on gloo: packing loses
from 1 MiB on)."""


class Segment(NamedTuple):
    """One message of a record: a shard that is sent from its place, or neighbours that are packed."""

    shards: Sequence[Shard]
    first: int
    end: int
    direct: bool


@dataclass(frozen=True)
class Records:
    """The records of a job: formats of layers that change and are here, bytes per layer, and which layers the same
    ranks hold."""

    formats: Mapping[int, RecordFormat]
    nbytes: tuple[int, ...]
    holders: tuple[int, ...]


def formats_of(registry: ExpertTensors, layers: Sequence[int]) -> tuple[dict[int, RecordFormat], str]:
    """Return formats of the records of those layers that are here, and why there are none. It reads the optimizers'
    state, so nothing may train meanwhile."""
    try:
        held = set(registry.layers)
        tensors = {layer: registry.of_home(layer) for layer in layers if layer in held}
        for layer, of_layer in tensors.items():
            if problem := registry.why_freed(layer):
                raise RegistryError(f"layer {layer}: {problem}")
            for tensor in of_layer:  # a commit may not fail
                written = chain(tensor.memory, *tensor.copies)
                problem = next(filter(None, map(why_not_written, written)), "")
                if not problem and tensor.ranges and not all(part.is_contiguous() for part in tensor.memory):
                    problem = "its ranges are not contiguous, so they cannot be sent by themselves"
                if problem:
                    raise RegistryError(f"layer {layer}: {tensor.name}: {problem}")
        if problem := registry.why_state_lacks(tensors):
            raise RegistryError(problem)
        formats = {layer: RecordFormat(tuple(of_layer)) for layer, of_layer in tensors.items()}
        for record_format in formats.values():
            record_format.state_digest()  # raises for what cannot be exchanged
        return formats, ""
    except Exception as error:
        return {}, f"{type(error).__name__}: {error}"


def agree_on_records(
    num_layers: int, found: tuple[Mapping[int, RecordFormat], str], agreement: Agreement, device: torch.device
) -> tuple[Records | None, Verdict]:
    """Agree on the records of the layers that are to change; None if there are none. Collective; never raises."""
    formats, problem = found
    # A row for every layer, whatever this rank believes will change: messages of other sizes would end the process.
    mine_L5 = np.zeros((num_layers, 5), dtype=np.int64)
    for layer, record_format in formats.items():
        digests = _digest(record_format, device) + (record_format.state_digest() or bytes(16))
        mine_L5[layer] = [*np.frombuffer(digests, dtype=np.int64), record_format.nbytes]
    try:
        words, cause = agreement.gather_words(mine_L5.tobytes(), problem)
    except RuntimeError as error:
        return None, Verdict(False, f"the ranks could not compare their records: {one_line(error)}", True)
    ranks = list(words)
    said_RL5 = np.frombuffer(b"".join(words.values()), dtype=np.int64).reshape(len(ranks), num_layers, 5)
    for what, said_RL2 in (("record", said_RL5[..., :2]), ("optimizer state", said_RL5[..., 2:4])):
        has_RL = said_RL2.any(axis=2)
        first_L = has_RL.argmax(axis=0)
        differs_RL = has_RL & (said_RL2 != said_RL2[first_L, range(num_layers)]).any(axis=2)
        if not cause and differs_RL.any():
            layer = int(differs_RL.any(axis=0).argmax())
            odd = [ranks[index] for index in differs_RL[:, layer].nonzero()[0]]
            cause = has_another(odd, f"{what} of layer {layer}", ranks[first_L[layer]])
    if cause:
        return None, Verdict(False, cause)
    nbytes_RL = said_RL5[..., 4]
    nbytes, holders = nbytes_RL.max(axis=0).tolist(), nbytes_RL.argmax(axis=0).tolist()
    return Records(formats, tuple(nbytes), tuple(holders)), Verdict(True)


def _digest(record_format: RecordFormat, device: torch.device) -> bytes:
    """16 bytes, equal on two ranks when their records look the same and travel in the same messages."""
    ends = [] if record_format.is_divided else [run.end for run in segments_of(record_format.row(0), device)]
    return hashlib.blake2b(record_format.digest() + str(ends).encode(), digest_size=16).digest()


def segments_of(record: Record, device: torch.device) -> list[Segment]:
    """Messages of a record, in the order of its bytes."""
    found: list[tuple[bool, list[Shard]]] = []
    for shard in record.shards:
        direct = shard.memory.nbytes >= DIRECT_BYTES and _can_send_rows(shard.tensor, device)
        if direct or not found or found[-1][0]:
            found.append((direct, []))
        found[-1][1].append(shard)
    ends = [*(shards[0].offset for _, shards in found[1:]), record.nbytes]
    return [
        Segment(shards, shards[0].offset, shards[0].end if direct else end, direct)
        for (direct, shards), end in zip(found, ends, strict=True)
    ]


def _can_send_rows(tensor: ExpertTensor, device: torch.device) -> bool:
    """Return whether each of its rows is contiguous and on the device of the messages, on every rank."""
    rows = tensor.memory if isinstance(tensor.tensor, tuple) else (tensor.tensor[:1],)
    return all(row.device == device and row.is_contiguous() for row in rows)


def packed_bytes(runs: Sequence[Segment]) -> int:
    """Bytes of a record that are copied before they are sent."""
    return sum(run.end - run.first for run in runs if not run.direct)
