"""The house: eighteen entries at the root, each file in a room, and one order in which rooms import each other; a class
name is used once, and no function takes a long list of parameters."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import eplb_runtime

PACKAGE = Path(eplb_runtime.__file__).parent
MOST_ENTRIES = 18
ORDER: tuple[str, ...] = (
    "utils",
    "placement",
    "topology",
    "events",
    "config",
    "distributed",
    "load",
    "moe",
    "planner",
    "replicas",
    "migration",
    "balancer",
    "observe",
    "checkpoint",
    "hosts",
    "tools",
    "cli",
)
"""Each imports only from those before it."""
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(module, a module of a later room) -> the one reason why it is imported all the same."""
MOST_PARAMETERS = 8
COMPILED = ("jit", "triton", "custom_op", "register_fake", "kernel")
"""In a decorator: numba, Triton and torch's operators, whose parameters are what a kernel reads."""
NOT_USED = """
    standing stand stands beside told meant carry once parts lane lanes meeting meet ledger turn turns telling lightest
    box boxes kept lent look looks looking come comes
"""
"""Words that name nothing: each has a term of the field."""
STILL_USED = "AT_ONCE PARTS _at_once _parts at_once beside kept model_parts parts standing told"
"""Names that have such a word all the same: public (`Balancer.at_once`), torchtitan's (``model_parts``), plain English.
The list only gets shorter."""
LAZY = {"eplb_runtime/__init__.py"}
"""Files that may name anything: the public names."""


def test_the_root_has_the_rooms_and_nothing_else() -> None:
    assert entries(PACKAGE) == {"__init__", *ORDER}
    assert len(entries(PACKAGE)) <= MOST_ENTRIES


