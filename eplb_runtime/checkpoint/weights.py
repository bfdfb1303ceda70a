"""Tensors of a model as its checkpoint names them, each with what makes it from the tensors that are here.

Hosts give these lists (`hosts.attaching.description.HostModel.weights`); `logical_tensors.py` brings them to other
ranks, and `export_check.py` compares them with what somebody else has exported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..moe.experts.slices import has_memory
from .state import LogicalView
from .tensor_file import TensorSpec

Place = tuple[str, int | None]
"""A tensor of the checkpoint, and a row of it, or None: all of it."""


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
