"""A recipe as its readers give it: options by the framework's own names, some of which may be unresolved."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...hosts.settings import Unresolved
from ...utils.files import FileError

MARK = "\0"
"""Encloses what a script computes only when it runs."""


class RecipeError(FileError):
    """A recipe that cannot be judged; the message names it and says why."""


@dataclass(frozen=True)
class Recipe:
    """How one training job is configured.

    Args:
        name: of the file, function or entry.
        source: the project whose recipe it is.
        host: the framework that trains: "megatron", "torchtitan", or one without a host of ours.
        options: by the framework's own names; values may be `Unresolved`.
        defaults: of the project, for options that are not given.
        written: an option's name as the recipe has it, where that is another.
    """

    name: str
    source: str
    host: str
    options: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)


def value_of(text: str) -> Any:
    """A number, bool or None, where a text is one; `Unresolved` where a script computes it."""
    if MARK in text:
        return Unresolved(text.replace(MARK, ""))
    plain = text.strip().strip("'\"")
    known = {"true": True, "false": False, "null": None, "none": None}
    if plain.lower() in known:
        return known[plain.lower()]
    if re.fullmatch(r"[+-]?\d+", plain):
        return int(plain)
    try:
        number = ast.literal_eval(plain)
    except (ValueError, SyntaxError):
        return plain
    return number if isinstance(number, int | float) else plain


def product(*sizes: Any) -> Any:
    """Ranks of a job, of its nodes and the ranks of a node; `Unresolved` or None where one of them is."""
    result = 1
    for size in sizes:
        if size is None or isinstance(size, Unresolved):
            return size
        if not isinstance(size, int) or size < 1:
            return Unresolved(str(size))
        result *= size
    return result
