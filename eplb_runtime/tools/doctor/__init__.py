"""What a job will find, before it is started: memory of each choice, what is usable here."""

from .links import TransportTrial, try_transports
from .memory import Diagnosis, DoctorError, diagnose

__all__ = ["Diagnosis", "DoctorError", "TransportTrial", "diagnose", "try_transports"]
