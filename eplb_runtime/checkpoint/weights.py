"""Tensors of a model as its checkpoint names them, each with what makes it from the tensors that are here.

Hosts give these lists (`hosts.attaching.description.HostModel.weights`); `stream.py` brings them to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..moe.experts.slices import has_memory
from .state import LogicalView


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """How one tensor of the training state is stored.

    Args:
        names: of its parts; ``*`` in them is the number of the expert.
        experts: E, where each expert has tensors of its own; 0: the tensor is stored whole.
        sizes: of the parts along ``dim``; empty: there is one part.
        dim: dimension of the tensor (of one expert, without E) along which it is cut into parts.
    """

    names: tuple[str, ...]
    experts: int = 0
    sizes: tuple[int, ...] = ()
    dim: int = 0

    def names_of(self, expert: int) -> tuple[str, ...]:
        """Names of the parts of one expert, or of the tensor."""
        return tuple(name.replace("*", str(expert), 1) for name in self.names) if self.experts else self.names

    def cut(self, value: Tensor, expert: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of each part."""
        parts = value.split(list(self.sizes), self.dim) if self.sizes else (value,)
        return zip(self.names_of(expert), parts, strict=True)


@dataclass(frozen=True)
class Weight:
    """Tensors of a model that become tensors of its checkpoint together, and independent of all others.

    Args:
        sources: the live tensors. Of experts: this rank's rows ``[E/R, ...]``, or a tensor for each of its home slots.
        layer: the MoE layer, over the whole model, whose experts the rows are; None: of none.
        made: what becomes of the sources, whole, by name and in order.
        by_expert: where what ``convert`` makes of an expert's row belongs, by key: a name with ``*`` for the number of
            the expert, or without: a tensor whose rows are the experts. None: the sources are converted whole.
        convert: makes tensors by key from the values of the sources; of one expert from ``[1, ...]``, or from the
            tensor of its slot.
        shared: other pipeline stages may have the same tensors under the same names.
        names: of the sources, in the model.
        keeps_values: the name is all that changes.
    """

    sources: tuple[Tensor | tuple[Tensor, ...], ...]
    layer: int | None
    made: Mapping[str, TensorSpec]
    by_expert: Mapping[str, str] | None
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    shared: bool = False
    names: tuple[str, ...] = ()
    keeps_values: bool = False

    @property
    def freed(self) -> bool:
        """Return whether some of the sources have no memory now."""
        return not all(map(has_memory, self._memory))

    @property
    def is_sharded(self) -> bool:
        """Return whether other ranks have parts of the sources."""
        return any(isinstance(part, DTensor) for part in self._memory)

    @property
    def _memory(self) -> list[Tensor]:
        return [part for source in self.sources for part in (source if isinstance(source, tuple) else (source,))]

    def places_of(self, expert: int) -> Iterator[tuple[str, str, int | None]]:
        """Yield key, name and row (None: all of it) of each tensor of an expert."""
        for key, name in (self.by_expert or {}).items():
            yield key, name.replace("*", str(expert), 1), None if "*" in name else expert


def as_named(name: str, tensor: Tensor, layer: int | None, spec: TensorSpec) -> Weight:
    """A tensor under its own name, experts stacked."""
    by_expert = None if layer is None else {name: name}
    return Weight((tensor,), layer, {name: spec}, by_expert, lambda values: {name: values[0]})


def weights_of(model: nn.Module, first_layer: int) -> list[Weight]:
    """Tensors of a model under its own names, experts stacked ``[E, ...]``, as `logical_state_dict` has them.

    Args:
        first_layer: number of its first MoE layer over the whole model, which its balancer knows as well.
    """
    view = LogicalView(model)
    return [
        as_named(entry.name, entry.tensor, entry.layer, TensorSpec(tuple(view.whole_size(entry)), entry.tensor.dtype))
        for entry in view.entries("model")
    ]


def value_of(tensor: Tensor) -> Tensor:
    """A tensor that is no expert's, whole. Collective over the ranks that have parts of it."""
    with torch.no_grad():
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()
