"""What a job will find, before it is started: memory of each choice, what is usable here, what will be exact."""

from .links import TransportTrial, try_transports
from .machine import Backend, Exactness, Width
from .memory import Diagnosis, DoctorError, Item, diagnose

__all__ = [
    "Backend",
    "Diagnosis",
    "DoctorError",
    "Exactness",
    "Item",
    "TransportTrial",
    "Width",
    "diagnose",
    "try_transports",
]
