"""Where Triton's interpreter is not what a GPU is."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


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
