"""A training script that ends without ``balancer.close()`` ends as it would without a balancer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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
    """Threads that come back from a wait into an interpreter that is gone end the process by a signal. Forked ranks
    would leave no interpreter behind."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    of_all = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    environment = {**os.environ, **of_all, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, said = rank.communicate(timeout=200)
            assert rank.returncode == 0 and "terminate called" not in said, said[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
