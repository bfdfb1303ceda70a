"""Rows as DeepEP takes them, a hidden state with its router weights behind it; nothing is rounded but by float8.

Towards the experts DeepEP copies rows, so any bytes may be in them. On the way back it adds rows up, in float32:
bfloat16 columns are added as such, and weights' gradients travel a byte a column, since each then has one summand that
is not zero. `pack`, `unpack` and `unpack_weights` are for bfloat16 rows, or for `Float8Rows`: float8_e4m3fn, and a
float32 scale for each 128 columns. What a row becomes depends on the row alone, not on where it goes.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIRE_DTYPE, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
ROW_BYTES = 32
"""DeepEP's kernels copy rows in halves of 16 bytes a channel."""
MOST_ROW_BYTES = 15 << 10
"""A row is staged in a warp's 16 KiB of shared memory, with its ids and weights."""
SCALED_COLUMNS = 128
"""That share a scale."""
MOST_SCALES = 128
"""Of a row, router weights among them; what DeepEP's buffers are sized for."""
_LARGEST = torch.finfo(FLOAT8).max
_SMALLEST_AMAX = 1e-4
"""As DeepEP's own casts: a scale is never zero."""
_WORD, _ALIGNED_BYTES = 4, 16
"""Scales are float32, and those of a row are copied 16 bytes at once."""

Float8Rows = tuple[Tensor, Tensor]
"""float8 ``[N, D]``, and float32 ``[N, D / 128 + W]``: scales, and behind them router weights, bit for bit."""
Rows = Tensor | Float8Rows


def refusal(hidden_TD: Tensor, weights_TK: Tensor, in_float8: bool) -> str:
    """Return why such hidden states cannot travel so, or ""."""
    (_, width), weight_bytes = hidden_TD.shape, weights_TK.shape[1] * weights_TK.element_size()
    given = f"these hidden states have {width} columns of {hidden_TD.dtype} and {weights_TK.shape[1]} choices"
    if hidden_TD.dtype != WIRE_DTYPE:
        return f"DeepEP carries and sums bfloat16, and {given}: train in bfloat16 (autocast) or take another dispatch"
    if not in_float8 and 2 * (width + weight_bytes) > MOST_ROW_BYTES:  # weights' gradients take a column a byte
        return f"DeepEP carries rows of {MOST_ROW_BYTES} bytes, and {given}: take another dispatch"
    if in_float8 and width % SCALED_COLUMNS:
        return f"dtype='float8' has a scale for {SCALED_COLUMNS} columns, and {given}: leave dtype out"
    if in_float8 and _scale_columns(width, weight_bytes) > MOST_SCALES:
        return f"dtype='float8' carries {MOST_SCALES} scales and router weights a row, and {given}: leave dtype out"
    return ""


def pack(hidden_TD: Tensor, weights_TW: Tensor | None, times: int, in_float8: bool) -> Rows:
    """Return ``T * times`` rows with a token's hidden state and a share of its weights each."""
    (tokens, width), multiple = hidden_TD.shape, ROW_BYTES
    if in_float8:
        blocks_TBC = hidden_TD.reshape(tokens, width // SCALED_COLUMNS, SCALED_COLUMNS).float()
        amax_TB = blocks_TBC.abs().amax(dim=2).clamp(_SMALLEST_AMAX)
        rows_TD = (blocks_TBC * (_LARGEST / amax_TB).unsqueeze(2)).to(FLOAT8).view(tokens, width)
        # Repeated as bytes: not every version of torch selects rows of float8.
        rows_ND = rows_TD.view(torch.uint8).repeat_interleave(times, dim=0).view(FLOAT8)
        hidden_TD, multiple = amax_TB / _LARGEST, _ALIGNED_BYTES
    parts = [_packed(hidden_TD).view(WIRE_DTYPE).unsqueeze(1)]
    if weights_TW is not None:
        weights = _packed(weights_TW).view(WIRE_DTYPE)
        parts.append(weights.view(tokens, times, weights.shape[1] // times))
    columns = -(-2 * sum(part.shape[2] for part in parts) // multiple) * multiple // 2
    rows = torch.empty(tokens, times, columns, dtype=WIRE_DTYPE, device=hidden_TD.device)
    begin = 0
    for part in parts:
        rows[:, :, begin : begin + part.shape[2]] = part
        begin += part.shape[2]
    rows_NC = rows.flatten(0, 1)
    return (rows_ND, rows_NC.view(torch.float32)) if in_float8 else rows_NC


def unpack(rows: Rows, index_M: Tensor, width: int) -> Tensor:
    """Return bfloat16 ``[M, D]``, the hidden states of some rows, in memory of its own."""
    if isinstance(rows, Tensor):
        return rows[:, :width].index_select(0, index_M)
    rows_MD = rows[0].view(torch.uint8).index_select(0, index_M).view(FLOAT8)
    scales_MB = rows[1][:, : width // SCALED_COLUMNS].index_select(0, index_M)
    blocks_MBC = rows_MD.view(-1, width // SCALED_COLUMNS, SCALED_COLUMNS).float() * scales_MB.unsqueeze(2)
    return blocks_MBC.view(-1, width).to(WIRE_DTYPE)


def unpack_weights(rows: Rows, width: int, weights: int, dtype: torch.dtype) -> Tensor:
    """Return ``[N, W]``, the weights of all rows."""
    behind, begin = (
        (rows, width) if isinstance(rows, Tensor) else (rows[1].view(WIRE_DTYPE), 2 * (width // SCALED_COLUMNS))
    )
    return _copied(behind[:, begin : begin + weights * dtype.itemsize // 2]).view(dtype)


def pack_sums(rows_ND: Tensor, exact_NW: Tensor | None, multiple: int = ROW_BYTES) -> Tensor:
    """Return bfloat16 ``[N, C]``, a multiple of so many bytes wide: rows to be added up on the way. Each value of
    ``exact_NW`` is zero in all summands but one."""
    parts = [rows_ND] if exact_NW is None else [rows_ND, _packed(exact_NW).view(torch.uint8).to(WIRE_DTYPE)]
    if left_over := -sum(part.shape[1] for part in parts) % (multiple // WIRE_DTYPE.itemsize):
        parts.append(rows_ND.new_zeros(rows_ND.shape[0], left_over))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def unpack_sums(rows_NC: Tensor, width: int, weights: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `pack_sums` has put in, added up: ``[N, D]`` and ``[N, W]``."""
    exact_NB = rows_NC[:, width : width + weights * dtype.itemsize].to(torch.uint8)  # bfloat16 has all numbers to 256
    rows_ND = rows_NC if rows_NC.shape[1] == width else rows_NC[:, :width].clone()  # no view: models write in place
    return rows_ND, exact_NB.view(dtype)


def _packed(values: Tensor) -> Tensor:
    """Contiguous, in its strides too: one column, or no rows, pass for contiguous whatever theirs are."""
    return values if values.is_contiguous() and values.stride(-1) == 1 else _copied(values)


def _copied(values: Tensor) -> Tensor:
    """In memory of its own, which begins where any dtype may; also of one row or none, which pass for contiguous."""
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)


def _scale_columns(width: int, weight_bytes: int) -> int:
    return -(-(width // SCALED_COLUMNS * _WORD + weight_bytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES // _WORD
