"""Files of the package that one call runs through, on the thread that calls: they only come down."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb

PACKAGE = str(Path(eplb.__file__).parent)
MOST = {"attach": (82, 89), "forward": (26, 29), "rebalance": (42, 46)}
"""Without and with replica slots."""


def crossed(rank: int, replica_slots: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def trace(name: str, call: Callable[[], Any]) -> Any:
        files: set[str] = set()
        sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
        try:
            return call()
        finally:
            sys.setprofile(None)
            found[name] = sorted(file.removeprefix(PACKAGE) for file in files if file.startswith(PACKAGE))

    model = make_model("mixtral")
    optimizer = torch.optim.AdamW(model.parameters())
    config = eplb.BalancerConfig(
        interval=None, gate="always", replica_slots=replica_slots, dense_gradients="allreduce", timeout_seconds=60.0
    )
    balancer = trace("attach", lambda: eplb.attach(model, optimizer, config=config))
    for step in range(5):  # the guard is done with the first ones
        inputs = batch_of(rank, step)
        trace("forward", lambda inputs=inputs: model(input_ids=inputs, labels=inputs).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trace("rebalance", balancer.rebalance)
    balancer.close()
    return found


@pytest.mark.parametrize("replica_slots", [0, 1])
def test_a_call_crosses_few_files(replica_slots: int) -> None:
    found = run_ranks(2, crossed, replica_slots)[0]
    for name, files in found.items():
        print(name, len(files), *files)
        assert len(files) <= MOST[name][replica_slots], files
