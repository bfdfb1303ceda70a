"""Writes ``eplb_runtime/REFERENCE.md``: the public names with their signatures and docstrings, read by griffe.

Run it after a docstring or signature of a public name has changed::

    python -m eplb_runtime.tools.reference
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..utils.files import write_file

PACKAGE = Path(__file__).resolve().parent.parent
REFERENCE = PACKAGE / "REFERENCE.md"
HEAD = """# Reference

The public names of `eplb_runtime`, from their docstrings. `python -m eplb_runtime.tools.reference` writes this file; it
needs griffe (`pip install -e '.[test]'`). Start with [README](../README.md).
"""


def reference() -> str:
    """The text of the reference.

    Raises:
        ImportError: griffe is not installed.
    """
    import griffe

    package = griffe.load(
        PACKAGE.name,
        search_paths=[PACKAGE.parent],
        docstring_parser="google",
        docstring_options={"warnings": False},
    )
    places = _places(package)
    index = ", ".join(f"[`{name}`](#{name.lower()})" for name in places)
    parts = [HEAD, index]
    for name, path in places.items():
        parts += _object(name, _resolved(package, path))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _places(package: Any) -> dict[str, str]:
    """Each public name with the path that ``eplb_runtime`` imports it from, in alphabetic order."""
    return {name: package.members[name].target_path for name in sorted(package.exports)}


def _resolved(package: Any, path: str) -> Any:
    """The object itself, through the modules that only pass its name on."""
    found = package[path.removeprefix(f"{package.name}.")]
    return found.final_target if found.is_alias else found


def _object(name: str, of: Any) -> Iterator[str]:
    """A public function or class, and the public methods of a class."""
    yield f"## {name}"
    yield _signature(name, of)
    yield _docstring(of)
    for member in of.members.values() if of.is_class else ():
        if member.name.startswith("_") or member.is_alias or not member.has_docstring:
            continue
        if member.is_function or "property" in member.labels:
            yield f"### {name}.{member.name}"
            yield _signature(member.name, member)
            yield _docstring(member)


def _signature(name: str, of: Any) -> str:
    """As Python code. A dataclass has its fields as parameters; a property has none."""
    if of.is_attribute:
        return f"```python\n{name}: {of.annotation}\n```"
    constructor = of.all_members.get("__init__") if of.is_class else of
    parameters = [] if constructor is None else [p for p in constructor.parameters if p.name not in ("self", "cls")]
    shown, keyword_only = [], False
    for parameter in parameters:
        kind = parameter.kind.value
        if kind == "keyword-only" and not keyword_only:
            shown.append("*")
        keyword_only = keyword_only or kind in ("keyword-only", "variadic positional")
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation = "" if parameter.annotation is None else f": {parameter.annotation}"
        default = "" if parameter.default is None or stars else f" = {parameter.default}"
        shown.append(f"{stars}{parameter.name}{annotation}{default}")
    returns = "" if of.is_class or of.returns is None else f" -> {of.returns}"
    inside = ", ".join(shown)
    if len(name) + len(inside) + len(returns) > 100:
        inside = "\n" + "".join(f"    {one},\n" for one in shown)
    return f"```python\n{'class ' if of.is_class else ''}{name}({inside}){returns}\n```"


def _docstring(of: Any) -> str:
    """As Markdown, section by section."""
    if of.docstring is None:
        return ""
    parts = []
    for section in of.docstring.parsed:
        kind = section.kind.value
        if kind == "text":
            parts.append(_text(section.value))
        elif kind == "examples":
            shown = "\n".join(text for _, text in section.value)
            parts.append(f"Example:\n\n```python\n{shown}\n```")
        elif kind == "admonition":
            parts.append(f"{section.title}:\n\n```python\n{section.value.description}\n```")
        else:
            rows = "\n".join(_row(item) for item in section.value)
            parts.append(f"{(section.title or kind).capitalize()}:\n\n{rows}")
    return "\n\n".join(parts)


def _row(item: Any) -> str:
    """An argument, an attribute, a result or an exception."""
    name = getattr(item, "name", "") or ""
    if not name and item.annotation is not None and type(item).__name__ == "DocstringRaise":
        name = str(item.annotation)
    text = " ".join(_text(item.description).split())
    return f"- `{name}`: {text}" if name else f"- {text}"


def _text(text: str) -> str:
    """Double backticks are reStructuredText's; Markdown has single ones."""
    return text.replace("``", "`")


def main() -> None:
    """Write the file."""
    write_file(REFERENCE, reference())
    print(f"written: {REFERENCE}")


if __name__ == "__main__":
    main()
