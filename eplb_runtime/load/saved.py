"""Measured load as JSON, for what a job saves of itself; read back only into an array of the size that it names."""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .counter import LoadCounter

logger = logging.getLogger("eplb_runtime")


LONGEST = 1 << 20
"""Windows; far more than any history has."""


def saved_load(
    history: Sequence[NDArray[np.int64]], counter: LoadCounter, summed: Callable[[Tensor], NDArray[np.int64]]
) -> dict[str, Any]:
    """What the next decisions look at, JSON-able.

    Args:
        history: of all ranks, int64 ``[L, E]`` each, oldest first.
        counter: of this rank, with what was counted since.
        summed: buckets over all ranks; raises RuntimeError where the ranks cannot sum now, then they are left out.
    """
    state: dict[str, Any] = {"steps_per_bucket": counter.steps_per_bucket}
    if history:
        state["history"] = encode(np.stack(history))
    if counter.open_steps:
        try:
            state |= {"open": encode(summed(counter.look())), "open_steps": counter.open_steps}
        except RuntimeError as error:
            logger.warning("the load since the last decision is not saved: %s", error)
    return state


def resume_load(
    state: Mapping[str, Any], history: deque[NDArray[np.int64]], counter: LoadCounter, share: int | None
) -> None:
    """Let history and counter go on from what `saved_load` gave.

    Args:
        share: 1 on the one rank that takes what all had counted since the last decision (only sums matter), 0 on the
            others; None: nobody does.

    Raises:
        ValueError: it is for another model or broken; nothing is changed then.
    """
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
    """All windows that `saved_load` kept, of whatever interval: int64 ``[T, L, E]``, oldest first; None: no tokens.

    Raises:
        ValueError: they are for another model or broken.
    """
    kept = [state[name] for name in ("history", "open") if name in state] if isinstance(state, Mapping) else []
    windows = [decode(one, num_layers, num_experts, LONGEST) for one in kept]
    load = np.concatenate(windows) if windows else np.zeros((0, num_layers, num_experts), dtype=np.int64)
    return load if load.any() else None


def encode(load: NDArray[np.int64]) -> dict[str, Any]:
    """int64 ``[T, L, E]`` as JSON; much smaller than lists of numbers."""
    data = zlib.compress(np.ascontiguousarray(load, dtype="<i8").tobytes())
    return {"shape": list(load.shape), "data": base64.b64encode(data).decode()}


def decode(saved: Any, num_layers: int, num_experts: int, most_windows: int) -> NDArray[np.int64]:
    """What `encode` wrote, at most the newest ``most_windows``.

    Raises:
        ValueError: it is something else, for another model, or longer than any job keeps.
    """
    try:
        windows, layers, experts = (int(length) for length in saved["shape"])
        data = base64.b64decode(saved["data"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"not a saved load: {type(error).__name__}: {error}") from None
    if (layers, experts) != (num_layers, num_experts) or not 0 <= windows <= LONGEST:
        raise ValueError(f"the saved load has shape {saved['shape']}, not [windows, {num_layers}, {num_experts}]")
    nbytes = 8 * windows * layers * experts
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, nbytes + 1)
    except zlib.error as error:
        raise ValueError(f"the saved load cannot be read: {error}") from None
    if len(raw) != nbytes:
        raise ValueError("the saved load has another size than it says")
    load = np.frombuffer(raw, dtype="<i8").astype(np.int64).reshape(windows, layers, experts)
    return load[max(0, windows - most_windows) :]
