"""Experts become bytes and experts again on the device; the checksum notices what a wire can do to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import DEVICE
from records import pack

from eplb_runtime.moe.experts.elementwise import check_elementwise
from eplb_runtime.moe.experts.optimizer_state import OptimizerStateError
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
    record_format = RecordFormat.of(experts)
    device = torch.device("cpu") if pinned else DEVICE
    record = torch.empty(record_format.nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    before = [t.tensor.clone() for t in experts]
    addresses = [t.tensor.data_ptr() for t in experts]
    pack(record_format, 1, record)
    record_format.unpack(record, 3)
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


def test_words_that_change_places_or_pairwise_are_noticed() -> None:
    row = torch.arange(4096, dtype=torch.float32).to(DEVICE)
    whole = checksum([as_bytes(row)])
    assert checksum([as_bytes(row[torch.arange(4095, -1, -1, device=DEVICE)])]) != whole
    constant = [checksum([as_bytes(torch.full((4096,), value, device=DEVICE))]) for value in (0.0, 1.0, 2.0)]
    assert len(set(constant)) == 3


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 13, 64])
def test_the_checksum_of_a_row_does_not_depend_on_where_it_stands(offset: int) -> None:
    row = torch.randint(0, 256, (5000,), dtype=torch.uint8, device=DEVICE)
    room = torch.zeros(6000, dtype=torch.uint8, device=DEVICE)
    room[offset : offset + 5000] = row
    assert checksum([room[offset : offset + 5000]]) == checksum([row])


class OnAGpuAlone(torch.optim.Optimizer):
    """As TransformerEngine's and Apex's: its kernels know no tensors on a CPU, and no float64."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.is_cuda or parameter.dtype == torch.float64:
                    raise RuntimeError("tensors on a GPU are wanted, float32 at most")
                parameter.sub_(parameter.grad, alpha=group["lr"])


def test_an_optimizer_is_tried_on_the_device_of_its_parameters() -> None:
    before = torch.cuda.get_rng_state()
    check_elementwise(OnAGpuAlone([torch.nn.Parameter(torch.ones(4, 3, 5, device=DEVICE))]))
    assert torch.equal(before, torch.cuda.get_rng_state())
    with pytest.raises(OptimizerStateError, match="OnAGpuAlone cannot update tensors of experts"):
        check_elementwise(OnAGpuAlone([torch.nn.Parameter(torch.ones(4, 3, 5))]))
