"""A decision, an attach and a batch run through few files: counted by a trace of the functions that are called."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.planner.shuffle import plan_shuffle

AT_MOST = {"attach": 126, "decision": 80, "batch": 36}
"""Files of the package in which any function runs, on all threads of rank 0, with a replica slot. Only ever lowered,
but for what is plain Python now that was compiled, where no trace sees it, and for a search that the planner has."""


class FilesEntered:
    """Collects the files of the package whose functions are called, from now on."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def taken(self) -> list[str]:
        """The files since the call before, in order of their names."""
        files, self._files = self._files, set()
        return sorted(files)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            _, package, file = frame.f_code.co_filename.partition("/eplb_runtime/")
            if package:
                self._files.add(file)


def files_of_the_ways(rank: int) -> tuple[int, dict[str, list[str]]]:
    files = FilesEntered()
    model = make_model("olmoe", experts=4, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = eplb.BalancerConfig(dense_gradients="allreduce", interval=100, replica_slots=1)
    balancer = eplb.attach(model, optimizer, config=config)
    ways = {"attach": files.taken()}
    balancer._wait_until_compiled()
    balancer._plan_with(plan_shuffle)
    for step in range(2):
        ids = batch_of(rank, step)
        files.taken()
        model(input_ids=ids, labels=ids).loss.backward()
        ways["batch"] = files.taken()
        optimizer.step()
        optimizer.zero_grad()
    files.taken()
    moved = balancer.rebalance()
    ways["decision"] = files.taken()
    files.end()
    balancer.close()
    return moved, ways


def test_the_ways_through_the_house_are_no_longer_than_they_were() -> None:
    moved, ways = run_ranks(2, files_of_the_ways)[0]
    assert moved, "nothing was planned and moved: nothing is shown"
    for way, files in ways.items():
        assert len(files) <= AT_MOST[way], f"{way} runs through {len(files)} files: {', '.join(files)}"
