"""YAML of mappings, lists, whole numbers and texts, for which PyYAML must be installed.

PyYAML's own constructors are not used: they recurse, and follow aliases, which let few bytes stand for any amount of
data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ....utils.files import MIB, FileError, require_readable
from ..errors import FormatError, first_line

MOST_BYTES = 16 * MIB
MOST_LEVELS = 8
WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


def read(path: Path) -> Any:
    """The first document of a YAML file. Plain decimal numbers are ints, every other scalar a text.

    Raises:
        FileError: not YAML, too large or too deep, with aliases; or PyYAML is missing.
    """
    try:
        import yaml
    except ImportError:
        raise FormatError("reading YAML needs PyYAML: pip install 'eplb-runtime[convert]'") from None
    require_readable(path, MOST_BYTES)
    try:
        text = path.read_text(encoding="utf-8")
        return _build(yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except FileError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        raise FormatError(f"not YAML ({first_line(error)})") from None


def _build(events: Iterable[Any]) -> Any:
    """The value of the first document in a series of the parser's events."""
    from yaml import events as kinds

    document: list[Any] = []
    open_values: list[Any] = [document]
    keys: list[Any] = [None]  # of each open value: the key whose value comes next
    for event in events:
        if isinstance(event, kinds.AliasEvent):
            raise FormatError("YAML with aliases (*name) is not read: write the values out")
        if isinstance(event, kinds.DocumentEndEvent):
            break
        if isinstance(event, kinds.SequenceEndEvent | kinds.MappingEndEvent):
            open_values.pop()
            keys.pop()
        elif isinstance(event, kinds.ScalarEvent):
            is_number = event.implicit[0] and WHOLE_NUMBER.fullmatch(event.value)
            _put(open_values[-1], keys, int(event.value) if is_number else event.value)
        elif isinstance(event, kinds.CollectionStartEvent):
            value: Any = {} if isinstance(event, kinds.MappingStartEvent) else []
            _put(open_values[-1], keys, value)
            if len(open_values) > MOST_LEVELS:
                raise FormatError(f"YAML of more than {MOST_LEVELS} levels is not read")
            open_values.append(value)
            keys.append(None)
    return document[0] if document else None


def _put(container: Any, keys: list[Any], value: Any) -> None:
    """Add a value to the innermost open list or mapping; in a mapping, keys and values take turns."""
    if isinstance(container, list):
        container.append(value)
    elif keys[-1] is None:
        if isinstance(value, dict | list):
            raise FormatError("YAML with a list or mapping as a key is not read")
        keys[-1] = (value,)
    else:
        container[keys[-1][0]] = value
        keys[-1] = None
