"""Experts become bytes and experts again on the device; the checksum notices what a wire can do to them."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE

from eplb_runtime.moe.experts.record import RecordFormat
from eplb_runtime.moe.experts.registry import ExpertTensor
from eplb_runtime.utils.checksums import as_bytes, checksum

pytestmark = pytest.mark.gpu


def tensors() -> list[ExpertTensor]:
    """Rows of many sizes and dtypes, as of a model with its optimizer state; some are no multiple of the alignment."""
    generator = torch.Generator().manual_seed(0)

    def make(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> ExpertTensor:
        values = torch.randint(0, 256, (4, *shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
        return ExpertTensor(name, values.view(dtype).squeeze(-1).to(DEVICE), "parameter")

    return [
        make("weight", (33, 7), torch.bfloat16),
        make("weight/master", (33, 7), torch.float32),
        make("weight/exp_avg", (33, 7), torch.float64),
        make("bias", (3,), torch.float16),
        make("scale", (), torch.float8_e4m3fn),
        make("step", (), torch.int64),
        make("wide", (600, 1000), torch.float32),
    ]


@pytest.mark.parametrize("pinned", [False, True], ids=["on the device", "through pinned memory"])
def test_a_record_brings_every_bit_to_another_slot(pinned: bool) -> None:
    experts = tensors()
    record_format = RecordFormat(tuple(experts))
    device = torch.device("cpu") if pinned else DEVICE
    record = torch.empty(record_format.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    before = [t.tensor.clone() for t in experts]
    addresses = [t.tensor.data_ptr() for t in experts]
    record_format.row(1).pack(record)
    record_format.row(3).unpack(record)
    for t, old in zip(experts, before, strict=True):
        for slot, source in enumerate((0, 1, 2, 1)):
            assert torch.equal(as_bytes(t.tensor[slot]), as_bytes(old[source])), f"{t.name}, slot {slot}"
    assert [t.tensor.data_ptr() for t in experts] == addresses


@pytest.mark.parametrize("nbytes", [1, 15, 16, 1023, 1024, 1025, 70_001])
def test_a_single_flipped_bit_is_noticed(nbytes: int) -> None:
    row = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes))
    row = row.to(DEVICE)
    whole = checksum([row])
    for at in {0, nbytes // 3, nbytes // 2, nbytes - 1}:
        for bit in (1, 128):
            row[at] ^= bit
            assert checksum([row]) != whole, f"byte {at}"
            row[at] ^= bit
    assert checksum([row]) == whole
