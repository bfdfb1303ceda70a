"""A kernel takes the place of plain torch only where it gives the same; where choices are dealt out and experts hashed,
it can be put in."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import Tensor
from water_filling_torch import assign_slots

from eplb_runtime.migration import exchange
from eplb_runtime.moe import kernel_selection
from eplb_runtime.moe.dispatch.permute import PLAIN
from eplb_runtime.moe.kernel_selection import Kernels, if_equal, kernels_for
from eplb_runtime.moe.routing.splitter import BatchSplitter, SplitSettings, count_choices, deal_out
from eplb_runtime.placement import Placement
from eplb_runtime.utils.checksums import HASH_BLOCK_BYTES, block_hashes

CPU = torch.device("cpu")
EXAMPLES = list(kernel_selection._choices(CPU, 16))


def test_two_ways_to_deal_choices_out_give_the_same() -> None:
    assert if_equal("dealing", assign_slots, deal_out, EXAMPLES) is assign_slots
    assert all((deal_out(*example) >= 0).all() for example in EXAMPLES)


def test_a_kernel_that_gives_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def last_copy_first(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor) -> Tensor:
        return deal_out(ids_TK, sent_EC.flip(1), copy_slot_EC.flip(1))

    with caplog.at_level(logging.WARNING, "eplb_runtime"):
        assert if_equal("dealing", last_copy_first, deal_out, EXAMPLES) is deal_out
    assert "dealing: it gives something else; plain torch is used" in caplog.text


def test_a_kernel_that_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def fails(data: Tensor) -> Tensor:
        raise RuntimeError("no such instruction\nand a long listing")

    with caplog.at_level(logging.WARNING, "eplb_runtime"):
        assert if_equal("hashes", fails, block_hashes, kernel_selection._blocks(CPU)) is block_hashes
    assert "hashes: no such instruction; plain torch is used" in caplog.text and "listing" not in caplog.text


def test_on_a_cpu_there_are_none() -> None:
    assert kernels_for(CPU, 16, 2, 8) == Kernels() == Kernels(count_choices, deal_out, block_hashes, PLAIN, None)


def test_a_splitter_deals_by_what_it_is_given() -> None:
    placement = Placement.initial(1, 4, 2, 1)
    slots = placement.physical_to_logical.reshape(1, 2, 3).copy()
    slots[0, :, 2] = [2, 0]
    placement = Placement(slots.reshape(1, -1), 4, 2, placement.home)
    batches: list[tuple[Tensor, ...]] = []

    def dealt(*batch: Tensor) -> Tensor:
        batches.append(batch)
        return assign_slots(*batch[:3])

    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    counts_RE = np.array([[4, 2, 1, 1], [4, 0, 0, 0]])
    found = [
        BatchSplitter(placement, CPU, 0, SplitSettings(2, "even", locality=False), deal=deal).route(
            0, ids_TK, counts_RE
        )[0]
        for deal in (None, dealt)
    ]
    assert len(batches) == 1 and torch.equal(*found)


def test_hashes_of_a_device_come_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "HASH_CHUNK_BYTES", 4 * HASH_BLOCK_BYTES)
    sizes = []

    def hashed(data: Tensor) -> Tensor:
        sizes.append(data.numel() // HASH_BLOCK_BYTES)
        return block_hashes(data)

    data = torch.randint(256, (10 * HASH_BLOCK_BYTES,), dtype=torch.uint8)
    assert torch.equal(exchange.in_chunks(data, hashed), block_hashes(data)) and sizes == [4, 4, 2]
