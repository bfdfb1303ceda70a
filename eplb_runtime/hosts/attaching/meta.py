"""A model on the meta device, which has shapes and no memory, is given memory: each rank its own experts and the rest.

What a checkpoint will bring is NaN until it is loaded, so that a load that was forgotten shows. What no checkpoint
holds (non-persistent buffers, such as rotary frequencies) is made by the model's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


class MetaError(ValueError):
    """The model cannot be made from the meta device."""


def has_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in [*model.parameters(), *(buffer for _, buffer in model.named_buffers())])


def blank(size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN where the dtype has it, else zeros."""
    return torch.full(size, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def make_buffers(model: nn.Module, device: torch.device, remake: Callable[[nn.Module], None]) -> None:
    """Give meta buffers memory; the model's own code, or MetaError, fills those that checkpoints leave out."""
    for module in model.modules():
        missing = [name for name, _ in _meta_buffers(module) if name in module._non_persistent_buffers_set]
        filled = []
        for value in (0, 1):
            for name in missing:
                module._buffers[name] = torch.full_like(module._buffers[name], value, device=device)  # type: ignore[arg-type]
            if missing:
                remake(module)
            filled.append([module._buffers[name].clone() for name in missing])  # type: ignore[union-attr]
        for name, first, second in zip(missing, *filled, strict=True):
            # Whatever its code leaves as it was, is different after two different starts.
            if not torch.equal(first, second):
                raise MetaError(
                    f"buffer {name} of {type(module).__name__} is in no checkpoint and the model's code does not make "
                    "it anew: build the model with its buffers off the meta device"
                )
        for name, buffer in _meta_buffers(module):
            module._buffers[name] = blank(buffer.shape, buffer.dtype, device)


def make_parameters(model: nn.Module, device: torch.device) -> None:
    """Give memory to all meta parameters; they stay the same objects, for the optimizer and for ties."""
    for parameter in model.parameters():
        if parameter.is_meta:
            made = nn.Parameter(blank(parameter.shape, parameter.dtype, device), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, made)


def _meta_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            yield name, buffer
