"""The order of the rooms: imports point down only, and in no circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import eplb_runtime

PACKAGE = Path(eplb_runtime.__file__).parent
GROUND = {
    "checksum",
    "checksum_kernel",
    "config",
    "errors",
    "events",
    "files",
    "host_bytes",
    "job_store",
    "launching",
    "load_series",
    "on_triton",
    "operators",
    "phases",
    "placement",
    "placement_file",
    "points",
    "private_groups",
    "process_groups",
    "ranks",
    "setting_up",
    "telling",
    "text_table",
    "topology",
    "watch",
    "worker",
}
STOREYS: tuple[set[str], ...] = (
    GROUND,
    {"formats"},
    {"load"},
    {"routing"},
    {"planner", "experts"},
    {"migration.transports"},
    {"replicas"},
    {"gradients", "dispatch", "migration"},
    {"layer", "in_graph", "guard", "guard_looks", "structure", "parts", "maps", "kernels_in_use"}
    | {"background", "compiling", "decision", "reconnecting", "announcing", "rebalancing", "resuming", "balancer"},
    {"observe"},
    {"attaching"},
    {"checkpoint"},
    {"hosts"},
    {"verification", "simulate", "bubbles", "doctor", "bench"},
    {"cli"},
    {"__main__"},
)
"""From the ground up, as design.md has it. Rooms of one storey may use each other, but not in a circle."""
LAZY = {"eplb_runtime/__init__.py"}
"""Files that may name anything: the public names."""


def test_every_file_is_in_a_room() -> None:
    rooms = {room for storey in STOREYS for room in storey}
    strangers = {room_of(module) for module, _ in modules()} - rooms
    assert not strangers


def test_imports_point_down_only() -> None:
    assert upward(dict(modules())) == []


def test_no_module_imports_itself_through_others() -> None:
    sources = dict(modules())
    TopologicalSorter({module: set(imports(module, path, sources)) for module, path in sources.items()}).prepare()


def test_torch_compile_looks_into_no_backward_pass() -> None:
    """It would, where the function that calls ``backward()`` is compiled."""
    seen = [
        f"{module}:{line}"
        for module, path in modules()
        if not module.startswith("bench.")
        for line, decorators in backward_passes(ast.parse(path.read_text()))
        if "torch.compiler.disable" not in decorators
    ]
    assert not seen
    one = ast.parse("class F:\n  @staticmethod\n  def backward(ctx): ...")
    assert list(backward_passes(one)) == [(3, ["staticmethod"])]


def backward_passes(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Line and decorators of those of autograd functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "backward" and node.args.args[0].arg == "ctx":
            yield node.lineno, [ast.unparse(decorator) for decorator in node.decorator_list]


@pytest.mark.parametrize(
    "line", ["from ..balancer import Balancer", "if True:\n    from ..hosts import attach", "import eplb_runtime.cli"]
)
def test_an_import_that_points_up_is_noticed(line: str, tmp_path: Path) -> None:
    broken = tmp_path / "recorder.py"
    broken.write_text(line)
    assert upward({**dict(modules()), "load.counter": broken})


def modules() -> Iterator[tuple[str, Path]]:
    """``load.counter`` and its file; packages by their own name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if f"eplb_runtime/{path.relative_to(PACKAGE).as_posix()}" in LAZY:
            continue
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room_of(module: str) -> str:
    parts = module.split(".")
    return "migration.transports" if parts[:2] == ["migration", "transports"] else parts[0]


def storey_of(module: str) -> int:
    return next(index for index, storey in enumerate(STOREYS) if room_of(module) in storey)


def imports(module: str, path: Path, sources: dict[str, Path]) -> Iterator[str]:
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
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Import statements of a file, read once."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]


def is_ours(alias: ast.alias) -> bool:
    return alias.name.split(".")[0] == "eplb_runtime"


def base_of(module: str, path: Path, node: ast.ImportFrom) -> list[str]:
    if node.level == 0:
        ours = node.module is not None and node.module.split(".")[0] == "eplb_runtime"
        return [str(node.module).removeprefix("eplb_runtime").lstrip(".")] if ours else []
    is_package = path.name == "__init__.py"
    above = module.split(".")[: len(module.split(".")) - node.level + is_package]
    return [".".join([*above, *(node.module or "").split(".")]).strip(".")]


def upward(sources: dict[str, Path]) -> list[str]:
    return [
        f"{module} imports {other}"
        for module, path in sources.items()
        for other in imports(module, path, sources)
        if storey_of(other) > storey_of(module)
    ]
