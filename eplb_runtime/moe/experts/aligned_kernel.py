"""`aligned.regroup` in one launch. Triton."""

from __future__ import annotations

from torch import Tensor

from ...utils.triton import jit, power_of_2, tl

_ROWS, _COLUMNS = 16, 128
"""Of a program."""


def launch(source_ND: Tensor, from_S: Tensor, to_S: Tensor, offsets_S: Tensor, places: int) -> Tensor:
    """As `aligned.regroup`; ``source_ND`` contiguous."""
    width, slots = source_ND.shape[1], to_S.shape[0]
    out_PD = source_ND.new_empty(places, width)
    if places and width:
        _move[(-(-places // _ROWS), -(-width // _COLUMNS))](
            source_ND,
            from_S,
            to_S,
            offsets_S,
            out_PD,
            places,
            slots,
            width,
            SLOTS=power_of_2(slots),
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
    return out_PD


@jit(do_not_specialize=["places"])
def _move(  # type: ignore[no-untyped-def]
    source,
    from_ends,
    to_ends,
    offsets,
    out,
    places,
    slots,
    width,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    every = tl.arange(0, SLOTS)
    # Which slot a place is in: how many slots end before it.
    end = tl.load(to_ends + every, mask=every < slots, other=2147483647)
    slot = tl.minimum(tl.sum((end[None, :] <= place[:, None]).to(tl.int32), axis=1), slots - 1)
    number = place - tl.load(to_ends + slot - 1, mask=slot > 0, other=0)
    size = tl.load(offsets + slot) - tl.load(offsets + slot - 1, mask=slot > 0, other=0)
    row = tl.load(from_ends + slot - 1, mask=slot > 0, other=0) + number
    wide = (column < width)[None, :]
    there = (place < places) & (number < size)
    value = tl.load(source + row.to(tl.int64)[:, None] * width + column[None, :], mask=there[:, None] & wide, other=0)
    target = out + place.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(target, value, mask=(place < places)[:, None] & wide)
