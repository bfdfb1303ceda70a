"""Our Triton kernels in the place of plain torch on this rank's GPU, each once it has given the same there.

A kernel that fails to compile, or gives other bits than its reference, is one line in the log, and torch stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checksum import HASH_BLOCK_BYTES, block_hashes
from .routing.splitter import deal_out

logger = logging.getLogger("eplb_runtime")

_CHOICES = (2048, 8)
"""Tokens and choices of a batch that is tried."""


@dataclass(frozen=True)
class Kernels:
    """What is computed by a kernel, or by plain torch.

    Args:
        deal: as `routing.splitter.deal_out`.
        hash_blocks: as `checksum.block_hashes`.
    """

    deal: Callable[[Tensor, Tensor, Tensor], Tensor] = deal_out
    hash_blocks: Callable[[Tensor], Tensor] = block_hashes


def kernels_for(device: torch.device, num_experts: int) -> Kernels:
    """Kernels for this device, tried out on it; plain torch where there is no GPU or no Triton.

    Args:
        num_experts: E, logical experts of a layer.
    """
    if device.type != "cuda":
        logger.info("kernels=True: they are for GPUs; on %s plain torch is used", device.type)
        return Kernels()
    from .on_triton import triton

    if triton is None:
        logger.warning("kernels=True: there is no Triton here, so plain torch is used: pip install triton")
        return Kernels()
    from .checksum_kernel import launch
    from .routing.kernels import deal_by_kernels

    return Kernels(
        if_equal("dealing choices out to copies", deal_by_kernels, deal_out, _choices(device, num_experts)),
        if_equal("hashes of blocks", launch, block_hashes, _blocks(device)),
    )


def if_equal(
    name: str,
    kernel: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    examples: Iterable[tuple[Any, ...]],
) -> Callable[..., Tensor]:
    """The kernel, if it gives what the reference gives for each of the examples; otherwise the reference."""
    try:
        for example in examples:
            if not torch.equal(kernel(*example), reference(*example)):
                raise ValueError("it gives something else")
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning("kernel for %s: %s; plain torch is used", name, said)
        return reference
    return kernel


def _choices(device: torch.device, experts: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Batches with quotas over 1, 2 and 5 copies, some of them empty."""
    generator = torch.Generator().manual_seed(0)
    for copies in (1, 2, 5):
        ids_TK = (torch.rand(_CHOICES, generator=generator) ** 2 * experts).long()
        left_E = torch.bincount(ids_TK.flatten(), minlength=experts)
        sent_EC = torch.zeros(experts, copies, dtype=torch.int64)
        for copy in range(copies - 1):
            sent_EC[:, copy] = left_E // (copy + 2)
            left_E = left_E - sent_EC[:, copy]
        sent_EC[:, -1] = left_E
        slots_EC = torch.randperm(experts * copies, generator=generator).view(experts, copies)
        yield ids_TK.to(device), sent_EC.to(device), slots_EC.to(device)


def _blocks(device: torch.device) -> Iterable[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for blocks, skipped in ((0, 0), (3, 0), (1000, 0), (37, 1)):
        data = torch.randint(256, (blocks * HASH_BLOCK_BYTES + skipped,), generator=generator, dtype=torch.uint8)
        yield (data.to(device)[skipped:],)
