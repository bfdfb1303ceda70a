"""Proves that a job trains the same wherever its experts are: runs a few steps in several layouts, and compares all."""

from .records import Report
from .runs import verify, verify_command

__all__ = ["Report", "verify", "verify_command"]
