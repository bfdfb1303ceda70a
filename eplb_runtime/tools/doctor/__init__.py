"""What a job will find usable on this machine."""

from .links import TransportTrial, try_transports
from .machine import backends, versions

__all__ = ["TransportTrial", "backends", "try_transports", "versions"]
