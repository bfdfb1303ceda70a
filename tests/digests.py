"""Digests of tensors that are compared to the bit.

A rank that trains several times keeps them in place of the tensors, which the balancer would look through before each
move as a user's own copies of experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A digest of the bits of each tensor, after its dtype and shape."""
    return {name: _digest(tensor.detach()) for name, tensor in tensors.items()}


def _digest(tensor: Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {[*tensor.shape]} {hashlib.blake2b(content).hexdigest()}"
