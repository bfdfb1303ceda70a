"""State in logical order, independent of placement and of the number of ranks: in memory, with DCP, as Hugging Face's.

Nothing here knows a framework: what is Hugging Face's is in ``hosts/transformers_weights.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .dcp import LogicalState, async_save, load, save
from .state import CheckpointError, load_logical_state_dict, logical_state_dict

if TYPE_CHECKING:
    from ..hosts.transformers_weights import export_pretrained, load_pretrained

__all__ = [
    "CheckpointError",
    "LogicalState",
    "async_save",
    "export_pretrained",
    "load",
    "load_logical_state_dict",
    "load_pretrained",
    "logical_state_dict",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in ("export_pretrained", "load_pretrained"):
        return getattr(import_module("eplb_runtime.hosts.transformers_weights"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
