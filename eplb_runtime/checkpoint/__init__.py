"""State in logical order, independent of placement and of the number of ranks: in memory, on disk, as a framework's.

Nothing here knows a framework: its folders are read and written by the attached host.
"""

from .disk import async_save, save
from .restore import export_pretrained, load, load_logical_state_dict, load_pretrained
from .state import CheckpointError, logical_state_dict
from .stream import ExportError

__all__ = [
    "CheckpointError",
    "ExportError",
    "async_save",
    "export_pretrained",
    "load",
    "load_logical_state_dict",
    "load_pretrained",
    "logical_state_dict",
    "save",
]
