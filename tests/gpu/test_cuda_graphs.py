"""A CUDA graph holds the forward of a model at EP 1, and follows its placement; nothing waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from device import DEVICE, no_host_sync, ranks_on_gpu, use

import eplb_runtime as eplb
from eplb_runtime.tools.bench.train import MoEStack, Workload, choices
from eplb_runtime.utils.worker import Worker

pytest.importorskip("transformers", reason="no transformers: pip install transformers")
pytestmark = pytest.mark.gpu
WORK = Workload(layers=2, experts=8, hidden=256, width=256, top_k=2, tokens=128)


class AttachedStack:
    """An attached stack of MoE layers on one rank, in bfloat16, and a batch of it in memory that stays."""

    def __init__(self) -> None:
        use(DEVICE)
        torch.manual_seed(0)
        self.model = MoEStack(WORK).to(DEVICE, torch.bfloat16)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.balancer = eplb.attach(self.model, optimizer, config=eplb.BalancerConfig(policy="static", guard="off"))
        self.hidden = torch.empty(WORK.tokens, WORK.hidden, device=DEVICE, dtype=torch.bfloat16)
        self.ids = torch.empty(WORK.layers, WORK.tokens, WORK.top_k, device=DEVICE, dtype=torch.int64)
        self.weights = torch.full((WORK.tokens, WORK.top_k), 0.5, device=DEVICE, dtype=torch.bfloat16)
        self.take(0)

    def take(self, seed: int) -> None:
        """Another batch, in the same memory."""
        generator = torch.Generator().manual_seed(seed)
        self.hidden.copy_(torch.randn(self.hidden.shape, generator=generator))
        self.ids.copy_(torch.stack([choices(WORK, 0.7, generator) for _ in range(WORK.layers)]))

    def forward(self) -> torch.Tensor:
        """What the layers give, of each token."""
        hidden = self.hidden
        for layer, ids in zip(self.model.layers, self.ids, strict=True):
            hidden = hidden + layer(hidden, ids, self.weights)
        return hidden

    def step(self) -> None:
        self.model(self.hidden, self.ids, self.weights).backward()

    def move(self, by: int) -> None:
        """Every expert ``by`` slots further."""
        old = self.balancer.placement
        map_ = np.roll(old.physical_to_logical, by, axis=1)
        new = eplb.Placement(map_, old.num_experts, 1, map_.argsort(axis=1), old.epoch + 1)
        self.balancer.place(new)
        assert self.balancer.placement.epoch == old.epoch + 1


def captured(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """What replays ``work``, and where its result then lies."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph.replay, out


def follow(rank: int) -> list[tuple[bool, bool]]:
    """Whether a replay gives what the model gives by itself, over batches and placements, counts too."""
    job, found = AttachedStack(), []
    counter = job.balancer.runtime.counter
    with torch.no_grad():
        replay, out = captured(job.forward)
        for turn, by in enumerate((0, 1, 3)):
            job.take(turn + 1)
            if by:
                job.move(by)
            before = counter.counts.clone()
            replay()
            counted = counter.counts - before
            expected = job.forward()
            found.append((torch.equal(out, expected), torch.equal(counter.counts - before - counted, counted)))
    job.balancer.close()
    return found


def test_a_graph_of_an_attached_forward_follows_commits() -> None:
    (found,) = ranks_on_gpu(1, follow)
    assert found == [(True, True)] * 3


def capture_beside(rank: int) -> str:
    """Why a capture failed beside a thread of ours that asks for events; empty: it did not."""
    use(DEVICE)
    event, captured_all, asked = torch.cuda.Event(), threading.Event(), threading.Event()
    event.record()
    one = torch.ones(8, device=DEVICE)

    def ask() -> None:
        torch.cuda.set_device(DEVICE)
        while not captured_all.is_set():
            with suppress(RuntimeError):
                event.query()
            asked.set()

    running, problem = Worker("a test's").submit(ask), ""
    try:
        for _ in range(20):
            asked.clear()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                one.add(1)
                asked.wait()
                one.add(1)
    except RuntimeError as error:
        problem = str(error)
    captured_all.set()
    running.result()
    return problem


def test_threads_of_the_balancer_do_not_end_a_capture() -> None:
    assert ranks_on_gpu(1, capture_beside) == [""]


def wait_for_nothing(rank: int) -> None:
    job = AttachedStack()
    job.step()  # the first rows that experts are given are looked at
    with no_host_sync():
        for _ in range(3):
            job.step()
    job.balancer.close()


def test_a_forward_and_a_backward_pass_at_ep_1_never_wait_for_the_device() -> None:
    ranks_on_gpu(1, wait_for_nothing)
