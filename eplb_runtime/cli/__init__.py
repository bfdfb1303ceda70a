"""The ``eplb-runtime`` command: one file a command, and what they share."""

from .program import main

__all__ = ["main"]
