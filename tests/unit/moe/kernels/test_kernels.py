"""Kernels compiled for GPUs that are not here, and what stands in for them where there is no Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

from eplb_runtime.cli import main

HERE = Path(__file__).parent
MODULES = (
    "moe.dispatch.kernels",
    "moe.routing.kernels",
)


@pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")
def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """What the interpreter lets through need not be what the compiler takes."""
    done = subprocess.run([sys.executable, str(HERE / "compile_all.py")], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["80", "90", "100"]


@pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")
def test_registers_and_spills_are_listed_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eplb_runtime.tools.bench import compiled_kernels

    some = [one for one in compiled_kernels.kernels() if one[0].__name__ in ("_sum_here", "_count_slots")]
    monkeypatch.setattr(compiled_kernels, "kernels", lambda: some)
    assert main(["bench", "kernels", "--compile-only", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["gpu"] for row in rows] == [f"sm_{each}" for each in (80, 90, 100) for _ in some]
    assert {row["kernel"] for row in rows} == {"sum_here", "count_slots"}
    assert all(row["registers"] > 0 and row["spilled_bytes"] == 0 for row in rows)


def test_without_triton_nothing_is_compiled_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eplb_runtime.utils.triton.triton", None)
    assert main(["bench", "kernels", "--compile-only"]) == 2
    assert "needs Triton (pip install triton): nothing was compiled" in capsys.readouterr().err


def test_without_triton_all_of_it_imports() -> None:
    work = f"""
import sys
sys.modules["triton"] = None
import importlib
for name in {MODULES}:
    importlib.import_module("eplb_runtime." + name)
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


def test_blocks_are_powers_of_2() -> None:
    from eplb_runtime.utils.triton import power_of_2

    assert [power_of_2(number) for number in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_benchmark_of_kernels_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == 2
    said = capsys.readouterr().err
    assert "a GPU: nothing was measured" in said and said.count("\n") == 1
