"""What a job will find, before it is started: memory of each choice, what is usable here, what will be exact."""

from .diagnosis import Diagnosis, DoctorError, Item, ModelShape, diagnose
from .exactness import Exactness, Width
from .links import TransportTrial, try_transports
from .machine import Backend

__all__ = [
    "Backend",
    "Diagnosis",
    "DoctorError",
    "Exactness",
    "Item",
    "ModelShape",
    "TransportTrial",
    "Width",
    "diagnose",
    "try_transports",
]
