"""Copies by copy engines: the schedules of all ranks run against each other in one process, in orders drawn at random.

Each rank has a main stream and two beside it. What it gives them is put down first; then operations are carried out one
by one, of whichever stream has one that is ready. Only signals hold ranks together here, so a rank may be far ahead."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support import symmetric_memory_double as double
from test_tree import HOMES, some_copies
from torch import Tensor, nn
from torch.distributed import _symmetric_memory
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from eplb_runtime.moe.dispatch.channels import MicroBatchChannels
from eplb_runtime.moe.experts.compute import SlotCounts
from eplb_runtime.placement import EMPTY, HomeRows
from eplb_runtime.replicas import copy_engine
from eplb_runtime.replicas.compute import ShardedReplicas
from eplb_runtime.replicas.copy_engine import CopyEngine
from eplb_runtime.replicas.plan import ReplicaPlan, ReplicaPlanner, RowStage, Waiting
from eplb_runtime.replicas.sync import ReplicaSync

RANKS, REPLICAS, LAYERS = 6, 2, 5
PER_NODE = 3
"""In the plan, so that copies hang on copies; all ranks have each other's memory open."""
SLOTS = HOMES + REPLICAS
MAIN = "main"


class Stuck(AssertionError):
    """No stream of any rank can go on."""


@dataclass
class Operation:
    """Args:
    stream: of its rank.
    ready: whether it can be carried out now.
    do: carries it out.
    """

    stream: str
    ready: Callable[[], bool]
    do: Callable[[], None]
    done: bool = False


