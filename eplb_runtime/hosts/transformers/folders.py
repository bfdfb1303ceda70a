"""The library's checkpoint folders, as `checkpoint.weights.PretrainedFolders`."""

from .export import write
from .naming import stored_names as names
from .naming import write_config as describe
from .weights import PretrainedFolder as opened

__all__ = ["describe", "names", "opened", "write"]
