"""The engine by itself, on tensors that say where they come from: many rounds, ranks that hold different layers, and
what may happen after an agreement. What fails before one: `test_faults`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from eplb_runtime.distributed.consensus import Agreement, Ballot
from eplb_runtime.distributed.store import JobStore
from eplb_runtime.distributed.transports.base import TransportError
from eplb_runtime.distributed.transports.torch_p2p import TorchPointToPoint
from eplb_runtime.migration.engine import MigrationBroken, MigrationEngine, MigrationProgress, Phase
from eplb_runtime.migration.exchange import Records, RoundExecutor, RoundState
from eplb_runtime.migration.schedule import Round, make_schedule
from eplb_runtime.moe.experts.registry import ExpertTensors
from eplb_runtime.moe.routing.slots import SlotTable
from eplb_runtime.placement import Placement

LAYERS, EXPERTS, RANKS = 3, 12, 4
RECORD_BYTES = 3 * 64
TIMEOUT = 30.0
CPU = torch.device("cpu")


class Cluster:
    """One rank of a small job: an engine, its live tensors of ``layers``, and maps that follow; ``ep_ranks``: of its EP
    group; ``odd``: its tensors of layer 1 have another shape."""

    def __init__(
        self,
        rank: int,
        placement: Placement,
        staging_bytes: int = 1,
        ep_ranks: Sequence[int] = range(RANKS),
        layers: Sequence[int] = range(LAYERS),
        odd: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        size = len(ep_ranks)
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, RANKS, size)]
        self.groups = [groups[rank // size], dist.new_group(timeout=timedelta(seconds=timeout))]
        self.ep_rank = list(ep_ranks).index(rank)
        self.placement, homes = placement, placement.homes_per_rank
        self.registry = ExpertTensors(placement.num_layers, homes)
        self.tensors: dict[int, list[torch.Tensor]] = {}
        for layer in layers:
            shapes = [(homes, 6 if odd and layer == 1 else 5), (homes, 3, 4), (homes,)]
            dtypes = [torch.float32, torch.bfloat16, torch.int64]
            self.tensors[layer] = [torch.empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
            for number, tensor in enumerate(self.tensors[layer]):
                self.registry.add(layer, f"t{number}", tensor, "buffer")
                for slot in range(homes):
                    tensor[slot] = self.expected(layer, slot)
        self.engine = MigrationEngine(
            self.registry,
            TorchPointToPoint(self.groups[0], "gloo", CPU, timeout),
            Agreement(self.groups[1], JobStore(self.groups[1].get_group_store(), "agreement", 30.0)),
            placement.home_rows(),
            self.ep_rank,
            staging_bytes,
            timeout,
        )
        self.table = SlotTable(placement, CPU)
        self.epochs: list[int] = []

    def expected(self, layer: int, slot: int) -> float:
        expert = int(self.placement.homes_LRH[layer, self.ep_rank, slot])
        return float(layer * EXPERTS + expert + 1)

    def stands_by(self, placement: Placement) -> bool:
        """Whether every live row is the one that this placement wants, and the maps say the same."""
        self.placement = placement
        rows = all(
            bool((tensor[slot] == self.expected(layer, slot)).all())
            for layer, tensors in self.tensors.items()
            for slot in range(placement.homes_per_rank)
            for tensor in tensors
        )
        home = torch.from_numpy(placement.home.astype("int64"))
        slots = [self.table.slots(layer, torch.arange(EXPERTS)) for layer in range(placement.num_layers)]
        return rows and all(map(torch.equal, slots, home))

    def get_ready(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        follow = self.table.prepare(placement, layers)

        def take_over() -> None:
            self.epochs.append(placement.epoch)
            follow()

        return take_over

    def migrate(self, target: Placement, key: str = "m") -> MigrationProgress:
        return self.engine.migrate(self.placement, target, key, self.get_ready)


def random_target(seed: int, layers: int = LAYERS, ranks: int = RANKS) -> Placement:
    rng = np.random.default_rng(seed)
    home = np.stack([rng.permutation(EXPERTS) for _ in range(layers)])
    return Placement(home.argsort(axis=1), EXPERTS, ranks, home)


START, TARGET = Placement.initial(LAYERS, EXPERTS, RANKS), random_target(1)


def there_and_back(rank: int) -> None:
    """With staging memory for one expert, and for all."""
    for staging_bytes in (1, 1 << 20):
        rounds = len(make_schedule(START, TARGET, [RECORD_BYTES] * LAYERS, staging_bytes).rounds)
        assert (rounds == 1) == (staging_bytes > 1)
        cluster = Cluster(rank, START, staging_bytes)
        weight = torch.ones(1, 1, requires_grad=True)
        with torch.autocast("cpu"):
            weight @ weight, weight.data.fill_(3.0)
            there = cluster.migrate(TARGET)
            assert weight @ weight == 9.0, "as autocast has cast it before the move"
        assert cluster.stands_by(there.placement) and there.placement.digest() == TARGET.digest()
        assert len(there.rounds) == rounds and there.committed_layers == (0, 1, 2) and there.left_layers == ()
        assert there.moved_experts == (START.home_rank != TARGET.home_rank).sum()
        assert set(there.seconds) == {"prepare", "post", "verify", "transfer", "maps", "vote", "commit"}
        received = torch.tensor(there.received_bytes)
        dist.all_reduce(received)
        assert received == (5 * 4 + 12 * 2 + 8) * there.moved_experts
        back = cluster.migrate(START.with_epoch(there.placement.epoch), "back")
        assert cluster.stands_by(back.placement) and back.placement.digest() == START.digest()
        assert cluster.epochs == list(range(1, rounds + len(back.rounds) + 1)), "an epoch names one placement"


def test_every_row_arrives_in_as_many_rounds_as_staging_makes_it() -> None:
    run_ranks(RANKS, there_and_back)


def fail_after_the_vote(rank: int, in_maps: bool) -> None:
    """Rank 2 fails as maps follow a commit, or when a decision is recorded, and says so at each call."""
    cluster = Cluster(rank, START, timeout=5.0)

    def fail() -> None:
        raise MemoryError("a test says so")

    if rank != 2:
        assert cluster.migrate(TARGET).cause and not cluster.engine.broken
        return
    if in_maps:
        cluster.get_ready = lambda placement, layers: fail
    else:
        cluster.engine.probe = lambda phase, subject: fail() if phase is Phase.DECIDED else None
    for _ in range(2):
        with pytest.raises(MigrationBroken) as broken:
            cluster.migrate(TARGET)
        assert str(broken.value) == cluster.engine.broken
        assert "go back to a checkpoint" in cluster.engine.broken and "MemoryError" in cluster.engine.broken
    for group in cluster.groups:  # so that the others need not wait for the timeout
        dist.destroy_process_group(group)


@pytest.mark.parametrize("in_maps", [False, True])
def test_a_rank_that_fails_after_an_agreement_is_broken_for_good_and_says_so(in_maps: bool) -> None:
    run_ranks(RANKS, fail_after_the_vote, in_maps)


def test_a_rank_that_has_posted_a_part_of_a_round_posts_no_other() -> None:
    transport, nothing = Mock(), Round(0, np.zeros((0, 4), np.int64), (), ())
    transport.post.side_effect = MemoryError
    executor = RoundExecutor(transport, START.home_rows(), 0, CPU, 0)
    for error in (MemoryError, TransportError):
        with pytest.raises(error):
            executor.post(nothing, Records({}, (), ()), RoundState())
    assert transport.post.call_count == 1


class Allocations(TorchDispatchMode):
    """Operations whose result has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in tensors}
        for t in torch.utils._pytree.tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.numel() and t.untyped_storage().data_ptr() not in known:
                self.found.append(str(function))
        return result


