"""``eplb_runtime/REFERENCE.md`` says what the docstrings of the public names say."""

from __future__ import annotations

import pytest

import eplb_runtime
from eplb_runtime.tools import reference

pytest.importorskip("griffe", reason="griffe is not installed (the test extra)")


def test_the_reference_is_that_of_this_code() -> None:
    """If it fails: ``python -m eplb_runtime.tools.reference``."""
    assert reference.REFERENCE.read_text() == reference.reference(), "REFERENCE.md is stale"


def test_every_public_name_has_a_signature_and_a_text() -> None:
    sections = dict(part.split("\n", 1) for part in reference.reference().split("\n## ")[1:])
    assert list(sections) == sorted(eplb_runtime.__all__)
    for name, text in sections.items():
        code, _, rest = text.partition("```python\n")[2].partition("\n```\n")
        assert code.removeprefix("class ").startswith(name + "("), name
        assert len(rest.split("\n### ")[0].split()) > 5, f"{name} has no docstring"
