"""CUDA graphs that Megatron captures of a layer's router and preprocessing (``moe_router``, ``moe_preprocess``) and
replays ahead of the experts, which are in none.

A graph of the router alone ends before columns change places. One of the preprocessing holds that change: it reads the
placement from memory that never moves, so a replay follows every commit, and it writes down what it has read and how
many tokens it gave to each expert, since a replay runs no Python.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor, nn

from ...moe.layer import HostDispatchedLayer
from ..attaching.description import AttachError
from .settings import graphs_preprocessing


def is_captured(module: Any) -> bool:
    """Return whether the running forward of a layer is captured, or warms up for it: it is of no training step."""
    impl = getattr(module.config, "cuda_graph_impl", "none")
    return impl == "transformer_engine" and bool(module.training and is_graph_capturing())


def goes_on_after_graph(module: Any) -> bool:
    """Return whether a replayed graph has routed and preprocessed for the running forward of a layer."""
    store = getattr(module, "cudagraph_tensor_store", None)
    return store is not None and not store.is_empty() and store.routing_map is None


def check_not_captured(model: nn.Module, module: Any) -> None:
    """Refuse graphs of a layer's preprocessing that were captured before its columns could change places."""
    if graphs_preprocessing(module.config) and any(getattr(part, "cuda_graphs", None) for part in model.modules()):
        raise AttachError(
            "CUDA graphs of moe_preprocess were captured before attach, and would send tokens where experts were then: "
            "attach before the first training step"
        )


class GraphedColumns:
    """The change of a layer's columns inside its graphs, which all write to one memory that is read at once."""

    def __init__(self, columns: HostDispatchedLayer) -> None:
        self._columns = columns
        self._left_2E: Tensor | None = None

    def capture(self, chosen_TE: Tensor, weights_TE: Tensor, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Columns by logical expert -> columns by slot; counts nothing now."""
        order = self._columns.logical_of_slots
        if self._left_2E is None:
            self._left_2E = torch.zeros(2, len(order), dtype=torch.int64, device=order.device)
        counted_TE = chosen_TE if real_T is None else chosen_TE & real_T[:, None]
        self._left_2E[0].copy_(counted_TE.sum(dim=0))
        self._left_2E[1].copy_(order)
        return chosen_TE.index_select(1, order), weights_TE.index_select(1, order)

    def begin(self, rows_ND: Tensor) -> None:
        """After a replay: begin the layer's forward with the load that the graph has counted."""
        assert self._left_2E is not None  # `check_not_captured`
        self._columns.begin_after_graph(rows_ND, *self._left_2E)


class GraphedChoices:
    """A router's choices inside a graph, for one who only watches."""

    def __init__(self) -> None:
        self._chosen_TE: Tensor | None = None

    def capture(self, chosen_TE: Tensor) -> None:
        if self._chosen_TE is None:
            self._chosen_TE = chosen_TE.clone()
        self._chosen_TE.copy_(chosen_TE)

    def choices(self) -> Tensor:
        """bool ``[T, E]``, of the graph that was replayed last."""
        if self._chosen_TE is None:
            raise RuntimeError("a CUDA graph of moe_preprocess was captured before record: record first, then capture")
        return self._chosen_TE
