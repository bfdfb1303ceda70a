"""A training script that ends without ``balancer.close()`` ends as it would without a balancer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forked
from examples import FOLDER

SCRIPT = """
import torch.distributed as dist
from any_module import LAYERS_TO_BALANCE, batch, make
from torch.nn import functional

import eplb_runtime as eplb

dist.init_process_group("gloo")
model, optimizer = make()
config = eplb.BalancerConfig(interval=3, gate="always", dense_gradients="allreduce")
balancer = eplb.attach(model, optimizer, layers=LAYERS_TO_BALANCE, config=config)
for step in range(6):  # the last of them begins a decision
    ids = batch(dist.get_rank(), step)
    functional.cross_entropy(model(ids[:-1]), ids[1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_may_end_while_a_decision_is_under_way(tmp_path: Path) -> None:
    """Threads that come back from a wait into an interpreter that is gone end the process by a signal."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, forked.__file__, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr[-2000:]
