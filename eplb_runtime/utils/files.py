"""Files on disk, for every room that reads or writes: looked at before they are read, written whole or not at all."""

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EISDIR, ENOTDIR
from pathlib import Path
from typing import BinaryIO

MIB = 2**20
PARTIALS = ".eplb-runtime-*.partial"
"""Files on their way, in the folder of what they will be: one that is there for long was left by a crash."""


class FileError(ValueError):
    """A file that is refused before it is read or written; one line that says why."""


def require_readable(path: Path, most_bytes: int) -> int:
    """Return a file's size in bytes; the file is not opened. FileError: it is a device, pipe or socket, or has more
    than ``most_bytes``. IsADirectoryError: it is a folder."""
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise FileError("not a regular file but a device, pipe or socket: give a file on disk")
    if status.st_size > most_bytes:
        sizes = f"{status.st_size / MIB:,.0f} MiB, but such a file is read up to {most_bytes / MIB:,.0f} MiB"
        raise FileError(f"{sizes}: give a smaller one")
    return status.st_size


def require_writable(path: Path, endings: Sequence[str] = ()) -> None:
    """Check that a file can be put at ``path``, in place of any file there; nothing is written. FileError: its suffix
    is none of ``endings`` (if given). OSError: its folder is missing or may not be written, or ``path`` is a folder."""
    if endings and path.suffix not in endings:
        raise FileError(f"{path}: the name must end in {' or '.join(endings)}")
    if not stat.S_ISDIR(path.parent.stat().st_mode):
        raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR), str(path.parent))
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(13, "no permission to write into this folder", str(path.parent))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, open for bytes. It takes the name ``path`` when the block ends without an exception.

    It is written under a random name next to ``path``, made new and never through a link. Until the end the old file
    stays; after an exception the new one is removed. A link at ``path`` is replaced, not followed. A file of this user
    that is replaced keeps its permissions.

    Raises:
        OSError: it cannot be written; the error names ``path``.
    """
    partial = path.parent / PARTIALS.replace("*", secrets.token_hex(16))
    made = False
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(partial, flags, 0o666)
        made = True
        with open(descriptor, "wb") as file:
            _keep_permissions(path, descriptor)
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException as error:
        if made:
            with suppress(OSError):
                partial.unlink()
        if isinstance(error, OSError) and error.filename == str(partial):
            raise type(error)(error.errno, error.strerror, str(path)) from None
        raise


def _sync_folder(folder: Path) -> None:
    """Names are on the disk when this returns, where the file system can say so: none is removed before one is new."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file, text as UTF-8, in place of what is at ``path``. If that fails the old file stays."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _keep_permissions(path: Path, descriptor: int) -> None:
    with suppress(FileNotFoundError):
        old = path.lstat()
        if stat.S_ISREG(old.st_mode) and old.st_uid == os.geteuid():
            os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
