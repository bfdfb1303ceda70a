"""numba's compiler with a cache on the disk that notices each change of the compiled sources.

numba's own cache looks at the file of a function alone, not at what that function calls. Here the cache is a folder
named by a digest of all compiled sources of the package and of their constants, so nothing old is ever loaded.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import xxhash
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parents[1]
_PREFIX = f"numba-{sys.implementation.cache_tag}"
_MARK = b"@jit"
"""What each module has in a line whose functions, or constants in the functions of others, are compiled."""


def jit(function: Function) -> Function:
    """Return the function wrapped by numba: compiled at its first call, run without the interpreter's lock, and its
    machine code kept in `cache_folder`. Divisions by zero give what NumPy gives."""
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(cache_folder())  # read below, for this function only
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy")(function)  # type: ignore[return-value]
    finally:
        settings.CACHE_DIR = before


def is_compiled() -> bool:
    """Return whether `note_compiled` was called for these very sources, in any process; False where numba is
    disabled."""
    return compiles() and _mark().exists()


def compiles() -> bool:
    """Return whether numba compiles: not where ``NUMBA_DISABLE_JIT`` is set."""
    return not numba.config.DISABLE_JIT  # type: ignore[attr-defined]


def note_compiled() -> None:
    """Mark `cache_folder` as complete by an empty file, and call `remove_older`. File system errors are ignored."""
    with suppress(OSError):  # each process compiles for itself
        _mark().touch()
        remove_older()


def _mark() -> Path:
    return cache_folder() / "compiled"


@cache
def cache_folder() -> Path:
    """Return the folder of this package's compiled functions, for these very sources, this Python, numba and processor.
    The folder is made if it is missing."""
    return folder_for(_PACKAGE)


def folder_for(package: Path) -> Path:
    """Return the cache folder of a package, and make it: in ``NUMBA_CACHE_DIR``, else inside the package, else in the
    user's cache, else in the folder for temporary files; the first of these that can be written."""
    name, given = _name(package), os.environ.get("NUMBA_CACHE_DIR")
    of_user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / package.name
    temporary = Path(tempfile.gettempdir())
    of_temporary = temporary / f"{package.name}-{os.getuid()}"
    for parent in (*([Path(given)] if given else []), package / "__pycache__", of_user, of_temporary):
        with suppress(OSError):
            (parent / name).mkdir(parents=True, exist_ok=True)
            if os.access(parent / name, os.W_OK | os.X_OK):
                return parent / name
    return temporary / name


def remove_older() -> None:
    """Delete the cache folders of other sources, Pythons, numbas and processors, if ours is inside the package."""
    here = cache_folder()
    for other in here.parent.glob(f"{_PREFIX}-*") if here.parent == _PACKAGE / "__pycache__" else ():
        if other != here:
            shutil.rmtree(other, ignore_errors=True)


def _name(package: Path) -> str:
    processor = f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"  # as numba's own key has it
    # numba's files are of use at one place alone: a copy of this package is compiled again.
    digest = xxhash.xxh3_64(f"{numba.__version__} {sys.version} {processor} {package}".encode())
    for path in sorted(package.rglob("*.py")):
        source = path.read_bytes()
        if _MARK in source:
            digest.update(f"{path.relative_to(package)} {len(source)}\n".encode())
            digest.update(source)
    return f"{_PREFIX}-{digest.hexdigest()}"
