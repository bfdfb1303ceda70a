"""The wheel, installed alone, has all that its commands need."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from observed import records

from eplb_runtime.observe.events_file import NAME, LineFile

ROOT = Path(__file__).resolve().parents[2]
BACKEND = 77
"""The version of setuptools that pyproject.toml asks for."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if int(version("setuptools").partition(".")[0]) < BACKEND:
        pytest.skip(f"setuptools is older than {BACKEND}: no wheel can be built here")
    folder = tmp_path_factory.mktemp("wheel")
    for part in ("eplb_runtime", "launch", "pyproject.toml", "README.md", "LICENSE"):  # a build leaves files behind
        (folder / part).symlink_to(ROOT / part)
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    (folder / "dist").mkdir()
    done = subprocess.run([sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return next((folder / "dist").glob("*.whl"))


def test_it_holds_page_samples_and_dashboards(wheel: Path) -> None:
    inside = {name.partition(".data/data/")[2] or name for name in zipfile.ZipFile(wheel).namelist()}
    page = {path.name for path in (ROOT / "eplb_runtime/observe/page").iterdir()}
    assert {f"eplb_runtime/observe/page/{name}" for name in page} <= inside and len(page) == 4
    assert {"eplb_runtime/tools/formats/sample.npz", "eplb_runtime/py.typed"} <= inside
    monitoring = {path.name for path in (ROOT / "launch/monitoring").iterdir()}
    assert {f"share/eplb_runtime/monitoring/{name}" for name in monitoring} <= inside
    assert not any(name.startswith(("tests/", "launch/")) or "__pycache__" in name for name in inside)


def test_its_commands_run_without_the_project(wheel: Path, tmp_path: Path) -> None:
    """Those that plan nothing: their kernels would be compiled anew in another place."""
    alone, run = tmp_path / "alone", tmp_path / "run"
    zipfile.ZipFile(wheel).extractall(alone)
    first, *others = records()
    writer = LineFile(run / NAME, first)
    for record in others:
        writer.write(record)
    writer.close()
    for command in (["--version"], ["report", "run"]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "eplb_runtime.cli", *command],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(alone)}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000
