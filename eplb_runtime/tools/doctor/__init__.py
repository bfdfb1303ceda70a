"""What a job will find, before it is started: memory of each choice, what is usable here, what will be exact."""

from .diagnosis import Diagnosis, DoctorError, Item, ModelShape, diagnose
from .exactness import Exactness, Width
from .links import Carrier, try_transports
from .machine import Backend

__all__ = [
    "Backend",
    "Carrier",
    "Diagnosis",
    "DoctorError",
    "Exactness",
    "Item",
    "ModelShape",
    "Width",
    "diagnose",
    "try_transports",
]
