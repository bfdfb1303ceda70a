"""NIXL's agents: whether this process can make one, and how they are made."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .base import TransportError

PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_DEVICES = Path("/sys/class/infiniband")


def rdma_devices() -> list[str]:
    """Of this host."""
    return sorted(device.name for device in _DEVICES.iterdir()) if _DEVICES.is_dir() else []


def why_not() -> str:
    """What this process lacks to use NIXL; empty: nothing. Makes an agent and destroys it."""
    try:
        new_agent(f"probe {secrets.token_hex(8)}")
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def new_agent(name: str) -> Any:
    """Return an agent of NIXL's with the UCX back end; TransportError: the package is missing, or built without UCX."""
    found = next((package for package in PACKAGES if importlib.util.find_spec(package)), None)
    if found is None:
        raise TransportError("the nixl package is not installed: pip install 'eplb-runtime[nixl]'")
    api = importlib.import_module(f"{found}._api")
    api.logger.setLevel(logging.WARNING)  # else each agent says so on the standard output
    with _without_memory_of_others():
        agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    if "UCX" not in agent.backends:
        raise TransportError("this build of nixl has no UCX")
    return agent


@contextlib.contextmanager
def _without_memory_of_others() -> Iterator[None]:
    """Inside, UCX does not choose ways that write into another process without its help: nothing could end them."""
    if "UCX_TLS" in os.environ:
        yield
        return
    os.environ["UCX_TLS"] = "^sm"
    try:
        yield
    finally:
        del os.environ["UCX_TLS"]
