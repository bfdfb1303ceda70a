"""Megatron-Core's newest supported version, and emerging-optimizers, from which it takes Newton-Schulz for Muon.

Their wheels are for Python 3.12 and up. ``launch/test.sh`` unpacks them into folders of the virtual environment, and
their Python is run from there.
"""

import importlib.util
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

VERSION = "0.19.2"
NEWER = Path(sys.prefix) / f"megatron-core-{VERSION}"
WHY_NOT = f"no Megatron-Core {VERSION} in {NEWER}: launch/test.sh fetches it"
MUON_VERSION = "0.3.0"
MUON = Path(sys.prefix) / f"emerging-optimizers-{MUON_VERSION}"


def importable() -> None:
    """Let Python 3.11 import both, which need `typing.override`, and Google's logging."""
    if str(NEWER) not in sys.path:
        sys.path.insert(0, str(NEWER))
        sys.path.append(str(MUON))
    if not hasattr(typing, "override"):
        typing.override = lambda method: method  # type: ignore[attr-defined]
    if "absl" not in sys.modules and importlib.util.find_spec("absl") is None:
        said = types.SimpleNamespace(
            **dict.fromkeys(("debug", "info", "warning", "log_first_n"), lambda *_, **__: None)
        )
        said.INFO = 0
        absl = types.ModuleType("absl")
        absl.logging = said  # type: ignore[attr-defined]
        sys.modules["absl"] = absl


def on_newer(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function(rank, *args)``, on a rank that has imported nothing of Megatron or the newer one."""
    importable()
    import megatron.core

    assert Path(megatron.core.__file__).is_relative_to(NEWER) and megatron.core.__version__.startswith(VERSION)
    return function(rank, *args)
