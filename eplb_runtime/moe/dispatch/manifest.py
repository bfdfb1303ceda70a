"""Which row goes where, as the all-to-all dispatcher puts it down once for a batch. No communication here.

On either side of the exchange rows lie with those of this rank first, then by rank: what stays here lies in one piece,
and what travels in another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..experts.compute import SlotCounts

_WORTH_SENDING_ONCE = 1.2
"""Times fewer rows: sending each token once costs a small exchange, in which each choice says which row it means."""


@dataclass(frozen=True, eq=False)
class Leg:
    """One exchange of rows between ranks: U leave, those that stay here first, then by rank.

    Args:
        index_U: int64, which row each one is; None: each row, in order.
        own: rows that stay on this rank.
        sent, received: rows for and from each rank, without those.
    """

    index_U: Tensor | None
    own: int
    sent: list[int]
    received: list[int]

    @property
    def arriving(self) -> int:
        """Rows there will be here, with those that stay."""
        return self.own + sum(self.received)

    @classmethod
    def of(cls, index_U: Tensor, sent_R: NDArray[np.int64], received_R: NDArray[np.int64], me: int) -> Leg:
        """``sent_R``, ``received_R``: with what stays here, which is both."""
        sent, received = sent_R.tolist(), received_R.tolist()
        own = sent[me]
        sent[me] = received[me] = 0
        return cls(index_U, own, sent, received)

    def back(self, index_U: Tensor | None) -> Leg:
        """The way back.

        Args:
            index_U: int64, for each row as it has arrived: which one it is here now; None: it is where it was.
        """
        return Leg(index_U, self.own, self.received, self.sent)


@dataclass(frozen=True, eq=False)
class Cargo:
    """What is sent to the experts.

    Args:
        leg: what each row is of: a token, or a choice.
        arrived_M: int64, for each row by slot: where it lies among those that arrive.
    """

    leg: Leg
    arrived_M: Tensor


@dataclass(frozen=True, eq=False)
class Choices:
    """The way of what a choice has: its weight, and its result on the way back.

    Args:
        cargo: to the experts.
        place_TK: int64 ``[T, K]``, where each choice lies among those sent.
        slot_place_M: int64, for each choice as it arrives: the place of its row by slot.
        counts_S: rows by slot.
    """

    cargo: Cargo
    place_TK: Tensor
    slot_place_M: Tensor
    counts_S: SlotCounts


@dataclass(frozen=True, eq=False)
class Manifest:
    """Which row goes where.

    Args:
        choices: for what a choice has.
        tokens: for what a token has: its hidden state, the gradient of its output.
    """

    choices: Choices
    tokens: Cargo


def worth_sending_once(num_ranks: int, top_k: int) -> bool:
    """Whether a token is sent once to each rank where it has choices, or once for each choice. The same on all ranks:
    it goes by the number of ranks that even choices would meet."""
    ranks_met = num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)
    return top_k >= _WORTH_SENDING_ONCE * ranks_met


def begins(rows_R: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """int64 ``[R]``: where each rank's rows begin if those of ``first`` lie before all others."""
    order_R = own_first(len(rows_R), first)
    begin_R = np.empty_like(rows_R)
    begin_R[order_R] = np.cumsum(rows_R[order_R]) - rows_R[order_R]
    return begin_R


def own_first(num_ranks: int, first: int) -> NDArray[np.int64]:
    """int64 ``[R]``: ``first``, then the others in order."""
    return np.array([first, *(rank for rank in range(num_ranks) if rank != first)])
