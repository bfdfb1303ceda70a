"""Kernels in Triton's interpreter, and what stands in for them where there is no Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
MODULES = ("checksum_kernel", "dispatch.padded", "routing.kernels", "routing.water_filling_kernel")


@pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")
def test_kernels_give_what_their_references_give() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


@pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")
def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """What the interpreter lets through need not be what the compiler takes."""
    done = subprocess.run([sys.executable, str(HERE / "compile_all.py")], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["80", "90"]


def test_without_triton_all_of_it_imports_and_plain_torch_serves() -> None:
    work = f"""
import sys
sys.modules["triton"] = None
import importlib, torch
modules = [importlib.import_module("eplb_runtime." + name) for name in {MODULES}]
hashes, padded, kernels, _ = modules
assert hashes.fast_block_hashes(torch.arange(2048).to(torch.uint8)).shape == (2,)
counts, slots = torch.zeros(4, dtype=torch.int64), torch.empty(2, 2, dtype=torch.int64)
ids = torch.tensor([[0, 3], [3, -1]], dtype=torch.int32)
kernels.count_and_look_up(ids, torch.arange(4) + 10, counts, slots)
assert counts.tolist() == [1, 0, 0, 2] and slots.tolist() == [[10, 13], [13, -1]]
dealer = kernels.Dealer(4, 4, ids.device)
dealer.count(ids, counts)
dealer.deal(ids, torch.tensor([[1, 0], [0, 0], [0, 0], [1, 1]]), torch.arange(8).view(4, 2), slots)
assert counts.tolist() == [1, 0, 0, 2] and slots.tolist() == [[0, 6], [7, -1]]
offsets = torch.tensor([2, 2, 3], dtype=torch.int32)
ends, out = padded.padded_ends(offsets, 4), torch.empty(8, 1)
padded.pad(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 1, 0]), offsets, ends, out)
assert out.flatten().tolist() == [3, 2, 0, 0, 1, 0, 0, 0]
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


def test_on_a_cpu_triton_is_not_asked() -> None:
    from eplb_runtime.on_triton import fits, power_of_2

    assert not fits(torch.zeros(1))
    assert [power_of_2(number) for number in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
