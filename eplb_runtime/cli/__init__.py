"""The ``eplb-runtime`` command."""

from .commands import main

__all__ = ["main"]
