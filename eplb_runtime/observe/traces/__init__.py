"""Traces of torch.profiler, of one rank or of many: where time went, how two jobs differ, one file for all ranks."""

from .analysis import Analysis, analyse
from .merging import Merged, merge
from .reading import TraceError
from .summary import Change, MarkedSteps, TraceComparison, compare, together, traces_in

__all__ = [
    "Analysis",
    "Change",
    "MarkedSteps",
    "Merged",
    "TraceComparison",
    "TraceError",
    "analyse",
    "compare",
    "merge",
    "together",
    "traces_in",
]
