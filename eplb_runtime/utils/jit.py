"""numba's compiler with a cache on the disk: a folder named by a digest of all compiled sources of the package and of
their constants. (numba's own looks at the file of a function alone, not at what that function calls.)"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
import xxhash
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parents[1]
_MARK = b"@jit"  # in each module whose functions, or constants in the functions of others, are compiled


def jit(function: Function) -> Function:
    """Return the function wrapped by numba: compiled at its first call, run without the interpreter's lock, and its
    machine code kept in `cache_folder`. Divisions by zero give what NumPy gives."""
    settings: Any = numba.config
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(cache_folder())  # read below, for this function only
    try:
        compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
        if compiles():
            compiled._cache = _Cache(function)
        return compiled  # type: ignore[no-any-return]
    finally:
        settings.CACHE_DIR = before


class _Cache(FunctionCache):
    """A file that cannot be written, or that a crash has cut off, costs a compilation; it is no error."""

    is_lost = False  # whether something was compiled for this process alone

    @contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _Cache.is_lost |= isinstance(error, OSError)
            with suppress(OSError):
                self.flush()


def is_compiled() -> bool:
    """Return whether `note_compiled` has marked `cache_folder`, in any process; False where numba is disabled."""
    return compiles() and (cache_folder() / "compiled").exists()


def compiles() -> bool:
    """Return whether numba compiles: not where ``NUMBA_DISABLE_JIT`` is set."""
    return not numba.config.DISABLE_JIT  # type: ignore[attr-defined]


def note_compiled() -> None:
    """Mark `cache_folder` as complete by an empty file, and call `remove_older`; nothing if not all was written."""
    with suppress(OSError):
        if not _Cache.is_lost:
            (cache_folder() / "compiled").touch()
            remove_older()


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
    of_temporary = Path(tempfile.gettempdir()) / f"{package.name}-{os.getuid()}"
    for parent in (*([Path(given)] if given else []), package / "__pycache__", of_user, of_temporary):
        with suppress(OSError):
            (parent / name).mkdir(parents=True, exist_ok=True)
            if os.access(parent / name, os.W_OK | os.X_OK):
                break
    return parent / name


def remove_older() -> None:
    """Delete the cache folders of other sources for this Python, numba and processor, if ours is inside the package."""
    here, kind = cache_folder(), cache_folder().name.rpartition("-")[0]
    for other in here.parent.glob(f"{kind}-*") if here.parent == _PACKAGE / "__pycache__" else ():
        if other != here:
            shutil.rmtree(other, ignore_errors=True)


def _name(package: Path) -> str:
    processor = f"{get_host_cpu_name()} {get_host_cpu_features().flatten()}"  # as numba's own key has it
    # numba's files are of use at one place alone: a copy of this package is compiled again.
    digest, kind = xxhash.xxh3_64(), f"{numba.__version__} {sys.version} {processor} {package}".encode()
    for path in sorted(package.rglob("*.py")):
        if _MARK in (source := path.read_bytes()):
            digest.update(f"{path.relative_to(package)} {len(source)}\n".encode() + source)
    return f"numba-{sys.implementation.cache_tag}-{xxhash.xxh32_hexdigest(kind)}-{digest.hexdigest()}"
