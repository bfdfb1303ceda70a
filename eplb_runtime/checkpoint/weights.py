"""Tensors of a model as its checkpoint names them, each with what makes it from the tensors that are here.

Hosts give these lists (`hosts.attaching.description.HostModel.weights`); `logical_tensors.py` brings them to other
ranks, and `export_check.py` compares them with what somebody else has exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..moe.experts.slices import has_memory
from .state import LogicalView

Place = tuple[str, int | None]
"""A tensor of the checkpoint, and a row of it, or None: all of it."""


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
        by_expert: for each logical expert, what ``convert`` makes of its row, by key, and where that belongs. None: the
            sources are converted whole.
        convert: makes tensors by key from the values of the sources; of one expert from ``[1, ...]``, or from the
            tensor of its slot.
        shared: other pipeline stages may have the same tensors under the same names.
    """

    sources: tuple[Tensor | tuple[Tensor, ...], ...]
    layer: int | None
    made: Mapping[str, TensorSpec]
    by_expert: tuple[Mapping[str, Place], ...] | None
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    shared: bool = False

    @property
    def memory(self) -> list[Tensor]:
        """All tensors of the sources."""
        return [part for source in self.sources for part in (source if isinstance(source, tuple) else (source,))]

    @property
    def freed(self) -> bool:
        """Return whether some of the sources have no memory now."""
        return not all(map(has_memory, self.memory))

    @property
    def is_sharded(self) -> bool:
        """Return whether other ranks have parts of the sources."""
        return any(isinstance(part, DTensor) for part in self.memory)

    def row(self, row: int) -> Tensor:
        """One expert of this rank as ``convert`` takes it: the live memory, of plain rows."""
        (source,) = self.sources
        if isinstance(source, tuple):
            return source[row].detach()
        return (source.to_local() if isinstance(source, DTensor) else source).detach()[row : row + 1]


def weights_of(model: nn.Module, first_layer: int) -> list[Weight]:
    """Tensors of a model under its own names, experts stacked ``[E, ...]``, as `logical_state_dict` has them.

    Args:
        first_layer: number of its first MoE layer over the whole model, which its balancer knows as well.
    """
    view = LogicalView(model)
    weights = []
    for entry in view.entries("model"):
        spec = TensorSpec(tuple(view.whole_size(entry)), entry.tensor.dtype)
        weights.append(_as_named(entry.name, entry.tensor, entry.layer, spec))
    return weights


def _as_named(name: str, tensor: Tensor, layer: int | None, spec: TensorSpec) -> Weight:
    by_expert: tuple[Mapping[str, Place], ...] | None = None
    if layer is not None:
        by_expert = tuple({name: (name, expert)} for expert in range(spec.shape[0]))
    return Weight((tensor,), layer, {name: spec}, by_expert, lambda values: {name: values[0]})


def value_of(tensor: Tensor) -> Tensor:
    """A tensor that is no expert's, whole. Collective over the ranks that have parts of it."""
    with torch.no_grad():
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def patterns_of(by_expert: Sequence[Mapping[str, Place]]) -> tuple[str, ...]:
    """Names with ``*`` for the number of the expert; empty where there is no such name."""
    patterns = []
    for key, (first, _) in by_expert[0].items():
        cuts = [f"{first[: match.start()]}*{first[match.end() :]}" for match in re.finditer(r"\b0\b", first)]
        fits = (
            cut
            for cut in cuts
            if all(cut.replace("*", str(number), 1) == names[key][0] for number, names in enumerate(by_expert))
        )
        patterns.append(next(fits, ""))
    return tuple(patterns)


def cut_by(convert: Callable[[Tensor], Sequence[Tensor]], shape: torch.Size) -> tuple[tuple[int, ...], int] | None:
    """Return sizes and dimension of the parts, in order, that a conversion makes of a tensor; None: it is no cut."""
    # Each element says where it is along one dimension, without memory for all of them.
    places = [
        torch.arange(length, dtype=torch.int32).view(-1, *(1 for _ in shape[dim + 1 :])).expand(shape)
        for dim, length in enumerate(shape)
    ]
    made = [convert(each) for each in places]
    for dim in range(len(shape)):
        sizes = tuple(part.shape[dim] if part.ndim == len(shape) else 0 for part in made[dim])
        if sum(sizes) == shape[dim] and all(
            all(torch.equal(part, own) for part, own in zip(parts, each.split(list(sizes), dim), strict=True))
            for parts, each in zip(made, places, strict=True)
        ):
            return (sizes if len(sizes) > 1 else ()), dim
    return None
