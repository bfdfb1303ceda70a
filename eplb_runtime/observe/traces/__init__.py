"""Traces of torch.profiler, of one rank or of many: where time went."""

from .analysis import Analysis, analyse
from .reading import TraceError, traces_in

__all__ = ["Analysis", "TraceError", "analyse", "traces_in"]
