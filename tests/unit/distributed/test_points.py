"""Points of the protocol: each that is named is reached somewhere, and none is reached that has no name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import eplb_runtime
from eplb_runtime.distributed.points import Phase

PACKAGE = Path(eplb_runtime.__file__).parent
PROBES = {"probe", "_probe", "_at_point"}


def reached(source: str) -> Iterator[str]:
    """Names of points at which a file calls a probe; what it passes instead, where that is no name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in PROBES:
            point = node.args[0]
            named = isinstance(point, ast.Attribute) and ast.unparse(point.value) == "Phase"
            yield point.attr if named else ast.unparse(point)


def test_each_point_has_a_name_and_each_name_a_point() -> None:
    files = list(PACKAGE.rglob("*.py"))
    found = {name for path in files for name in reached(path.read_text())}
    assert found - {"phase"} == set(Phase.__members__), (
        "name the point in eplb_runtime/distributed/points.py, and reach each"
    )
    assert list(reached('self._probe(Phase.NEW, 1); probe("other", 2)')) == ["NEW", "'other'"]
