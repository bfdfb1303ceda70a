"""FP8 weights that TransformerEngine's layers keep of experts whose own weights are bf16 or fp32.

They are made anew in the first micro-batch of a step, which Megatron marks by ``is_first_microbatch``, and used in the
others. A forward outside of its schedules is marked by nobody, so it is marked here after each commit.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...moe.layer import HostDispatchedLayer

_MARK = "is_first_microbatch"


class WeightCaches:
    """Quantized weights of a layer's experts."""

    def __init__(self, experts: nn.Module, columns: HostDispatchedLayer) -> None:
        self._experts, self._columns = experts, columns
        self._followed = 0

    def follow(self) -> None:
        """Ahead of the experts of a forward: have weights quantized anew if the placement has changed."""
        if self._followed != self._columns.changes:
            self._followed = self._columns.changes
            for part in self._experts.modules():
                if hasattr(part, _MARK):
                    setattr(part, _MARK, True)


def why_not_followed(name: str, module: Any) -> str:
    """Return why the experts of a layer would not have their weights quantized anew, or ""."""
    if getattr(module.config, "fp8", None) is None:
        return ""
    for own, part in module.experts.named_modules():
        weights = list(part.parameters(recurse=False))
        which = f"{name}.experts.{own} ({type(part).__name__})"
        if weights and not hasattr(part, _MARK):
            return f"{which} has no {_MARK}: when it quantizes its weights anew is not known; leave fp8 out"
        if any(hasattr(weight, "_quantizer") for weight in weights):
            return f"{which} has weights that are FP8 themselves, which cannot be moved yet: set fp8_param_gather=False"
    return ""
