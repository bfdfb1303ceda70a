"""Kernels compiled for GPUs that are not here, and what stands in for them where there is no Triton."""

import logging
import os
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eplb_runtime.moe.kernel_selection import CheckedKernel, count_and_map
from eplb_runtime.moe.routing.slots import count_choices

NEEDS_TRITON = pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")


@NEEDS_TRITON
def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """What the interpreter lets through need not be what the compiler takes."""
    command = [sys.executable, str(Path(__file__).with_name("compiled_kernels.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["80", "90", "100"]


def test_without_triton_all_of_it_imports() -> None:
    work = """
import sys
sys.modules["triton"] = None
import eplb_runtime.moe.kernels
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]


# -- A kernel whose first batch is not that of plain torch is not used


IDS, TABLE = torch.tensor([[0, 2], [1, 2]]), torch.tensor([5, 6, 7])


def with_an_error(ids: Tensor, table: Tensor, counts: Tensor, real: Tensor | None) -> Tensor:
    slots = count_and_map(ids, table, counts, real)
    counts[0] += 1
    return slots


def fails(*_: Any) -> Tensor:
    raise RuntimeError("no registers\nare left")


@pytest.mark.parametrize(("kernel", "said"), [(with_an_error, "results differ from torch's"), (fails, "no registers")])
def test_a_kernel_that_fails_or_writes_something_else_is_replaced_and_named_once(
    kernel: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    look_up, counts = CheckedKernel("counting", kernel, count_and_map), torch.zeros(3, dtype=torch.int64)
    with caplog.at_level(logging.WARNING, "eplb_runtime"):
        for batch in (1, 2):
            assert torch.equal(look_up(IDS, TABLE, counts, None), TABLE[IDS])
            assert counts.tolist() == [batch, batch, 2 * batch], "as torch counts, and once a batch"
    assert caplog.messages == [f"plain torch replaces the Triton kernel for counting (slower): {said}"]


def test_a_kernel_is_used_once_a_batch_with_rows_was_the_same() -> None:
    calls: list[int] = []

    def kernel(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        calls.append(len(ids))
        counts = count_choices(ids, experts)[0]
        return (counts if len(calls) < 4 else counts + 1), torch.ones(1)  # and what plain torch does not give

    count = CheckedKernel("counting", kernel, count_choices)
    assert count(IDS[:0], 3)[0].tolist() == [0, 0, 0]
    assert count(IDS, 3)[0].tolist() == count(IDS, 3)[0].tolist() == [1, 1, 2]
    assert count(IDS, 3)[0].tolist() == [2, 2, 3] and len(calls) == 4, "it is not compared again"


def test_each_variant_of_a_kernel_is_compared_in_its_own_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    look_up = CheckedKernel("counting", lambda *given: count_and_map(*given[:3]), count_and_map)  # padding counts, too
    counts, real = TABLE * 0, torch.tensor([True, False])
    for mask in (None, real, None, real):
        look_up(IDS, TABLE, counts, mask)
    assert counts.tolist() == [4, 2, 6] and len(caplog.records) == 1


@NEEDS_TRITON
@pytest.mark.timeout(960)
def test_kernels_give_what_their_references_give() -> None:
    """In a process of its own: Triton must be told before it is imported, and serves no GPU then."""
    file = str(Path(__file__).with_name("interpreted.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "failed" not in done.stdout
