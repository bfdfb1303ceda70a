"""Each warning that has a text of its own is explained: its words are a heading of the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "eplb_runtime"
PAGE = PACKAGE / "balancer" / "README.md"


def warnings() -> list[str]:
    """Texts of `logger.warning`, as they are in the code."""
    calls = [
        node
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warning"
    ]
    texts = [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
    return [text for text in texts if isinstance(text, str) and re.search("[a-z]{3}", re.sub("%.|step", "", text))]


def headings(page: str) -> list[list[str]]:
    """The words of each, without what stands for something else ("...", N, M)."""
    section = page.split("## Warnings and questions")[1].split("\n## ")[0]
    bold = [" ".join(one.split()) for one in re.findall(r"\*\*(.+?)\*\*", section, re.DOTALL)]
    return [
        [part.strip(" .:,").lower() for part in re.split(r"\.\.\.|\b[NMX]\b", one) if part.strip(" .:,")]
        for one in bold
    ]


def unexplained(page: str) -> list[str]:
    known = headings(page)
    return [text for text in warnings() if not any(all(part in text.lower() for part in one) for one in known)]


def test_each_warning_is_a_heading() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert len(warnings()) > 30
    assert unexplained(page) == []


def test_control_without_one_of_them_its_warning_is_missed() -> None:
    page = PAGE.read_text(encoding="utf-8").replace("**... cannot be tried on small tensors.**", "")
    assert [text[:17] for text in unexplained(page)] == ["%s cannot be trie"]
