"""Optional packages that need a GPU: whether there is one for them, and one line where they cannot be imported."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ...config import ConfigError
from ...utils.errors import one_line


def no_gpu(device: torch.device | None = None) -> str:
    """Why kernels for Hopper GPUs and newer cannot carry here, in a line; empty: they can.

    Args:
        device: the model's; None: the one that torch sees.
    """
    if device is not None and device.type != "cuda":
        return f"it carries between GPUs, and this model is on {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it is for Hopper and newer"
    return ""


def imported(name: str, asked: str, install: str) -> Any:
    """A package.

    Args:
        asked: the setting that wants it, for messages.
        install: how to get it.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{asked} needs the package {name} (no module {error.name}): {install}") from None
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        reason = one_line(error)
        raise ConfigError(f"{asked}: the package {name} cannot be imported ({reason}): {install}") from None
