"""Would a job be balanced? Recipes are read as people write them, and judged by the rules that `attach` applies."""

from pathlib import Path

from ...utils.files import require_readable
from .answer import RecipeAnswer, answer, reasons, totals
from .base import Recipe, RecipeError
from .command_lines import read_command_lines
from .config_function import PATH, read_config_function
from .fields import read_json

__all__ = ["Recipe", "RecipeAnswer", "RecipeError", "answer", "read_recipes", "reasons", "totals"]

MOST_BYTES = 64 << 20


def read_recipes(path: str) -> list[Recipe]:
    """The recipes of a file: JSON, a shell script or text; or of a torchtitan config function by import path.

    Raises:
        RecipeError: there is no recipe of a model with experts in it.
        FileError, OSError: it cannot be read.
    """
    file = Path(path)
    if not file.exists() and "/" not in path and PATH.fullmatch(path) and file.suffix not in (".sh", ".json", ".txt"):
        return [read_config_function(path)]
    if require_readable(file, MOST_BYTES) == 0 or not file.read_text(errors="replace").strip():
        raise RecipeError(f"{path}: empty")
    return read_json(file) if file.suffix == ".json" else [read_command_lines(file)]
