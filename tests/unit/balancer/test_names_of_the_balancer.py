"""What users call is a short list: the rest of a balancer is private."""

from __future__ import annotations

import ast
import inspect
import textwrap

from eplb_runtime.balancer.balancer import Balancer

MOST_NAMES = 28


def public_names(kind: type) -> set[str]:
    """Methods and properties, and attributes that the constructor sets."""
    constructor = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__)))  # type: ignore[misc]
    stored = [n for n in ast.walk(constructor) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    attributes = {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return {name for name in attributes | set(vars(kind)) if not name.startswith("_")}


def test_a_balancer_has_few_public_names() -> None:
    names = public_names(Balancer)
    assert {"config", "placement", "step", "close"} <= names
    assert len(names) <= MOST_NAMES, sorted(names)
