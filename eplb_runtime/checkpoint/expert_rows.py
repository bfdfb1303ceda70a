"""A tensor ``[E, ...]`` of which this rank holds some rows, as torch.distributed.checkpoint wants to see it.

DTensor knows contiguous shards only, and experts stand anywhere. This class speaks DCP's protocol for tensors of other
libraries instead (``__create_write_items__`` and its two siblings): each expert is one chunk of the logical tensor, so
a checkpoint holds plain whole tensors, which anyone can load.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

_ATEN = torch.ops.aten
_ALIKE = (
    _ATEN.detach.default,
    _ATEN.clone.default,
    _ATEN.zeros_like.default,
    _ATEN.empty_like.default,
    _ATEN._to_copy.default,
)
"""What stagers do with a tensor, row by row the same."""


class ExpertRows(Tensor):
    """Looks like ``[E, ...]``, holds ``rows``; to be saved and loaded, not to be computed with.

    Args:
        rows: ``[H, ...]``, the live tensor: saving reads it, loading writes it in place. Or a slice of it along
            dimension 1.
        experts: the logical expert of each row.
        size: of the logical tensor, ``[E, ...]``.
        first_column: where a slice begins.
    """

    _rows: Tensor
    _experts: tuple[int, ...]
    _first_column: int

    @staticmethod
    def __new__(cls, rows: Tensor, experts: Sequence[int], size: Sequence[int], first_column: int = 0) -> ExpertRows:
        # The one constructor that torch has for a tensor that only describes others; DTensor is made by it too.
        wrapper: ExpertRows = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=rows.dtype, device=rows.device
        )  # type: ignore[attr-defined]
        wrapper._rows = rows.detach()
        wrapper._experts = tuple(experts)
        wrapper._first_column = first_column
        return wrapper

    def __init__(self, rows: Tensor, experts: Sequence[int], size: Sequence[int], first_column: int = 0) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ExpertRows({tuple(self.shape)}, {self.dtype}, experts {list(self._experts)} here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ExpertRows, (self._rows, self._experts, tuple(self.shape), self._first_column)

    def _like(self, rows: Tensor) -> ExpertRows:
        return ExpertRows(rows, self._experts, self.shape, self._first_column)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        twin, *rest = args
        if func is _ATEN.new_empty.default:
            # One of DCP's stagers makes an empty twin first and fills in its attributes (copies of ours) afterwards.
            return twin._like(twin._rows.new_empty(twin._rows.shape, **kwargs))
        if func is _ATEN.copy_.default and isinstance(rest[0], ExpertRows) and twin._experts == rest[0]._experts:
            twin._rows.copy_(rest[0]._rows, *rest[1:], **kwargs)
            return twin
        if func in _ALIKE:
            return twin._like(func(twin._rows, *rest, **kwargs))
        raise NotImplementedError(f"{func}: ExpertRows is for torch.distributed.checkpoint only")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Size([1, *self._rows.shape[1:]])
        return [ChunkStorageMetadata(self._offsets(expert), sizes) for expert in self._experts]

    def _offsets(self, expert: int) -> torch.Size:
        return torch.Size([expert, self._first_column, *[0] * self.ndim][: self.ndim])

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._rows)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for row, expert in enumerate(self._experts):
            if index.offset == self._offsets(expert):
                return self._rows[row : row + 1]
        raise ValueError(f"{index.fqn}: no expert {index.offset} on this rank")
