"""Rows in float8 on their way to the experts: half of bfloat16's bytes, and each value with 4 bits of mantissa left.

As DeepEP takes them: float8_e4m3fn, and a float32 scale for each 128 columns of a row. What a row becomes depends on
the row alone, not on where it goes. Results and gradients travel as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import row_bytes

COLUMNS = 128
"""That share a scale."""
FLOAT8 = torch.float8_e4m3fn
MOST_SCALES = 128
"""Of a row, router weights among them; what DeepEP's buffers are sized for."""
_LARGEST = torch.finfo(FLOAT8).max
_SMALLEST_AMAX = 1e-4
"""As DeepEP's own casts: a scale is never zero."""
_WORD, _ALIGNED_BYTES = 4, 16
"""Scales are float32, and those of a row are copied 16 bytes at once."""

Rows = tuple[Tensor, Tensor]
"""float8 ``[N, D]``, and float32 ``[N, D / 128 + W]``: scales, and behind them router weights, bit for bit."""


def refusal(hidden_TD: Tensor, weights_TK: Tensor) -> str:
    """Why such hidden states cannot travel so, in a line; empty: they can."""
    width = hidden_TD.shape[1]
    if hidden_TD.dtype != torch.bfloat16:
        return (
            f"dtype='float8' is for bfloat16 hidden states, and these are {hidden_TD.dtype}: train in "
            "bfloat16 (autocast) or leave dtype out"
        )
    if width % COLUMNS:
        return f"dtype='float8' has a scale for {COLUMNS} columns, and the hidden size is {width}: leave dtype out"
    if _columns(width, weights_TK.shape[1] * weights_TK.element_size()) > MOST_SCALES:
        return (
            f"dtype='float8' carries {MOST_SCALES} scales a row, router weights among them, and hidden size "
            f"{width} with {weights_TK.shape[1]} choices has more: leave dtype out"
        )
    return ""


def pack(hidden_TD: Tensor, weights_TW: Tensor | None, times: int = 1) -> Rows:
    """As `row_bytes.pack`, of bfloat16; weights of any dtype follow the scales."""
    tokens, width = hidden_TD.shape
    blocks_TBC = hidden_TD.reshape(tokens, width // COLUMNS, COLUMNS).float()
    amax_TB = blocks_TBC.abs().amax(dim=2).clamp(_SMALLEST_AMAX)
    rows_TD = (blocks_TBC * (_LARGEST / amax_TB).unsqueeze(2)).to(FLOAT8).view(tokens, width)
    own, count = width // COLUMNS, 0 if weights_TW is None else weights_TW.shape[1] // times
    item = 0 if weights_TW is None else weights_TW.element_size()
    scales_NC = hidden_TD.new_zeros(tokens * times, _columns(width, count * item), dtype=torch.float32)
    scales_NC[:, :own] = (amax_TB / _LARGEST).repeat_interleave(times, dim=0)
    if weights_TW is not None:
        behind = scales_NC.view(torch.uint8)[:, own * _WORD : own * _WORD + count * item]
        behind.copy_(row_bytes.packed(weights_TW).view(torch.uint8).view(tokens * times, count * item))
    rows_ND = rows_TD if times == 1 else rows_TD.view(torch.uint8).repeat_interleave(times, dim=0).view(FLOAT8)
    return rows_ND, scales_NC


def unpack(rows: Rows, index_M: Tensor) -> Tensor:
    """bfloat16 ``[M, D]``, the hidden states of some rows of `pack`."""
    # Selected as bytes: not every version of torch selects rows of float8.
    rows_MD = rows[0].view(torch.uint8).index_select(0, index_M).view(FLOAT8)
    width = rows_MD.shape[1]
    scales_MB = rows[1][:, : width // COLUMNS].index_select(0, index_M)
    blocks_MBC = rows_MD.view(-1, width // COLUMNS, COLUMNS).float() * scales_MB.unsqueeze(2)
    return blocks_MBC.view(-1, width).to(torch.bfloat16)


def unpack_weights(rows: Rows, weights: int, dtype: torch.dtype) -> Tensor:
    """``[N, W]``, the weights of all rows of `pack`."""
    begin = rows[0].shape[1] // COLUMNS * _WORD
    return row_bytes.copied(rows[1].view(torch.uint8)[:, begin : begin + weights * dtype.itemsize]).view(dtype)


def _columns(width: int, weight_bytes: int) -> int:
    return -(-(width // COLUMNS * _WORD + weight_bytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES // _WORD
