"""``launch/slurm.sbatch`` under Slurm itself: two nodes on loopback."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import pytest
from namespaces import ROOT
from slurm import NODES, Slurm, missing

pytestmark = [pytest.mark.multinode, pytest.mark.slow]


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    if missing():
        pytest.skip(missing())
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:  # not tmp_path: a socket's name is short
        try:
            cluster = stack.enter_context(Slurm(Path(folder)))
        except OSError as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield cluster


def test_slurm_runs_the_job_over_its_nodes(slurm: Slurm, tmp_path: Path) -> None:
    options = {"--steps": 8, "--interval": 4, "--layers": 2, "--width": 64, "--batch": 2, "--replica-slots": 0}
    job = ["launch/train_moe.py", *map(str, chain.from_iterable(options.items())), "--out", str(tmp_path)]
    # What a cluster without GPUs has, in place of the script's first lines; the rest of it is as it stands.
    have = [f"--nodes={len(NODES)}", "--gpus-per-node=0", "--cpus-per-task=1", f"--chdir={ROOT}"]
    said = slurm.submit(*have, str(ROOT / "launch/slurm.sbatch"), *job, PYTHON=sys.executable, RANKS_PER_NODE="1")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["world_size"] == len(NODES) and summary["bit_identical"] is True, said
