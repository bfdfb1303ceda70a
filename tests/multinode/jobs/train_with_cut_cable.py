"""Train twice from the same seed over two hosts: experts fixed, then rebalanced while somebody cuts a cable.

At each point named on the command line (a phase of the migration protocol, one rebalance each) every rank writes
``<folder>/<point>.<rank>`` and waits for ``<folder>/cut.<point>``; when it has dropped the rebalance it writes
``<folder>/dropped.<point>.<rank>``, and when it has given up balancing altogether ``<folder>/gave_up.<rank>``. Files,
because they need no cable. Ends with ``<folder>/result.<rank>.json``.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from moe_models import batch_of, make_model

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.engine import Phase

STEPS, INTERVAL = 40, 4


class CableCutter:
    """Has the cable cut at each of some points, one rebalance after another, and tells when each was dropped."""

    def __init__(self, folder: Path, points: list[str], balancer: eplb.Balancer) -> None:
        self._folder = folder
        self._points = points
        self._open: str | None = None
        self._rounds = 0
        balancer._rebalancer._engine.probe = self._at
        balancer.events.subscribe(self._on_event)

    def _at(self, phase: Phase, subject: object) -> None:
        if phase is Phase.PREPARED:
            self._rounds = len(subject.rounds)  # type: ignore[attr-defined]
        if self._open is not None or not self._points or phase.value != self._points[0]:
            return
        if phase is Phase.COMMITTED and self._rounds == 1:
            return  # nothing left to be cut off
        self._open = self._points.pop(0)
        self._say(self._open)
        while not (self._folder / f"cut.{self._open}").exists():
            time.sleep(0.01)

    def _on_event(self, event: object) -> None:
        if isinstance(event, RebalanceAborted) and self._open is not None:
            self._say(f"dropped.{self._open}")
            self._open = None

    def _say(self, what: str) -> None:
        (self._folder / f"{what}.{dist.get_rank()}").touch()


class TellOfErrors(logging.Handler):
    """The balancer logs an error when the ranks did not find together again, and only then."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if "no more rebalancing" in record.getMessage():
            (self._folder / f"gave_up.{dist.get_rank()}").touch()


def train(policy: str, folder: Path, points: list[str]) -> tuple[list[float], dict[str, torch.Tensor], eplb.Balancer]:
    model = make_model("olmoe", experts=16, top_k=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = eplb.BalancerConfig(
        interval=INTERVAL,
        policy=policy,
        gate="always",
        dense_gradients="allreduce",
        timeout_seconds=4.0,
        staging_bytes=20_000,  # little more than one expert: a rebalance takes several rounds
    )
    balancer = eplb.attach(model, optimizer, config=config)
    balancer._rebalancer.decisions._ready.wait()  # a planner that is still being compiled moves nothing
    CableCutter(folder, points, balancer)
    losses = []
    for step in range(STEPS):
        ids = batch_of(dist.get_rank(), step) % 12 + 12 * ((step // INTERVAL) % 7)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = eplb.logical_state_dict(model, optimizer)
    balancer.close()
    return losses, state, balancer


def main(folder: Path, points: list[str]) -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("eplb_runtime").addHandler(TellOfErrors(folder))
    fixed_losses, fixed, _ = train("static", folder, [])
    losses, state, balancer = train("incremental", folder, points)
    result = {
        "aborted": [(e.step, e.phase, e.cause) for e in balancer.events.of_type(RebalanceAborted)],
        "committed": [(e.step, e.digest) for e in balancer.events.of_type(RebalanceCommitted)],
        "same_losses": losses == fixed_losses,
        "same_state": state.keys() == fixed.keys() and all(torch.equal(fixed[name], state[name]) for name in fixed),
    }
    (folder / f"result.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
