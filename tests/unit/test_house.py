"""The house: eighteen entries at the root, each file in a room of limited size, one order in which rooms import each
other; a class name is used once, no function takes a long list of parameters, and what docstrings document exists."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

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
MOST_PARAMETERS = 8
COMPILED = ("jit", "triton", "custom_op", "register_fake", "kernel")
"""In a decorator: numba, Triton and torch's operators, whose parameters are what a kernel reads."""
RATCHET = {
    "(root)": 1214,
    "utils": 557,
    "distributed": 2763,
    "load": 677,
    "moe": 4128,
    "planner": 2584,
    "replicas": 1025,
    "migration": 1681,
    "balancer": 3186,
    "observe": 1997,
    "checkpoint": 1674,
    "hosts": 6411,
    "tools": 2979,
    "cli": 857,
    "package": 31733,
    "files of the package": 175,
    "page": 664,
    "tests": 33247,
    "files of tests": 173,
    "Markdown, KB": 130,
}
"""The most lines of Python in each room, the package and the tests, files, lines of js, css and html, and kilobytes of
Markdown. They only come down, with each part that makes something smaller."""
LAZY = {"eplb_runtime/__init__.py"}
"""Files that may name anything: the public names."""


def test_the_root_has_the_rooms_and_nothing_else() -> None:
    assert entries(PACKAGE) == {"__init__", *ORDER}
    assert len(entries(PACKAGE)) <= MOST_ENTRIES


def test_imports_follow_the_order() -> None:
    assert upward(dict(modules())) == []


def test_no_module_imports_itself_through_others() -> None:
    sources = dict(modules())
    TopologicalSorter({module: set(imports(module, path, sources)) for module, path in sources.items()}).prepare()


def test_torch_compile_looks_into_no_backward_pass() -> None:
    """It would, where the function that calls ``backward()`` is compiled."""
    seen = [
        f"{module}:{line}"
        for module, path in modules()
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
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_room_grows() -> None:
    now = sizes(PACKAGE.parent)
    assert {name: size for name, size in now.items() if size > RATCHET[name]} == {}
    assert set(now) == set(RATCHET)


def test_documented_arguments_exist() -> None:
    found = {f"{module}:{line} {name}" for module, path in modules() for line, name in documented_only(parsed(path))}
    assert found == set()
    text = 'def f(a, *b):\n    """Do.\n\n    Args:\n        a, b: c.\n            d: e.\n        f: g.\n    """'
    assert list(documented_only(ast.parse(text))) == [(1, "f")]


def test_no_function_takes_a_long_list() -> None:
    """Keyword-only arguments of public calls apart: they are read by name."""
    seen = {
        f"{module}.{name}": number
        for module, path in modules()
        for name, number in parameters(parsed(path))
        if number > MOST_PARAMETERS
    }
    assert seen == {}
    long = ast.parse(f"def f({', '.join('abcdefghi')}, *, j): ...\n@jit\ndef g({', '.join('abcdefghi')}): ...")
    assert list(parameters(long)) == [("f", 9)]


def sizes(root: Path) -> dict[str, int]:
    """What `RATCHET` limits, of a checkout."""
    package = [
        (path.relative_to(root / "eplb_runtime").parts, lines(path)) for path in files(root, "eplb_runtime", "py")
    ]
    rooms = dict.fromkeys(("(root)", *(name for name in ORDER if name in RATCHET)), 0)
    for parts, count in package:
        rooms[parts[0] if len(parts) > 1 else "(root)"] = rooms.get(parts[0] if len(parts) > 1 else "(root)", 0) + count
    tests = files(root, "tests", "py")
    return {
        **rooms,
        "package": sum(count for _, count in package),
        "files of the package": len(package),
        "page": sum(lines(path) for kind in ("js", "css", "html") for path in files(root, "eplb_runtime", kind)),
        "tests": sum(map(lines, tests)),
        "files of tests": len(tests),
        "Markdown, KB": round(sum(path.stat().st_size for path in markdown(root)) / 1000 + 0.49),
    }


def files(root: Path, folder: str, kind: str) -> list[Path]:
    return [path for path in sorted((root / folder).rglob(f"*.{kind}")) if "__pycache__" not in path.parts]


def markdown(root: Path) -> list[Path]:
    return [
        *root.glob("*.md"),
        *(
            path
            for folder in ("eplb_runtime", "launch", "tests", "docker", ".github")
            for path in files(root, folder, "md")
        ),
    ]


def lines(path: Path) -> int:
    return len(path.read_text(errors="replace").splitlines())


def documented_only(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line of a function and a name under its ``Args:`` that its signature lacks."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.args.kwarg:
            continue
        block = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", ast.get_docstring(node) or "", re.MULTILINE)
        if not block:
            continue
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        have = {argument.arg for argument in [*given, *([node.args.vararg] if node.args.vararg else [])]}
        first = min(len(row) - len(row.lstrip()) for row in block[1].splitlines() if row.strip())
        named = re.findall(rf"^[ \t]{{{first}}}([A-Za-z_][\w, *]*):", block[1], re.MULTILINE)
        yield from (
            (node.lineno, name) for row in named for name in row.replace("*", "").split(", ") if name not in have
        )


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


def upward(sources: Mapping[str, Path]) -> list[str]:
    """Imports against the order."""
    return [
        f"{module} imports {other}"
        for module, path in sources.items()
        for other in imports(module, path, sources)
        if place_of(other) > place_of(module)
    ]
