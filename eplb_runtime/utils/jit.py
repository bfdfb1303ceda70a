"""numba's compiler with a cache on the disk that notices each change of the compiled sources.

numba's own cache looks at the file of a function alone, not at what that function calls. Here the cache is a folder
named by a digest of all compiled sources of the package, and of those whose constants are compiled into them: after an
update in place nothing old is ever loaded.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, Literal, TypeVar, cast, overload

import numba
import xxhash
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parents[1]
_MARK = b"@jit"
"""What each module has in a line whose functions, or constants in the functions of others, are compiled."""


@overload
def jit(function: Function) -> Function: ...
@overload
def jit(*, error_model: Literal["python", "numpy"]) -> Callable[[Function], Function]: ...
def jit(function: Function | None = None, *, error_model: Literal["python", "numpy"] = "python") -> Any:
    """Compile a function at its first call, without the interpreter's lock, and keep it on the disk."""
    if function is None:
        return lambda function: _cached(function, error_model)
    return _cached(function, error_model)


def _cached(function: Any, error_model: Literal["python", "numpy"]) -> Any:
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(cache_folder())  # read below, for this function only
    try:
        return numba.njit(nogil=True, cache=True, error_model=error_model)(function)
    finally:
        settings.CACHE_DIR = before


_compiling: list[int] = []
"""Threads that compile for this process, or wait for another process that does."""


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Until this ends nothing is compiled but by this thread: `ready` gives other threads the interpreter's way."""
    _compiling.append(threading.get_ident())
    try:
        yield
    finally:
        _compiling.remove(threading.get_ident())


def ready(function: Function) -> Function:
    """Return a compiled function, or, while another thread compiles it, the same as Python's interpreter runs it, a
    hundred times slower: for calls that are rare and small."""
    if is_ready(function):
        return function
    return interpreted(function)


def is_ready(function: Callable[..., Any]) -> bool:
    """Return whether calling a compiled function does not compile what another thread is compiling already."""
    return not _compiling or threading.get_ident() in _compiling or bool(getattr(function, "signatures", True))


@cache
def interpreted(function: Function) -> Function:
    """Return a function of `jit` as Python's interpreter runs it; it must not count on integers that wrap around."""
    plain: Any = getattr(function, "py_func", function)
    called = {name: value for name, value in plain.__globals__.items() if hasattr(value, "py_func")}
    names = {name: interpreted(value) for name, value in called.items() if name in plain.__code__.co_names}
    result = FunctionType(plain.__code__, {**plain.__globals__, **names}, plain.__name__, plain.__defaults__)
    return cast(Function, result)


@cache
def cache_folder() -> Path:
    """Where compiled functions of this package are kept, for these very sources, this Python and this numba."""
    return folder_for(_PACKAGE)


def folder_for(package: Path) -> Path:
    """The folder for a package: in ``NUMBA_CACHE_DIR``, else inside the package, else (it cannot be written) in the
    user's cache, else in the folder for temporary files."""
    for parent in _parents(package):
        folder = parent / _name(package)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return Path(tempfile.gettempdir()) / _name(package)


def remove_older() -> None:
    """Remove what earlier sources of this package left inside it."""
    here = cache_folder()
    if here.parent == _PACKAGE / "__pycache__":
        for other in here.parent.glob(f"{_prefix()}-*"):
            if other != here:
                shutil.rmtree(other, ignore_errors=True)


def _parents(package: Path) -> Iterator[Path]:
    if folder := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(folder)
    yield package / "__pycache__"
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / package.name
    yield Path(tempfile.gettempdir()) / f"{package.name}-{os.getuid()}"


def _name(package: Path) -> str:
    processor = f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"  # as numba's own key has it
    digest = xxhash.xxh3_64(f"{numba.__version__} {sys.version} {processor}".encode())
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if _MARK in source:
            digest.update(f"{path.relative_to(package)} {len(source)}\n".encode())
            digest.update(source)
    return f"{_prefix()}-{digest.hexdigest()}"


def _prefix() -> str:
    return f"numba-{sys.implementation.cache_tag}"
