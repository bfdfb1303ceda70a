"""Is training with migrations the training without? Asked on the user's own model and cluster, before trusting us."""

from .report import Report
from .runs import verify

__all__ = ["Report", "verify"]
