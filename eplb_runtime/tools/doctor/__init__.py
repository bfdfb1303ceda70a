"""Forecast of what a job will find: memory of a model, and what is usable here."""

from .links import TransportTrial, try_transports
from .machine import backends, versions
from .memory import DoctorError, memory_of

__all__ = ["DoctorError", "TransportTrial", "backends", "memory_of", "try_transports", "versions"]
