"""Traces of torch.profiler, of one rank or of many: where time went."""

from .analysis import Analysis, analyse, together
from .reading import TraceError, traces_in

__all__ = ["Analysis", "TraceError", "analyse", "together", "traces_in"]
