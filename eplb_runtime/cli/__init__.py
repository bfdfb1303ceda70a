"""The ``eplb-runtime`` command: one file a command, what they share beside them."""

from .program import main

__all__ = ["main"]
