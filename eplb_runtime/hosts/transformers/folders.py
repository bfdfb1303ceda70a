"""The library's checkpoint folders, as `checkpoint.weights.PretrainedFolders`."""

from .export import write
from .naming import stored_names as names
from .naming import write_config as describe
from .weights import read

__all__ = ["describe", "names", "read", "write"]
