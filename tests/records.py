"""An expert's record written in one go; a migration writes it part by part as it sends."""

from __future__ import annotations

import torch
from torch import Tensor

from eplb_runtime.moe.experts.record import RecordFormat


@torch.no_grad()
def pack(record_format: RecordFormat, local_slot: int, record: Tensor) -> None:
    """Copy the live rows of a slot into a uint8 record (on any device)."""
    for field in record_format.fields:
        field.in_bytes(record[field.offset : field.offset + field.nbytes]).copy_(field.live_row(local_slot))
