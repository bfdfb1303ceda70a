"""State in logical order, independent of placement and of the number of ranks: in memory, with DCP, as Hugging Face's.

Nothing here knows a framework: what is Hugging Face's is in ``hosts/transformers_weights.py``.
"""

from .dcp import LogicalState, async_save, load, save
from .state import CheckpointError, load_logical_state_dict, logical_state_dict

__all__ = [
    "CheckpointError",
    "LogicalState",
    "async_save",
    "load",
    "load_logical_state_dict",
    "logical_state_dict",
    "save",
]
