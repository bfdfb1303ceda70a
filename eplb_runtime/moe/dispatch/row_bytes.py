"""Rows as a transport takes them that knows bfloat16 only: nothing is rounded on the way that was not bfloat16 before.

Towards the experts a transport copies rows, so any bytes can stand in them: a hidden state with its router weights
behind it. On the way back it adds rows up, in float32: bfloat16 columns are added as such, and whatever else has to
stay as it is travels a byte a column, since each column then has one summand that is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROW_BYTES = 32
"""DeepEP's kernels copy rows in halves of 16 bytes a channel."""
WIRE_DTYPE = torch.bfloat16


def pack(hidden_TD: Tensor, weights_TW: Tensor | None, times: int = 1) -> Tensor:
    """Return bfloat16 ``[T * times, C]``: rows with a hidden state and a share of the token's weights."""
    tokens = hidden_TD.shape[0]
    hidden = _columns(hidden_TD)
    weights = None if weights_TW is None else _columns(weights_TW)
    own, more = hidden.shape[1], 0 if weights is None else weights.shape[1] // times
    rows = torch.empty(tokens, times, _wide(own + more), dtype=WIRE_DTYPE, device=hidden.device)
    rows[:, :, :own] = hidden.unsqueeze(1)
    if weights is not None:
        rows[:, :, own : own + more] = weights.view(tokens, times, more)
    return rows.flatten(0, 1)


def unpack(rows_NC: Tensor, index_M: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return ``[M, D]``, the hidden states of some rows of `pack`."""
    # Its own memory and no view: whoever computes may write there.
    hidden = torch.empty(index_M.shape[0], width, dtype=dtype, device=rows_NC.device)
    own = rows_NC[:, : width * dtype.itemsize // WIRE_DTYPE.itemsize]
    torch.index_select(own, 0, index_M, out=hidden.view(WIRE_DTYPE))
    return hidden


def unpack_weights(rows_NC: Tensor, behind: torch.dtype, width: int, weights: int, dtype: torch.dtype) -> Tensor:
    """``[N, W]``, the weights of all rows of `pack`, behind hidden states of ``width`` in the dtype ``behind``."""
    begin = width * behind.itemsize // WIRE_DTYPE.itemsize
    columns = rows_NC[:, begin : begin + weights * dtype.itemsize // WIRE_DTYPE.itemsize]
    return copied(columns).view(dtype)


def pack_sums(rows_ND: Tensor, exact_NW: Tensor | None) -> Tensor:
    """Return bfloat16 ``[N, C]``, a multiple of 32 bytes wide: rows to be added up on the way, bfloat16 as it is, all
    else by bytes (then it must be the only summand). Each value of ``exact_NW`` is zero in all summands but one."""
    parts = [rows_ND if rows_ND.dtype == WIRE_DTYPE else _bytes(rows_ND)]
    if exact_NW is not None:
        parts.append(_bytes(exact_NW))
    own = sum(part.shape[1] for part in parts)
    if _wide(own) > own:
        parts.append(rows_ND.new_zeros(rows_ND.shape[0], _wide(own) - own, dtype=WIRE_DTYPE))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def unpack_sums(
    rows_NC: Tensor, width: int, dtype: torch.dtype, exact: int, exact_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What `pack_sums` has put in, added up: ``[N, D]`` and ``[N, W]``, W = ``exact``."""
    own = width if dtype == WIRE_DTYPE else width * dtype.itemsize
    rows_ND = rows_NC[:, :own]
    return (
        rows_ND.contiguous() if dtype == WIRE_DTYPE else _value(rows_ND, dtype),
        _value(rows_NC[:, own : own + exact * exact_dtype.itemsize], exact_dtype),
    )


def _wide(columns: int) -> int:
    step = _ROW_BYTES // WIRE_DTYPE.itemsize
    return -(-columns // step) * step


def packed(values: Tensor) -> Tensor:
    """Contiguous, in its strides too: one column, or no rows, pass for contiguous whatever theirs are."""
    return values if values.is_contiguous() and values.stride(-1) == 1 else copied(values)


def copied(values: Tensor) -> Tensor:
    """In memory of its own, which begins where any dtype may; also of one row or none, which pass for contiguous."""
    return torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)


def _columns(values: Tensor) -> Tensor:
    return packed(values).view(WIRE_DTYPE)


def _bytes(values: Tensor) -> Tensor:
    """A column for each byte: bfloat16 has all numbers up to 256."""
    return packed(values).view(torch.uint8).to(WIRE_DTYPE)


def _value(columns: Tensor, dtype: torch.dtype) -> Tensor:
    return columns.to(torch.uint8).view(dtype)
