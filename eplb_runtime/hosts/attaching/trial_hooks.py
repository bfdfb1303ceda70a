"""Hooks into torch for a run under ``eplb-runtime verify``, and the processes that it has started."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_NO_CLIPPING = 1e6
"""Norms that are given to `clip_grad_norm_` to learn of the norm alone."""


def descendants(process: int | str = "self") -> list[int]:
    """Return the processes that a process has started, and that these have."""
    found: list[int] = []
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found + [one for child in found for one in descendants(child)]


def listen(losses: list[Tensor], before_forward: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Collect what ``backward()`` is called on, and call functions before each module's forward and after each backward
    pass. Returns one that ends all."""
    inner: Any = torch.autograd._engine_run_backward

    def run(outputs: Any, grad_outputs: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = inner(outputs, grad_outputs, retain, create, inputs, *args, **kwargs)
        if kwargs.get("accumulate_grad"):
            losses.extend(root.detach() for root in outputs if isinstance(root, Tensor) and root.numel() == 1)
            after()
        return found

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
    handle = nn.modules.module.register_module_forward_pre_hook(before_forward)

    def undo() -> None:
        torch.autograd._engine_run_backward = inner
        handle.remove()

    return undo


def let_clipping_bite(now: Callable[[], tuple[int, float]]) -> Callable[[], None]:
    """Let torch's clipping bite in each step: half of the norm of the step before is allowed, or half of the largest
    element then. ``now`` gives the step's number and that element. Returns what ends it."""
    norms: dict[object, float] = {}  # by what is clipped, and how often it was in this step
    seen: Counter[object] = Counter()
    at = -1
    module = torch.nn.utils.clip_grad
    # Loops have the function that sees to no_grad; what it calls is in its closure.
    inside = next((cell for cell in module.clip_grad_value_.__closure__ or () if callable(cell.cell_contents)), None)
    by_norm = module._clip_grads_with_norm_
    by_value: Any = None if inside is None else inside.cell_contents

    def clip_norm(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
        nonlocal at
        if at != now()[0]:
            seen.clear()
        at = now()[0]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        seen[shapes := tuple(one.shape for one in parameters)] += 1
        key = shapes, seen[shapes]
        norm = float(total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm)
        half = norms.setdefault(key, norm) / 2
        bites = 0 < half < math.inf and max_norm < _NO_CLIPPING
        if 0 < norm < math.inf:
            norms[key] = norm
        by_norm(parameters, min(half, max_norm) if bites else max_norm, total_norm, *args, **kwargs)

    def clip_value(parameters: Any, value: float, *args: Any, **kwargs: Any) -> None:
        by_value(parameters, min(float(value), now()[1] / 2 or math.inf), *args, **kwargs)

    def undo() -> None:
        module._clip_grads_with_norm_ = by_norm
        if inside is not None:
            inside.cell_contents = by_value

    module._clip_grads_with_norm_ = clip_norm
    if inside is not None:
        inside.cell_contents = clip_value
    return undo
