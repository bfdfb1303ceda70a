"""Train from the same seed over two hosts: rebalanced while somebody cuts a cable, then with experts fixed.

The command line names a folder and points. At each point (a phase of the migration protocol, one
rebalance each) every rank writes ``<folder>/<point>.<rank>`` and waits for ``<folder>/cut.<point>``; when it has
dropped the rebalance it writes ``<folder>/dropped.<point>.<rank>``, and when it has then waited for the others for
several timeouts ``<folder>/waited.<rank>``. The point ``beside`` stands for a training of its own, in which experts
migrate beside the steps: there the thread that carries them waits with some of them on their way, training does not,
and the rebalance is dropped when that thread has waited for the others in vain. Files, because they need no cable. Ends
with ``<folder>/result.<rank>.json``.
"""

import itertools
import json
import logging
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.moe_models import batch_of, make_model
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.distributed.consensus import Ballot, Verdict
from eplb_runtime.events import BalancingPaused, BalancingResumed, EventLog, RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.engine import Phase, PostedRound

STEPS, INTERVAL, TIMEOUT_SECONDS = 40, 4, 4.0
BESIDE = "beside"


class CableCutter:
    """Has the cable cut at each of some points, one rebalance after another, and tells when each was dropped."""

    def __init__(self, folder: Path, points: list[str], balancer: eplb.Balancer) -> None:
        self._folder = folder
        self._points = points
        self._open: str | None = None
        self._rounds = 0
        engine = balancer.rebalancer._engine
        engine.probe = self._at
        if points == [BESIDE]:
            self._vote, engine.vote = engine.vote, self._vote_beside  # type: ignore[method-assign]
        balancer.events.subscribe(self._on_event)

    def _vote_beside(self, posted: PostedRound, ballot: Ballot) -> Verdict:
        """On the thread that carries experts: training waits for the other host, too, and hears of it later."""
        verdict = self._vote(posted, ballot)
        if self._open is not None:
            self._say(f"dropped.{self._open}")
            self._open = None
        return verdict

    def _at(self, phase: Phase, subject: object) -> None:
        if phase is Phase.PREPARED:
            self._rounds = len(subject.rounds)  # type: ignore[attr-defined]
        point = self._points[0].replace(BESIDE, Phase.STAGED.value) if self._points else ""
        if self._open is not None or phase.value != point:
            return
        if phase is Phase.COMMITTED and self._rounds == 1:
            return  # nothing left to be cut off
        self._open = self._points.pop(0)
        self._say(self._open)
        while not (self._folder / f"cut.{self._open}").exists():
            time.sleep(0.01)

    def _on_event(self, event: object) -> None:
        if isinstance(event, RebalanceAborted) and self._open not in (None, BESIDE):
            self._say(f"dropped.{self._open}")
            self._open = None
            waited = threading.Timer(3 * TIMEOUT_SECONDS, self._say, ["waited"])
            waited.daemon = True
            waited.start()

    def _say(self, what: str) -> None:
        (self._folder / f"{what}.{dist.get_rank()}").touch()


def is_over(step: int, points: list[str], events: EventLog) -> bool:
    """Whether all cables were cut that are to be, and experts have moved since the ranks found together again."""
    paused, resumed = events.of_type(BalancingPaused), events.of_type(BalancingResumed)
    moved = [e.step for e in events.of_type(RebalanceCommitted)]
    since = max((e.step for e in resumed), default=0)
    over = step >= STEPS and not points and 0 < len(paused) == len(resumed) and max(moved, default=0) > since
    everywhere = torch.tensor(int(over))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)


def train(
    policy: str, folder: Path, points: list[str], steps: int | None
) -> tuple[list[float], dict[str, torch.Tensor], eplb.Balancer, object]:
    model = make_model("olmoe", experts=16, top_k=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = eplb.BalancerConfig(
        interval=INTERVAL,
        policy=policy,
        gate="always",
        dense_gradients="allreduce",
        timeout_seconds=TIMEOUT_SECONDS,
        overlap=points == [BESIDE],
        # Little more than one expert: a rebalance takes several rounds.
        migration=eplb.MigrationConfig(transport="auto", staging_bytes=20_000),
    )
    dist.barrier()  # the short timeout is for cables, not for ranks that start one after another
    balancer = eplb.attach(model, optimizer, config=config)
    dist.barrier()
    wait_until_compiled(balancer)  # a planner that is still being compiled moves nothing
    if points == [BESIDE]:
        plan_by(balancer, plan_shuffle)
    CableCutter(folder, points, balancer)
    losses = []
    for step in itertools.count():
        if step == steps or (steps is None and is_over(step, points, balancer.events)):
            break
        ids = batch_of(dist.get_rank(), step) % 12 + 12 * ((step // INTERVAL) % 7)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = eplb.logical_state_dict(model, optimizer)
    carrier = balancer.rebalancer._engine.executor.transport
    carriers = type(carrier).__name__
    balancer.close()
    return losses, state, balancer, carriers


def main(folder: Path, points: list[str]) -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.WARNING)
    parts = [part for part in ([p for p in points if p != BESIDE], [p for p in points if p == BESIDE]) if part]
    trained = [train("incremental", folder, list(part), None) for part in parts]
    result = []
    for losses, state, balancer, carriers in trained:
        fixed_losses, fixed, *_ = train("static", folder, [], len(losses))
        said = {
            "carriers": carriers,
            "aborted": [(e.step, e.phase, e.cause) for e in balancer.events.of_type(RebalanceAborted)],
            "resumed": [e.step for e in balancer.events.of_type(BalancingResumed)],
            "committed": [(e.step, e.digest) for e in balancer.events.of_type(RebalanceCommitted)],
            "same_losses": losses == fixed_losses,
            "same_state": state.keys() == fixed.keys() and all(torch.equal(fixed[name], state[name]) for name in fixed),
        }
        result.append(said)
    (folder / f"result.{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
