"""What takes rows to slots and back, without knowing what they mean: the contract of every carrier, and what those over
different packages have in common.

Shape suffixes: N rows of this rank, U rows that arrive here, C columns, K slots that a row may go to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Arrival:
    """Rows that have come here: ordered by source rank, then by their position there.

    Args:
        rows_UC: bfloat16 ``[U, C]``, or `float8.Rows` where those were sent.
        slots_UK: int64, of each row the local slots that it is for, -1 where a choice is elsewhere.
        counts: choices for each local slot; None: only the device knows. Then there may be rows past those that came,
            with no slot (-1) and memory that nobody has written.
        ticket: for `Carrier.again` and `Carrier.back`.
    """

    rows_UC: Any
    slots_UK: Tensor
    counts: list[int] | None
    ticket: Any


class Carrier(Protocol):
    """Takes rows to slots and back, as `BufferCarrier` does. Collective, every method."""

    def carry(self, rows_NC: Any, slots_NK: Tensor, most_rows: int = 0) -> Arrival:
        """Send each row once to every rank where it has a slot.

        Args:
            rows_NC: bfloat16; any bytes, they are copied. Or float8 with scales.
            slots_NK: int64, physical slots.
            most_rows: no rank sends more: as many times R arrive, those that are not sent unwritten, and the host does
                not wait. 0: as many arrive as are sent.
        """

    def again(self, rows_NC: Any, ticket: Any) -> Any:
        """Other rows, the way of an earlier `carry`."""

    def back(self, rows_UC: Tensor, ticket: Any) -> Tensor:
        """``[N, C]``: rows go back the way that they came, and those of one row are added up in float32."""

    def close(self, deadline: float) -> None:
        """Give back what can be given back; what is needed again is made again.

        Args:
            deadline: a time of `time.monotonic`, for the other ranks to come.
        """


def parts(rows_NC: Any, most_bytes: int) -> list[Any]:
    """In columns that one call takes.

    Args:
        most_bytes: of a row.
    """
    if not isinstance(rows_NC, Tensor):
        return [rows_NC]
    most = most_bytes // rows_NC.element_size()
    if rows_NC.shape[1] <= most:
        return [rows_NC.contiguous()]
    return [part.contiguous() for part in rows_NC.split(most, dim=1)]


def whole(parts: list[Any]) -> Any:
    """What `parts` has taken apart."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
