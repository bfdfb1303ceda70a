"""Compiled code on the disk: nothing is loaded that another version of the sources has left."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eplb_runtime.utils import jit as module
from eplb_runtime.utils.jit import folder_for, remove_older

CALLEE = "from .utils.jit import jit\n\n\n@jit\ndef twice(x):\n    return {} * x\n"
CALLER = "from .utils.jit import jit\nfrom .callee import twice\n\n\n@jit\ndef thrice(x):\n    return twice(x) + x\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of a caller and a callee, each in a file of its own."""
    package = tmp_path / "small"
    (package / "utils").mkdir(parents=True)
    for folder in (package, package / "utils"):
        (folder / "__init__.py").touch()
    shutil.copy(str(module.__file__), package / "utils" / "jit.py")
    (package / "callee.py").write_text(CALLEE.format(2))
    (package / "caller.py").write_text(CALLER)
    return package


def thrice(package: Path) -> str:
    command = [sys.executable, "-c", "from small.caller import thrice; print(thrice(1), thrice._cache.cache_path)"]
    return subprocess.run(command, cwd=package.parent, check=True, capture_output=True, text=True).stdout.strip()


def test_a_caller_is_compiled_anew_when_what_it_calls_has_changed(package: Path) -> None:
    first = thrice(package).split()
    (package / "callee.py").write_text(CALLEE.format(7))
    second = thrice(package).split()
    assert (first[0], second[0]) == ("3", "8")
    assert first[1] != second[1]


def test_constants_that_are_compiled_in_are_of_modules_that_the_digest_covers() -> None:
    """Else compiled code of before a change of one would be loaded."""
    marked = {path for path in module._PACKAGE.rglob("*.py") if module._MARK in path.read_bytes()}
    constants = 0
    for path in marked:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.ImportFrom) and node.level else []
            if any(name.isupper() for name in names):
                constants += 1
                source = path.parents[node.level - 1].joinpath(*str(node.module).split("."))
                assert source.with_suffix(".py") in marked, f"{path} has constants of {source}"
    assert constants > 0


def test_the_folder_is_where_it_can_be_written(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert folder_for(package).parent == package / "__pycache__"
    shutil.rmtree(package / "__pycache__")
    (package / "__pycache__").touch()  # no folder can be made in there
    assert folder_for(package).parent == tmp_path / "cache" / "small"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert folder_for(package).parent == tmp_path / "numba"


def test_what_earlier_sources_left_is_removed_and_nothing_else(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    earlier = folder_for(package)
    (package / "callee.py").write_text(CALLEE.format(7))
    here, of_another_python = folder_for(package), earlier.parent / "numba-cpython-99-0123"
    of_another_python.mkdir()
    monkeypatch.setattr(module, "_PACKAGE", package)
    monkeypatch.setattr(module, "cache_folder", lambda: here)
    remove_older()
    assert not earlier.exists() and here.exists() and of_another_python.exists()