def watch_memory(rank: int) -> None:
    cluster = Cluster(rank, START)
    engine = cluster.engine
    with Allocations() as before:
        migration, verdict = engine.prepare(cluster.placement, TARGET)
        assert verdict.commit
    after = Allocations()
    for round_ in migration.schedule.rounds:
        with before:
            engine.executor.restart()
            posted = engine.post(migration, round_)
            engine.arrive(posted, cluster.get_ready)
            assert engine.vote(posted, Ballot(f"m/{round_.number}")).commit
        with after:
            for layer in round_.layers:
                engine.commit(posted, layer)
            engine.finish(posted)
        migration.current = posted.after
    assert cluster.stands_by(migration.current)
    assert before.found and not after.found, "the control: allocations are noticed"


def test_all_memory_is_there_before_the_vote() -> None:
    run_ranks(RANKS, watch_memory)


def two_stages(rank: int, odd: Sequence[int] = ()) -> Cluster:
    """Ranks 0 and 1 hold layers 0 and 1, ranks 2 and 3 layer 2: two pipeline stages, two EP groups."""
    first, start = rank // 2 * 2, Placement.initial(LAYERS, EXPERTS, 2)
    return Cluster(rank, start, 1, ep_ranks=[first, first + 1], layers=[[0, 1], [2]][rank // 2], odd=rank in odd)


ODD = [
    ([1, 3], False, "rank 1, 3 has another record of layer 1 than rank 0"),
    ([1], True, "rank 1 has another record of layer 1 than rank 0"),
    ([2], True, ""),  # holds no layer 1
]


def migrate_with_odd_ranks(rank: int) -> None:
    start, target = Placement.initial(LAYERS, EXPERTS, 2), random_target(1, ranks=2)
    apart = make_schedule(start, target, [RECORD_BYTES] * LAYERS, 1, holders=[0, 0, 1])
    together = make_schedule(start, target, [RECORD_BYTES] * LAYERS, 1)
    for odd, stages, cause in ODD:
        cluster = two_stages(rank, odd) if stages else Cluster(rank, START, odd=rank in odd)
        outcome = cluster.migrate(target if stages else TARGET)
        assert outcome.cause == cause and not outcome.verdict.connections_broken
        assert cluster.stands_by(outcome.placement)
        assert len(outcome.rounds) == (0 if cause else len(apart.rounds)) < len(together.rounds)


def test_stages_migrate_at_once_and_a_rank_whose_experts_look_different_is_named_before_anything_travels() -> None:
    run_ranks(RANKS, migrate_with_odd_ranks)
