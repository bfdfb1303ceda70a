"""What goes wrong with files of others; each message is one line that says what and how to mend it."""

from ...utils.errors import one_line
from ...utils.files import FileError


class FormatError(FileError):
    """A file that is not what it should be."""


class LoadFileError(FormatError):
    """A load file that cannot be used; the message names the file."""


class ConvertError(FormatError):
    """A file that cannot be converted; the message names the file, or the argument that does not fit."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message, short enough to stand in ours."""
    return one_line(error)[:160]