@dataclass
class Recorder(TorchFunctionMode):
    """What one rank gives its streams, in that order."""

    current: str = MAIN
    given: list[Operation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def give(self, do: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> Operation:
        self.given.append(Operation(self.current, ready, do))
        return self.given[-1]

    def last(self, stream: str) -> Operation | None:
        return next((operation for operation in reversed(self.given) if operation.stream == stream), None)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_:
            into, source = args
            self.give(lambda: into.data.copy_(source))
            return into
        return function(*args, **(kwargs or {}))


class Side:
    """A stream beside the main one."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder, self.name = recorder, name

    def begin(self, work: Callable[[], None]) -> Callable[[], object]:
        before, outer = self.recorder.last(MAIN), self.recorder.current
        self.recorder.current = self.name
        self.recorder.give(lambda: None, lambda: before is None or before.done)
        work()
        end = self.recorder.last(self.name)
        self.recorder.current = outer
        assert end is not None
        return lambda: self.recorder.give(lambda: None, lambda: end.done)


class Memory:
    """As `NodeMemory`, of a rank among others of this process."""

    def __init__(self, rank: int, depth: int, recorder: Recorder, signals: dict, everybody: list[Memory]) -> None:
        self.size, self.channels = RANKS, 4 * depth
        self.pieces: list[Tensor] = []
        self._rank, self._recorder, self._signals, self._everybody = rank, recorder, signals, everybody

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.pieces.append(torch.zeros(tuple(shape), dtype=dtype))
        return self.pieces[-1]

    def of_peer(self, peer: int, own: Tensor) -> Tensor:
        for number, piece in enumerate(self.pieces):
            if 0 <= (offset := own.data_ptr() - piece.data_ptr()) < piece.nbytes:
                begin = offset // piece.itemsize
                return self._everybody[peer].pieces[number].view(-1)[begin : begin + own.numel()]
        raise AssertionError("in no piece")

    def put(self, peer: int, channel: int) -> None:
        word = self._rank, peer, channel
        assert channel < self.channels
        self._recorder.give(lambda: self._signals.update({word: 1}), lambda: not self._signals.get(word))

    def wait(self, peer: int, channel: int) -> None:
        word = peer, self._rank, channel
        self._recorder.give(lambda: self._signals.update({word: 0}), lambda: bool(self._signals.get(word)))


class Bank:
    """One number a row: homes of a layer, copies of them, and rows for gradients that all layers share."""

    def __init__(self, rank: int, engine: CopyEngine, gradients: Tensor) -> None:
        self.parameters = [torch.zeros(HOMES, 1)]
        self.replicas = engine.zeros((REPLICAS, 1), torch.float32, torch.device("cpu"))
        self.gradients = gradients

    def trained(self) -> list[Tensor]:
        return self.parameters

    def replica_rows(self, replica: int) -> list[Tensor]:
        return [self.replicas[replica]]

    def gradient_rows(self, replica: int) -> list[Tensor]:
        return [self.gradients[replica]]


def weight(slot: int, layer: int, version: int) -> float:
    return float(10_000 * version + 100 * layer + slot)


@dataclass
class Rank:
    """One rank's program."""

    rank: int
    recorder: Recorder
    banks: list[Bank]
    linking: ReplicaPlanner
    checks: list[tuple[str, float, float]] = field(default_factory=list)

    def plan(self, home_LRK: np.ndarray) -> list[ReplicaPlan]:
        return [
            self.linking.plan(layer, bank, home_LRK[layer], HomeRows(SLOTS, HOMES))
            for layer, bank in enumerate(self.banks)
        ]

    def post(self, stage: RowStage) -> Sequence[Waiting]:
        return self.linking.transport.post([stage])[0]

    def write_homes(self, layer: int, version: int) -> None:
        for home in range(HOMES):
            value = weight(self.rank * SLOTS + home, layer, version)
            row = self.banks[layer].parameters[0].data[home]
            self.recorder.give(lambda row=row, value=value: row.fill_(value))

    def use_copies(self, layer: int, home_RK: np.ndarray, version: int) -> None:
        for replica, home in enumerate(home_RK[self.rank].tolist()):
            if home != EMPTY:
                row = self.banks[layer].replicas[replica]
                expected = weight(home, layer, version)
                self.recorder.give(
                    lambda row=row, expected=expected: self.checks.append(("copy", row.item(), expected))
                )

    def fill_gradients(self, layer: int, version: int) -> None:
        rows = self.banks[layer].gradients
        value = float(1000 * version + 10 * layer + self.rank)
        self.recorder.give(lambda: rows.fill_(value))

    def use_gradients(self, plan: ReplicaPlan, layer: int, home_RK: np.ndarray, version: int) -> None:
        got = [child.arrivals[0] for child in plan.at_homes]
        holders = [rank for rank, home in np.argwhere(home_RK != EMPTY).tolist()]
        homes = home_RK[home_RK != EMPTY].tolist()
        expected = sum(
            1000 * version + 10 * layer + rank
            for rank, home in zip(holders, homes, strict=True)
            if home // SLOTS == self.rank
        )
        self.recorder.give(lambda: self.checks.append(("gradients", sum(row.item() for row in got), float(expected))))


def take_steps(
    rank: Rank, home_TLRK: list[np.ndarray], again: set[tuple[int, int]], left_out: set[tuple[int, int]]
) -> None:
    """Steps of one rank. ``again``: steps and layers whose homes are written and posted once more ahead of their
    forward, as a commit does beside training; ``left_out``: those that a forward does not come to."""
    version = 0
    for step, home_LRK in enumerate(home_TLRK):
        linked, version = rank.plan(home_LRK), version + 1
        versions = dict.fromkeys(range(LAYERS), version)
        for layer in range(LAYERS):
            rank.write_homes(layer, version)
        posted = {layer: rank.post(plan.weights[0]) if plan.weights else [] for layer, plan in enumerate(linked)}

        def wait(layer: int, linked: list[ReplicaPlan] = linked, posted: dict = posted) -> None:
            for work in posted.pop(layer, []):
                work.wait()
                for stage in linked[layer].weights[1:]:
                    for later in rank.post(stage):
                        later.wait()

        used = [layer for layer in range(LAYERS) if (step, layer) not in left_out]
        for layer in used:
            if (step, layer) in again:
                wait(layer)
                versions[layer] = version = version + 1
                rank.write_homes(layer, version)
                posted[layer] = rank.post(linked[layer].weights[0]) if linked[layer].weights else []
            wait(layer)
            rank.use_copies(layer, home_LRK[layer], versions[layer])
        sent: list[tuple[int, Any]] = []

        def finish(
            linked: list[ReplicaPlan] = linked, sent: list = sent, home_LRK: np.ndarray = home_LRK, step: int = step
        ):
            for layer, works in sent:
                for number, stage in enumerate(linked[layer].gradients):
                    for work in rank.post(stage) if number else works:
                        work.wait()
                    for into, arrived in () if number else linked[layer].additions:
                        rank.recorder.give(lambda into=into, arrived=arrived: into.data.add_(arrived))
                rank.use_gradients(linked[layer], layer, home_LRK[layer], step)
            sent.clear()

        for layer in reversed(used):
            finish()
            rank.use_copies(layer, home_LRK[layer], versions[layer])
            rank.fill_gradients(layer, step)
            stages = linked[layer].gradients
            sent.append((layer, rank.post(stages[0]) if stages else []))
        finish()
        for layer in range(LAYERS):
            wait(layer)


def run(seed: int, depth: int, one_queue: bool) -> list[tuple[str, float, float]]:
    """What was computed with and what should have been. With ``one_queue`` a GPU carries out everything in the order in
    which it was given."""
    rng = np.random.default_rng(seed)
    home_TLRK = [
        np.stack([some_copies(rng, RANKS, REPLICAS, hot=int(rng.integers(1, 4))) for _ in range(LAYERS)])
        for _ in range(3)
    ]
    home_TLRK[1][2] = EMPTY  # a layer without copies
    home_TLRK[2][:, 0] = EMPTY  # a rank without copies
    again = {(int(rng.integers(3)), int(rng.integers(LAYERS))) for _ in range(2)}
    left_out = {(1, layer) for layer in range(LAYERS) if rng.random() < 0.3}
    signals: dict = {}
    memories: list[Memory] = []
    ranks = []
    for number in range(RANKS):
        recorder = Recorder()
        memories.append(Memory(number, depth, recorder, signals, memories))
        names = iter(["weights", "gradients"])
        with patch.object(copy_engine, "CopyStream", lambda device, of=recorder, names=names: Side(of, next(names))):
            engine = CopyEngine(memories[-1], 0, torch.device("cpu"), None, range(RANKS))  # type: ignore[arg-type]
        gradients = engine.zeros((REPLICAS, 1), torch.float32, torch.device("cpu"))
        banks = [Bank(number, engine, gradients) for _ in range(LAYERS)]
        arrivals: dict[int, Tensor] = {}
        linking = ReplicaPlanner(
            engine, number, 1, PER_NODE, lambda index, at, p, rows=arrivals: rows.setdefault(index, torch.zeros(1))
        )
        ranks.append(Rank(number, recorder, banks, linking))
    for rank in ranks:
        with rank.recorder:
            take_steps(rank, home_TLRK, again, left_out)
    carry_out([rank.recorder.given for rank in ranks], rng, one_queue)
    assert not any(signals.values()), "every signal was taken"
    return [check for rank in ranks for check in rank.checks]


def carry_out(given: list[list[Operation]], rng: np.random.Generator, one_queue: bool) -> None:
    queues: dict[Any, list[Operation]] = {}
    for rank, operations in enumerate(given):
        for operation in operations:
            queues.setdefault((rank, "" if one_queue else operation.stream), []).append(operation)
    waiting = [iter(queue) for queue in queues.values()]
    heads = [next(queue, None) for queue in waiting]
    while any(head is not None for head in heads):
        able = [place for place, head in enumerate(heads) if head is not None and head.ready()]
        if not able:
            raise Stuck("nobody can go on")
        place = int(rng.choice(able))
        for _ in range(int(rng.integers(1, 30))):  # far ahead of the others
            head = heads[place]
            if head is None or not head.ready():
                break
            head.do()
            head.done = True
            heads[place] = next(waiting[place], None)


@pytest.mark.parametrize("one_queue", [False, True], ids=["streams", "one queue"])
@pytest.mark.parametrize("depth", [1, 2, 32])
@pytest.mark.parametrize("seed", range(5))
def test_all_ranks_go_on_and_compute_with_what_they_should(seed: int, depth: int, one_queue: bool) -> None:
    checks = run(seed, depth, one_queue)
    assert len(checks) > 100
    assert [check for check in checks if check[1] != check[2]] == []


# -- Replicas that are gathered for each pass: what the backward pass computes again is what the forward computed


def test_dropout_and_what_a_compute_closes_over_get_the_gradients_of_the_forward() -> None:
    home, closed_over = nn.Parameter(torch.full((1, 8), 2.0)), nn.Parameter(torch.tensor(3.0))
    replicas, rows, weights = torch.full((1, 8), 5.0), torch.rand(6, 8, requires_grad=True), torch.rand(6)
    collected: list[Any] = []
    sync = SimpleNamespace(
        check_homes=lambda layer: None,
        expects_gradients=lambda layer: True,
        wait=lambda layer: None,
        takes=lambda layer, edges: True,
        collect=lambda layer, gradients, edges: collected.append(gradients),
    )
    bank = SimpleNamespace(homes_per_rank=1, replicas=[replicas], parameters=[home])

    def compute(rows_MD: Tensor, counts_S: SlotCounts, parameters: list[Tensor]) -> Tensor:
        return functional.dropout(rows_MD * parameters[0][0] * closed_over, 0.5)

    layer = ShardedReplicas(
        compute,
        lambda: [home],
        1.0,
        layer=0,
        bank=bank,
        sync=sync,
        group=None,
        replica_group=None,
    )
    out = layer(rows, SlotCounts.of([2, 4], torch.device("cpu")), weights.requires_grad_())
    torch.rand(100)  # others draw, too
    out.sum().backward()
    kept = (out.detach() != 0) * 2.0
    assert 0 < kept[2:].count_nonzero() < kept[2:].numel(), "control: it drops some"
    weight = torch.cat([home.detach().expand(2, 8), replicas.expand(4, 8)])
    by_row = weights.detach().unsqueeze(1) * kept
    torch.testing.assert_close(rows.grad, by_row * weight * 3)
    torch.testing.assert_close(closed_over.grad, (by_row * weight * rows.detach()).sum())
    torch.testing.assert_close(collected[0][0], (by_row * rows.detach() * 3)[2:].sum(0, keepdim=True))
    torch.testing.assert_close(home.grad, (by_row * rows.detach() * 3)[:2].sum(0, keepdim=True))
    torch.testing.assert_close(weights.grad, out.detach().sum(1))


# -- Two batches at once wait for the same copies: neither goes on before what is handed on has come


class Rows:
    """``posted`` is called when they are posted, ``arrive`` when they are waited for."""

    def __init__(self, posted: Callable[[], None], arrive: Callable[[], None]) -> None:
        self._posted, self._arrive = posted, arrive

    def post(self) -> list[Any]:
        self._posted()
        return [SimpleNamespace(wait=self._arrive)]


def made(*weights: Any) -> ReplicaSync:
    """Of one layer without tensors, whose weights travel so."""
    bank: Any = SimpleNamespace(parameters=[])
    carrier: Any = SimpleNamespace(post=lambda stages: [stage.post() for stage in stages])
    channels: Any = MicroBatchChannels(None)  # type: ignore[arg-type]
    sync = ReplicaSync({0: bank}, carrier, 0, 1, 1, 1, channels)
    sync._plans[0] = ReplicaPlan(list(weights))
    return sync


def test_both_of_two_batches_wait_for_copies_that_are_handed_on() -> None:
    seen: list[str] = []
    gone_on = threading.Event()

    def other_waits() -> None:
        sync.wait(0)
        seen.append("the other goes on")
        gone_on.set()

    def arrive() -> None:
        gone_on.wait(0.2)  # in vain, but for one that does not wait for the rows
        seen.append("arrived")

    other = threading.Thread(target=other_waits)
    sync = made(Rows(lambda: None, lambda: None), Rows(other.start, arrive))
    sync.refresh()
    sync.wait(0)
    other.join()
    assert seen == ["arrived", "the other goes on"], "and they are posted once"


# -- The double of torch's symmetric memory goes by the signatures of the torch that is installed


@pytest.mark.parametrize("name", ["empty", "rendezvous", "get_backend", "get_signal_pad_size"])
def test_the_double_has_the_functions_of_torch(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (_symmetric_memory, double))
    assert list(theirs) == list(ours)
    assert [p.kind for p in theirs.values()] == [p.kind for p in ours.values()]


@pytest.mark.parametrize("name", ["get_buffer", "get_remote_tensor", "put_signal", "wait_signal"])
def test_the_double_has_the_methods_of_torchs_handle(name: str) -> None:
    """Those of torch are bound to C++, and their signatures stand in the docstrings."""
    theirs = getattr(torch._C._distributed_c10d._SymmetricMemory, name).__doc__
    parameters = [one.split(":")[0].strip() for one in theirs[theirs.index("(") + 1 : theirs.index(" ->")].split(", ")]
    ours = list(inspect.signature(getattr(double.SymmetricMemory, name)).parameters)
    assert [one for one in parameters if one in ours] == ours, theirs


def test_torch_has_what_else_is_used_of_it() -> None:
    for name in ("_register_process_group", "_resolve_process_group"):
        assert callable(getattr(torch._C._distributed_c10d, name))
    for name in ("rank", "world_size", "signal_pad_size", "buffer_size"):
        assert hasattr(torch._C._distributed_c10d._SymmetricMemory, name)
