"""torchtitan's example runs as the README says, and moves experts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from examples import FOLDER
from ranks import compile_once

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")


@pytest.mark.long
def test_balanced_and_static_end_with_the_same_loss(tmp_path: Path) -> None:
    compile_once()  # a run this short would end before the planner is compiled
    balanced, static = (ended(tmp_path, *options) for options in ([], ["--static"]))
    assert balanced.keys() == static.keys() == {0, 1, 2, 3}
    assert {loss for loss, _ in balanced.values()} == {loss for loss, _ in static.values()}
    assert all(moved > 0 for _, moved in balanced.values())
    assert all(moved == 0 for _, moved in static.values())


def ended(folder: Path, *options: str) -> dict[int, tuple[str, int]]:
    """Loss and experts moved, by rank."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    command = [*torchrun, str(FOLDER / "torchtitan_moe.py"), "--output", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"rank (\d): loss (\S+) after 20 steps, (\d+) experts moved", done.stdout)
    return {int(rank): (loss, int(moved)) for rank, loss, moved in lines}
