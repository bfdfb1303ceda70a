"""Where Triton's interpreter is not what a GPU is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import util
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def interpreted() -> Callable[..., None]:
    """Tests of files in a process of their own: Triton must be told before it is imported, and serves no GPU then."""
    if util.find_spec("triton") is None:
        pytest.skip("no triton: pip install triton")

    def run(*files: str) -> None:
        paths = [str(Path(__file__).parent / file) for file in files]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert " passed" in done.stdout and "failed" not in done.stdout

    return run


@pytest.fixture(autouse=True)
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 to bfloat16; what is compiled rounds (`compile_all.py` looks for that)."""
    if not INTERPRETED:
        return
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: np.ndarray, of: tl.dtype, to: tl.dtype, mode: object) -> np.ndarray:
        if (of, to) != (tl.float32, tl.bfloat16):
            return convert(data, of, to, mode)
        return torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def asserting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter leaves out what kernels assert, whatever a launch says; what is compiled has it."""
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))
