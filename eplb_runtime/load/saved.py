"""Measured load as JSON, for what a job saves of itself; read back only into an array of the size that it names."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .counter import LoadCounter
from .series import LONGEST, decode, encode

logger = logging.getLogger("eplb_runtime")


def saved_load(
    history: Sequence[NDArray[np.int64]], counter: LoadCounter, summed: Callable[[Tensor], NDArray[np.int64]]
) -> dict[str, Any]:
    """Return what the next decisions look at, JSON-able; buckets are left out where the ranks cannot sum them now."""
    state: dict[str, Any] = {"steps_per_bucket": counter.steps_per_bucket}
    if history:
        state["history"] = encode(np.stack(history))
    if counter.open_steps:
        try:
            state |= {"open": encode(summed(counter.peek())), "open_steps": counter.open_steps}
        except RuntimeError as error:
            logger.warning("the load since the last decision is not saved: %s", error)
    return state


def resume_load(
    state: Mapping[str, Any], history: deque[NDArray[np.int64]], counter: LoadCounter, share: int | None
) -> None:
    """Let history and counter go on from what `saved_load` gave. ``share``: 1 on the one rank that takes what all had
    counted since the last decision, 0 on the others; None: nobody does."""
    if not state:
        return
    if state.get("steps_per_bucket") != counter.steps_per_bucket:
        logger.info("the saved load was measured at another interval; forecasts begin anew")
        return
    layers, experts = counter.counts.shape
    most = history.maxlen or LONGEST
    rows = decode(state["history"], layers, experts, most) if "history" in state else ()
    if "open" in state and share is not None:
        counted = torch.from_numpy(decode(state["open"], layers, experts, most))
        counter.resume(counted * share, int(state["open_steps"]))
    history.clear()
    history.extend(rows)


def saved_windows(state: Any, num_layers: int, num_experts: int) -> NDArray[np.int64] | None:
    """Return all windows that `saved_load` kept, int64 ``[T, L, E]``, oldest first; None: no tokens."""
    kept = [state[name] for name in ("history", "open") if name in state] if isinstance(state, Mapping) else []
    windows = [decode(one, num_layers, num_experts, LONGEST) for one in kept]
    load = np.concatenate(windows) if windows else np.zeros((0, num_layers, num_experts), dtype=np.int64)
    return load if load.any() else None