def test_a_new_entry_is_noticed(tmp_path: Path) -> None:
    for name in ("one.py", "room/__init__.py", "left/__pycache__/old.pyc", "py.typed"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert entries(tmp_path) == {"one", "room"}


def test_imports_follow_the_order() -> None:
    assert [line for edge, line in upward(dict(modules())) if edge not in EXCEPTIONS] == []


def test_every_exception_is_needed_and_has_a_reason() -> None:
    assert set(EXCEPTIONS) <= {edge for edge, _ in upward(dict(modules()))}
    assert all(EXCEPTIONS.values())


def test_no_module_imports_itself_through_others() -> None:
    sources = dict(modules())
    TopologicalSorter({module: set(imports(module, path, sources)) for module, path in sources.items()}).prepare()


@pytest.mark.parametrize(
    "line",
    [
        "from ..balancer.balancer import Balancer",
        "if True:\n    from ..hosts import attach",
        "import eplb_runtime.cli",
        "def later():\n    from eplb_runtime import moe",
    ],
)
def test_an_import_of_a_later_room_is_noticed(line: str, tmp_path: Path) -> None:
    broken = tmp_path / "recorder.py"
    broken.write_text(line)
    ((edge, _),) = upward({**dict(modules()), "load.counter": broken})
    assert edge[0] == "load.counter"


def test_torch_compile_looks_into_no_backward_pass() -> None:
    """It would, where the function that calls ``backward()`` is compiled."""
    seen = [
        f"{module}:{line}"
        for module, path in modules()
        if not module.startswith("tools.bench.")
        for line, decorators in backward_passes(parsed(path))
        if "torch.compiler.disable" not in decorators
    ]
    assert not seen
    one = ast.parse("class F:\n  @staticmethod\n  def backward(ctx): ...")
    assert list(backward_passes(one)) == [(3, ["staticmethod"])]


def test_a_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert places.pop("Config") == ["hosts.torchtitan.experts", "hosts.torchtitan.state"], "torchtitan's own name"
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_names_use_no_word_that_has_a_better_term() -> None:
    found = {name for _, path in modules() for name in unwanted(parsed(path))}
    assert found - set(STILL_USED.split()) == set(), "name it as the field does"
    assert set(STILL_USED.split()) - found == set(), "gone, so take it off the list"
    named = (
        "class TraceLane:\n  lane: int\ndef bookkeeping(): ...\ndef _look_up(carry): self.come = 1\nclass Boxes: ..."
    )
    assert set(unwanted(ast.parse(named))) == {"TraceLane", "lane", "_look_up", "carry", "come", "Boxes"}


def test_no_function_takes_a_long_list() -> None:
    """Keyword-only arguments of public calls apart: they are read by name."""
    seen = {
        f"{module}.{name}": number
        for module, path in modules()
        if module != "moe.custom_ops"  # operators of torch take tensors and numbers alone
        for name, number in parameters(parsed(path))
        if number > MOST_PARAMETERS
    }
    assert seen == {}
    long = ast.parse(f"def f({', '.join('abcdefghi')}, *, j): ...\n@jit\ndef g({', '.join('abcdefghi')}): ...")
    assert list(parameters(long)) == [("f", 9)]


def unwanted(tree: ast.AST) -> Iterator[str]:
    """Classes, functions, arguments and fields with a word of `NOT_USED` in their names."""
    not_used = set(NOT_USED.split())
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
        if not not_used.isdisjoint(word.lower() for word in words):
            yield name


def parameters(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and number of positional parameters of the functions that nothing compiles."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        if any(word in decorators for word in COMPILED):
            continue
        given = [*node.args.posonlyargs, *node.args.args]
        yield node.name, sum(argument.arg not in ("self", "cls", "ctx") for argument in given)


def backward_passes(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Line and decorators of those of autograd functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "backward" and node.args.args[0].arg == "ctx":
            yield node.lineno, [ast.unparse(decorator) for decorator in node.decorator_list]


def entries(package: Path) -> set[str]:
    """Modules and packages at a folder's root, and no folder without a file of Python."""
    folders = {path.name for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    return folders | {path.stem for path in package.glob("*.py")}


def modules() -> Iterator[tuple[str, Path]]:
    """``load.counter`` and its file; packages by their own name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if f"eplb_runtime/{path.relative_to(PACKAGE).as_posix()}" in LAZY:
            continue
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def place_of(module: str) -> int:
    """A module's room as its place in the order."""
    return ORDER.index(module.split(".")[0])


def imports(module: str, path: Path, sources: Mapping[str, Path]) -> Iterator[str]:
    """Modules of ours that a file names in import statements, wherever they stand in it."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            found = [
                (alias.name.removeprefix("eplb_runtime").lstrip("."), "") for alias in node.names if is_ours(alias)
            ]
        else:
            found = [(base, alias.name) for base in base_of(module, path, node) for alias in node.names]
        for base, name in found:
            inner = f"{base}.{name}".strip(".")
            # A package's own __init__ may list what is in it.
            if inner in sources:
                yield inner
            elif base in sources and base != module:
                yield base


@cache
def parsed(path: Path) -> ast.Module:
    """A file, read once."""
    return ast.parse(path.read_text())


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Import statements of a file, searched once."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, (ast.Import, ast.ImportFrom))]


def is_ours(alias: ast.alias) -> bool:
    return alias.name.split(".")[0] == "eplb_runtime"


def base_of(module: str, path: Path, node: ast.ImportFrom) -> list[str]:
    if node.level == 0:
        ours = node.module is not None and node.module.split(".")[0] == "eplb_runtime"
        return [str(node.module).removeprefix("eplb_runtime").lstrip(".")] if ours else []
    is_package = path.name == "__init__.py"
    above = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return [".".join([*above, *(node.module or "").split(".")]).strip(".")]


def upward(sources: Mapping[str, Path]) -> list[tuple[tuple[str, str], str]]:
    """Imports against the order: (module, what it imports), and a line that says so."""
    return [
        ((module, other), f"{module} imports {other}")
        for module, path in sources.items()
        for other in imports(module, path, sources)
        if place_of(other) > place_of(module)
    ]
