"""Classes and modules that a test changes for a while in ranks that go on with another job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def undone(*changed: type | ModuleType) -> Iterator[None]:
    """Put every attribute of these back at the end."""
    before = [dict(vars(one)) for one in changed]
    try:
        yield
    finally:
        for one, was in zip(changed, before, strict=True):
            for name, value in list(vars(one).items()):
                if name not in was:
                    delattr(one, name)
                elif value is not was[name]:
                    setattr(one, name, was[name])
