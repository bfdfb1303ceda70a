"""Proves that a job trains the same wherever its experts are: it runs a few steps in several layouts, and everything is
compared."""

from .report import Report
from .runs import verify, verify_command

__all__ = ["Report", "verify", "verify_command"]
