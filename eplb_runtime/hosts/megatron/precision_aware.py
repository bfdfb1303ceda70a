"""State that TransformerEngine's FusedAdam keeps for an expert (``use_precision_aware_optimizer``): tensors in dtypes
of their own, some with a scale.

Its accessors give copies in float32, which would round once more when they are written back, so raw tensors move, and
their scales with them. Written after TransformerEngine's source: `check_layout` tries at attach whether it holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attaching.description import AttachError
from .offloaded import MAIN, is_offloaded

_MASTER = "master_param"
"""TransformerEngine's key of the master, or of the 16 bits of it that a weight in bfloat16 lacks."""
_SCALED = (torch.float16,)
"""Dtypes whose numbers are to be multiplied by a scale. bfloat16 has one, too, which is always 1."""
_TRIED = 64
"""Numbers that are written and read back."""


def is_precision_aware(leaf: Any) -> bool:
    """Return whether a leaf's state is in dtypes of its own, on the device."""
    return bool(getattr(leaf.config, "use_precision_aware_optimizer", False)) and not is_offloaded(leaf.optimizer)


def raw_state(optimizer: Any, given: Tensor) -> dict[str, Tensor]:
    """Live memory by key: `MAIN` for the master, and each scale after what it belongs to; empty before the first step.

    Args:
        given: what the optimizer steps in the place of a parameter.
    """
    found = {}
    for key, value in optimizer.state.get(given, {}).items():
        name = MAIN if key == _MASTER else key
        found[name] = value
        if value.dtype in _SCALED:
            found[f"{name}_scale"] = optimizer._scales[given][key]
    return found


def check_layout(optimizer: Any, given: Tensor) -> None:
    """Write numbers by the optimizer's own accessor, carry their raw memory to another tensor, and read them there.

    Args:
        given: one that it steps.

    Raises:
        AttachError: they are not the same, or there is no such accessor.
    """
    here, there = (torch.zeros(_TRIED, dtype=given.dtype, device=given.device) for _ in range(2))
    numbers = torch.linspace(-3, 5, _TRIED, dtype=torch.float32, device=given.device)
    try:
        for number, key in enumerate(("exp_avg", "exp_avg_sq", *([_MASTER] if optimizer.master_weights else []))):
            _set(optimizer, here, key, numbers * (number + 1))
            _set(optimizer, there, key, torch.ones_like(numbers))
        source, target = raw_state(optimizer, here), raw_state(optimizer, there)
        same = list(source) == list(target)
        for key, value in source.items():
            target[key].copy_(value)
        for key in list(optimizer.state[here]):
            read = optimizer.get_unscaled_state(there, key)
            same &= torch.equal(read, optimizer.get_unscaled_state(here, key)) and bool(read.any())
    except (AttributeError, KeyError, TypeError, AssertionError, RuntimeError) as error:
        raise AttachError(_unknown(optimizer, f"{type(error).__name__}: {error}")) from None
    finally:
        for tensor in (here, there):
            optimizer.state.pop(tensor, None)
            getattr(optimizer, "_scales", {}).pop(tensor, None)
    if not same:
        raise AttachError(_unknown(optimizer, "what was read is not what was written"))


def _set(optimizer: Any, tensor: Tensor, key: str, numbers: Tensor) -> None:
    remainders = getattr(optimizer, "store_param_remainders", False) and tensor.dtype == torch.bfloat16
    optimizer.set_scaled_state(tensor, key, numbers.to(torch.int16) if remainders and key == _MASTER else numbers)


def _unknown(optimizer: Any, what: str) -> str:
    return (
        f"{type(optimizer).__name__} keeps its state in another way than TransformerEngine's FusedAdam is known to "
        f"({what}): set use_precision_aware_optimizer=False"
    )
