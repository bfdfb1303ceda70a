"""Rows by slot as grouped matrix products want them: each slot's begin at a multiple of some number, zeros between.

Done while rows are put in the order of slots anyway, so that padding costs no pass of its own. No host sync: how many
rows there are may be known on the device only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..on_triton import fits, jit, power_of_2, tl

_ROWS, _COLUMNS = 16, 128
"""Of a program."""


def most_rows(rows: int, slots: int, multiple: int) -> int:
    """Rows that padding can make of ``rows`` at most, a multiple."""
    return -(-(rows + min(rows, slots) * (multiple - 1)) // multiple) * multiple


def padded_ends(offsets_S: Tensor, multiple: int) -> Tensor:
    """int32 ``[S]``: where each slot's rows end with what fills them up, from int32 ``[S]``, where they end without."""
    counts_S = torch.diff(offsets_S, prepend=offsets_S.new_zeros(1))
    return ((counts_S + multiple - 1) // multiple * multiple).cumsum(0, dtype=torch.int32)


def pad(source: Tensor, index_M: Tensor, offsets_S: Tensor, ends_S: Tensor, out_PD: Tensor) -> None:
    """Rows in the order of slots, padded.

    Args:
        source: ``[*, D]``, contiguous.
        index_M: int64, for each row by slot, which row of ``source`` it is.
        offsets_S: int32, where each slot's rows end in ``index_M``.
        ends_S: of `padded_ends`.
        out_PD: ``[P, D]``, contiguous, written: P is at least ``ends_S[-1]``; zeros where no row is.
    """
    (launch_pad if fits(source) else torch_pad)(source, index_M, offsets_S, ends_S, out_PD)


def unpad(padded_PD: Tensor, offsets_S: Tensor, ends_S: Tensor, out_MD: Tensor) -> None:
    """Rows by slot without what fills them up.

    Args:
        padded_PD: ``[P, D]``, contiguous, as of `pad`.
        offsets_S, ends_S: as there.
        out_MD: ``[M, D]``, contiguous, written; rows past ``offsets_S[-1]`` are left as they are.
    """
    (launch_unpad if fits(padded_PD) else torch_unpad)(padded_PD, offsets_S, ends_S, out_MD)


def torch_pad(source: Tensor, index_M: Tensor, offsets_S: Tensor, ends_S: Tensor, out_PD: Tensor) -> None:
    """The reference of `launch_pad`."""
    row_P, there_P = _rows_of_places(out_PD.shape[0], offsets_S, ends_S)
    if not index_M.shape[0]:
        out_PD.zero_()
        return
    rows_PD = source[index_M[torch.where(there_P, row_P, 0)]]
    out_PD.copy_(torch.where(there_P[:, None], rows_PD, 0))


def torch_unpad(padded_PD: Tensor, offsets_S: Tensor, ends_S: Tensor, out_MD: Tensor) -> None:
    """The reference of `launch_unpad`."""
    row_P, there_P = _rows_of_places(padded_PD.shape[0], offsets_S, ends_S)
    out_MD[row_P[there_P]] = padded_PD[there_P]


def _rows_of_places(places: int, offsets_S: Tensor, ends_S: Tensor) -> tuple[Tensor, Tensor]:
    """For each padded place which row by slot is there, int64, and whether one is."""
    place_P = torch.arange(places, device=offsets_S.device)
    slot_P = torch.searchsorted(ends_S, place_P.to(torch.int32), right=True).clamp_(max=ends_S.shape[0] - 1)
    zero = offsets_S.new_zeros(1)
    begin_S, padded_S = torch.cat([zero, offsets_S[:-1]]), torch.cat([zero, ends_S[:-1]])
    row_P = place_P - padded_S[slot_P] + begin_S[slot_P]
    return row_P, row_P < offsets_S[slot_P]


def launch_pad(source: Tensor, index_M: Tensor, offsets_S: Tensor, ends_S: Tensor, out_PD: Tensor) -> None:
    """By the kernel; as `pad`."""
    _launch(source, index_M, offsets_S, ends_S, out_PD, out_PD.shape[0], padding=True)


def launch_unpad(padded_PD: Tensor, offsets_S: Tensor, ends_S: Tensor, out_MD: Tensor) -> None:
    """By the kernel; as `unpad`."""
    _launch(padded_PD, offsets_S, offsets_S, ends_S, out_MD, padded_PD.shape[0], padding=False)


def _launch(
    source: Tensor, index: Tensor, offsets_S: Tensor, ends_S: Tensor, out: Tensor, places: int, *, padding: bool
) -> None:
    slots, width = offsets_S.shape[0], out.shape[1]
    if places and width:
        _move[(-(-places // _ROWS), -(-width // _COLUMNS))](
            source,
            index,
            offsets_S,
            ends_S,
            out,
            places,
            slots,
            width,
            PADDING=padding,
            SLOTS=power_of_2(slots),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )


@jit
def _move(  # type: ignore[no-untyped-def]
    source,
    index,
    offsets,
    ends,
    out,
    places,
    slots,
    width,
    PADDING: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    every = tl.arange(0, SLOTS)
    # Which slot a place is in: how many slots end before it.
    end = tl.load(ends + every, mask=every < slots, other=2147483647)
    slot = tl.minimum(tl.sum((end[None, :] <= place[:, None]).to(tl.int32), axis=1), slots - 1)
    first = tl.load(offsets + slot - 1, mask=slot > 0, other=0)
    row = place - tl.load(ends + slot - 1, mask=slot > 0, other=0) + first
    there = (place < places) & (row < tl.load(offsets + slot))
    wide = (column < width)[None, :]
    padded = place.to(tl.int64)[:, None] * width + column[None, :]
    if PADDING:
        came = tl.load(index + row, mask=there, other=0)
        value = tl.load(source + came[:, None] * width + column[None, :], mask=there[:, None] & wide, other=0)
        tl.store(out + padded, value, mask=(place < places)[:, None] & wide)
    else:
        value = tl.load(source + padded, mask=there[:, None] & wide, other=0)
        tl.store(out + row.to(tl.int64)[:, None] * width + column[None, :], value, mask=there[:, None] & wide)
