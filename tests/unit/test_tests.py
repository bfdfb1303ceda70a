"""What tests take from each other is there: also where Megatron, verl or torchtitan are not installed, so that a module
is not imported or its tests are skipped."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from support.mutants import MUTANTS

TESTS = Path(__file__).parents[1]


def test_what_tests_take_from_each_other_is_there() -> None:
    files = sources()
    assert len(files) > 150
    assert [one for path in files.values() for one in missing(path.read_text(encoding="utf-8"), files)] == []


def test_tests_that_mutants_name_are_there() -> None:
    for fault, (named, _) in MUTANTS.items():
        file, _, test = named.partition("::")
        assert f"def {test.partition('[')[0]}" in sources()[file.removesuffix(".py")].read_text(), fault


@pytest.mark.parametrize("folder", ["gpu", "benchmarks", "soak"])
def test_what_runs_by_hand_alone_takes_from_the_package_what_it_has(folder: str) -> None:
    for path in (TESTS / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eplb_runtime"):
                exec(ast.unparse(node), {})


@cache
def sources() -> Mapping[str, Path]:
    """Modules of the tests, by name."""
    return {path.stem: path for path in TESTS.rglob("*.py") if path.stem != "__init__"}


def missing(text: str, files: Mapping[str, Path]) -> Iterator[str]:
    """``module.name`` of what a source takes from modules of the tests that do not have it."""
    tree = ast.parse(text)
    known_as = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "support":
            known_as.update({alias.asname or alias.name: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and (module := str(node.module).removeprefix("support.")) in files:
            yield from (f"{module}.{one.name}" for one in node.names if one.name not in names_of(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known_as:
            module = known_as[node.value.id]
            if node.attr not in names_of(module) and not node.attr.startswith("__"):
                yield f"{module}.{node.attr}"


@cache
def names_of(module: str) -> set[str]:
    """Names that a module binds, or others on it, outside of its functions and classes."""
    names: set[str] = set()
    bodies: list[ast.stmt] = list(ast.parse(sources()[module].read_text(encoding="utf-8")).body)
    while bodies:
        node = bodies.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                names.add(part.id)
            elif isinstance(part, ast.Import | ast.ImportFrom):
                names.update(alias.asname or alias.name.partition(".")[0] for alias in part.names)
            elif isinstance(part, ast.FunctionDef | ast.ClassDef):
                names.add(part.name)
    return names
