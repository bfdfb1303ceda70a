"""Metadata of the dispatchers over torch.distributed's all-to-all: which row goes where. No communication here.

On either side of the exchange, this rank's own rows come first, then the others by rank: rows that stay lie in one
piece, rows that travel in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..experts.compute import SlotCounts

_WORTH_DEDUPLICATING = 1.2
"""Times fewer rows: sending each token once to a rank costs a small exchange that names each choice's row."""

Bags = tuple[Tensor, Tensor]
"""Elements by bag, and where each bag begins (`permute.bags`)."""


@dataclass(frozen=True, eq=False)
class DispatchMetadata:
    """Where each row goes; each kind of dispatcher has its own fields.

    It holds no value of the batch: hidden states with the same choices on all ranks can be dispatched with it again
    (activation recompute).
    """


@dataclass(frozen=True, eq=False)
class AllToAllSplits:
    """One exchange of rows between ranks: U are sent, local rows first, then by rank.

    Args:
        index_U: int64, the source row of each; None: every row, in order.
        num_local_rows: rows that stay on this rank.
        sent, received: rows for and from each rank, without local ones.
    """

    index_U: Tensor | None
    num_local_rows: int
    sent: list[int]
    received: list[int]

    @property
    def num_received_rows(self) -> int:
        """Rows on this rank after the exchange, local ones included."""
        return self.num_local_rows + sum(self.received)

    @classmethod
    def of(cls, index_U: Tensor, sent_R: NDArray[np.int64], received_R: NDArray[np.int64], rank: int) -> AllToAllSplits:
        """``sent_R`` and ``received_R`` both count local rows, at ``rank``."""
        sent, received = sent_R.tolist(), received_R.tolist()
        num_local_rows = sent[rank]
        sent[rank] = received[rank] = 0
        return cls(index_U, num_local_rows, sent, received)

    def reversed(self, index_U: Tensor | None) -> AllToAllSplits:
        """Return the exchange in the other direction; ``index_U``: from arrival order to the current one."""
        return AllToAllSplits(index_U, self.num_local_rows, self.received, self.sent)


@dataclass(frozen=True, eq=False)
class RowRouting:
    """The way of rows to their slots: the exchange of tokens or choices, and for each row by slot its place among those
    received."""

    splits: AllToAllSplits
    received_row_M: Tensor


@dataclass(frozen=True, eq=False)
class AllToAllMetadata(DispatchMetadata):
    """Which row goes where.

    Args:
        choices: routing of values that each choice has: its router weight, and its result on the way back.
        tokens: routing of values that each token has: its hidden state, the gradient of its output. Between nodes
            (``across``), from the rank that forwards the token.
        place_TK: int64 ``[T, K]``, the place of each choice among those sent.
        slot_place_M: int64, for each choice as it arrives its place by slot.
        counts_S: rows by slot.
        across: tokens of this rank, to the rank of its place on each node; None: no nodes.
        sums: where tokens are summed by rank: bags of rows by slot for each token that visited this rank, of those for
            each token that this rank forwarded, of those for each token of this rank. None: logical order.
    """

    choices: RowRouting
    tokens: RowRouting
    place_TK: Tensor
    slot_place_M: Tensor
    counts_S: SlotCounts
    across: AllToAllSplits | None = None
    sums: tuple[Bags, Bags, Bags] | None = None


def worth_deduplicating(num_ranks: int, top_k: int) -> bool:
    """Whether a token is sent once to each rank where it has choices, or once for each choice. Equal on all ranks: it
    depends only on the number of ranks that evenly spread choices would visit."""
    ranks_visited = num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)
    return top_k >= _WORTH_DEDUPLICATING * ranks_visited


def begins(rows_R: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """int64 ``[R]``: where each rank's rows begin if those of ``first`` lie before all others."""
    order_R = own_first(len(rows_R), first)
    begin_R = np.empty_like(rows_R)
    begin_R[order_R] = np.cumsum(rows_R[order_R]) - rows_R[order_R]
    return begin_R


def own_first(num_ranks: int, first: int) -> NDArray[np.int64]:
    """int64 ``[R]``: ``first``, then the others in order."""
    return np.array([first, *(rank for rank in range(num_ranks) if rank != first)])
