"""The engine by itself, on tensors that say where they come from: many rounds, every phase failing after none, one or
some of them, ranks that hold different layers, and what may happen after an agreement."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from eplb_runtime.distributed.consensus import Agreement, Ballot
from eplb_runtime.distributed.store import JobStore
from eplb_runtime.distributed.transports.torch_p2p import TorchPointToPoint
from eplb_runtime.migration.between_steps import migrate_between_steps
from eplb_runtime.migration.engine import MigrationBroken, MigrationEngine, Phase
from eplb_runtime.migration.progress import MigrationProgress
from eplb_runtime.migration.schedule import make_schedule
from eplb_runtime.moe.experts.registry import ExpertTensors
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.placement import Placement

LAYERS, EXPERTS, RANKS = 3, 12, 4
RECORD_BYTES = 3 * 64
TIMEOUT = 30.0
CPU = torch.device("cpu")


class Cluster:
    """One rank of a small job: an engine, its live tensors, and maps that follow.

    Args:
        ep_ranks: of this rank's EP group.
        layers: that this rank holds.
        odd: whether this rank's tensors of layer 1 have another shape.
        timeout: seconds that ranks wait for each other.
    """

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
        self.registry = ExpertTensors(placement.num_layers, placement.homes_per_rank)
        self.tensors: dict[int, list[torch.Tensor]] = {}
        for layer in layers:
            shapes = [(placement.homes_per_rank, 5), (placement.homes_per_rank, 3, 4), (placement.homes_per_rank,)]
            if odd and layer == 1:
                shapes[0] = (placement.homes_per_rank, 6)
            dtypes = [torch.float32, torch.bfloat16, torch.int64]
            self.tensors[layer] = [torch.empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)]
            for number, tensor in enumerate(self.tensors[layer]):
                self.registry.add(layer, f"t{number}", tensor, "buffer")
        self.placement = placement
        self.fill()
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

    def fill(self) -> None:
        for layer, tensors in self.tensors.items():
            for slot in range(self.placement.homes_per_rank):
                for tensor in tensors:
                    tensor[slot] = self.expected(layer, slot)

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
        every = torch.arange(EXPERTS)
        maps = all(torch.equal(self.table.slots(layer, every), home[layer]) for layer in range(placement.num_layers))
        return rows and maps

    def get_ready(self, placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
        follow = self.table.prepare(placement, layers)

        def take_over() -> None:
            self.epochs.append(placement.epoch)
            follow()

        return take_over

    def migrate(self, target: Placement, key: str = "m") -> MigrationProgress:
        return migrate_between_steps(self.engine, self.placement, target, key, self.get_ready)


def random_target(seed: int, layers: int = LAYERS, ranks: int = RANKS) -> Placement:
    rng = np.random.default_rng(seed)
    home = np.stack([rng.permutation(EXPERTS) for _ in range(layers)])
    return Placement(home.argsort(axis=1), EXPERTS, ranks, home)


def go_there_and_back(
    rank: int, staging_bytes: int
) -> tuple[MigrationProgress, MigrationProgress, bool, bool, list[int]]:
    start, target = Placement.initial(LAYERS, EXPERTS, RANKS), random_target(1)
    cluster = Cluster(rank, start, staging_bytes)
    there = cluster.migrate(target)
    arrived = cluster.stands_by(there.placement)
    back = cluster.migrate(start.with_epoch(there.placement.epoch), "back")
    return there, back, arrived, cluster.stands_by(back.placement), cluster.epochs


STAGING_BYTES = (1, 2 * RECORD_BYTES, 1 << 20)


def go_with_each(rank: int) -> list[tuple[MigrationProgress, MigrationProgress, bool, bool, list[int]]]:
    return [go_there_and_back(rank, staging_bytes) for staging_bytes in STAGING_BYTES]


@functools.cache
def journeys() -> dict[int, list[tuple[MigrationProgress, MigrationProgress, bool, bool, list[int]]]]:
    """By staging memory: what each rank has seen."""
    return dict(zip(STAGING_BYTES, map(list, zip(*run_ranks(RANKS, go_with_each), strict=True)), strict=True))


@pytest.mark.parametrize("staging_bytes", STAGING_BYTES)
def test_every_row_arrives_in_as_many_rounds_as_staging_makes_it(staging_bytes: int) -> None:
    start, target = Placement.initial(LAYERS, EXPERTS, RANKS), random_target(1)
    rounds = len(make_schedule(start, target, [RECORD_BYTES] * LAYERS, staging_bytes).rounds)
    assert (rounds == 1) == (staging_bytes > 10 * RECORD_BYTES)
    for there, back, arrived, returned, epochs in journeys()[staging_bytes]:
        assert arrived and returned
        assert there.rounds == rounds
        assert there.placement.digest() == target.digest() and back.placement.digest() == start.digest()
        assert epochs == list(range(1, rounds + back.rounds + 1)), "an epoch names one placement"
        assert there.committed_layers == (0, 1, 2) and there.left_layers == ()
        assert there.moved_experts == (start.home_rank != target.home_rank).sum()
        assert set(there.seconds) == {"prepare", "post", "verify", "transfer", "maps", "vote", "commit"}
    payload = 5 * 4 + 12 * 2 + 8
    received = sum(there.received_bytes for there, *_ in journeys()[staging_bytes])
    assert received == payload * (start.home_rank != target.home_rank).sum()


def fail_at(phase: Phase, committed: int) -> Callable[[Phase, Any], None]:
    """A probe that raises once, when so many rounds are committed."""
    seen = {"committed": 0, "failed": False}

    def probe(reached: Phase, subject: object) -> None:
        if reached is phase and seen["committed"] >= committed and not seen["failed"]:
            seen["failed"] = True
            raise OSError("the device went away")
        if reached is Phase.COMMITTED:
            seen["committed"] += 1

    return probe


def corrupt_at(committed: int) -> Callable[[Phase, Any], None]:
    seen = {"committed": 0, "failed": False}

    def probe(reached: Phase, subject: Any) -> None:
        if reached is Phase.STAGED and subject and seen["committed"] >= committed and not seen["failed"]:
            seen["failed"] = True
            subject[0].record[3] ^= 1
        if reached is Phase.COMMITTED:
            seen["committed"] += 1

    return probe


def fail_before_the_vote(
    rank: int, phase: str, committed: int
) -> tuple[MigrationProgress, bool, int, MigrationProgress, bool]:
    start, target = Placement.initial(LAYERS, EXPERTS, RANKS), random_target(1)
    cluster = Cluster(rank, start)
    if rank == 2:
        cluster.engine.probe = corrupt_at(committed) if phase == "corrupt" else fail_at(Phase(phase), committed)
    dropped = cluster.migrate(target)
    whole = cluster.stands_by(dropped.placement)
    commits = len(cluster.epochs)
    again = cluster.migrate(target, "again")
    return dropped, whole, commits, again, cluster.stands_by(again.placement)


FAILURES = [("prepared", 0), *((phase, count) for phase in ("staged", "verified", "corrupt") for count in (0, 1, 3))]
"""Phase, and rounds committed before; there is one preparation."""


def fail_in_all_ways(rank: int) -> list[tuple[MigrationProgress, bool, int, MigrationProgress, bool]]:
    return [fail_before_the_vote(rank, *failure) for failure in FAILURES]


@functools.cache
def failures() -> dict[tuple[str, int], list[tuple[MigrationProgress, bool, int, MigrationProgress, bool]]]:
    """By way of failing: what each rank has seen. The ways follow one another on the same ranks."""
    by_rank = run_ranks(RANKS, fail_in_all_ways)
    return dict(zip(FAILURES, (list(results) for results in zip(*by_rank, strict=True)), strict=True))


@pytest.mark.parametrize(("phase", "committed"), FAILURES)
def test_what_fails_before_the_vote_leaves_what_was_committed_and_the_next_try_works(
    phase: str, committed: int
) -> None:
    start, target = Placement.initial(LAYERS, EXPERTS, RANKS), random_target(1)
    for dropped, whole, commits, again, arrived in failures()[phase, committed]:
        assert dropped.failed_phase is (Phase.PREPARED if phase == "prepared" else Phase.STAGED)
        assert ("checksum" if phase == "corrupt" else "rank 2: OSError: the device went away") in dropped.cause
        assert not dropped.connections_broken
        assert whole, "live rows or maps differ from the placement that is said to stand"
        assert dropped.rounds == commits and commits >= committed
        assert bool(dropped.committed_layers) == (committed > 0)
        stands_there = (dropped.placement.physical_to_logical == target.physical_to_logical).all(axis=1)
        assert dropped.left_layers == tuple(np.flatnonzero(~stands_there).tolist())
        assert (dropped.placement.digest() == start.digest()) == (committed == 0)
        assert again.failed_phase is None and arrived
        assert again.placement.digest() == target.digest()


def fail_after_the_vote(rank: int, phase: str, committed: int) -> tuple[list[str], str, int]:
    """What rank 2 says at three calls; the others go on."""
    cluster = Cluster(rank, Placement.initial(LAYERS, EXPERTS, RANKS), timeout=5.0)
    said = []
    if rank == 2:
        if phase == "take over":
            get_ready, count = cluster.get_ready, []

            def no_memory() -> None:
                raise MemoryError("no memory for maps")

            def failing(placement: Placement, layers: Sequence[int]) -> Callable[[], None]:
                count.append(placement)
                return get_ready(placement, layers) if len(count) <= committed else no_memory

            cluster.get_ready = failing
        else:
            cluster.engine.probe = fail_at(Phase(phase), committed)
    for attempt in range(2):
        try:
            outcome = cluster.migrate(random_target(1), str(attempt))
            said.append(outcome.cause)
            if outcome.cause:
                break
        except MigrationBroken as error:
            said.append(f"broken: {error}")
    if rank == 2:
        for group in cluster.groups:  # so that the others need not wait for the timeout
            dist.destroy_process_group(group)
    return said, cluster.engine.broken, len(cluster.epochs)


@pytest.mark.parametrize(("phase", "committed"), [("decided", 0), ("committed", 2), ("take over", 0)])
def test_a_rank_that_fails_after_an_agreement_is_broken_for_good_and_says_so(phase: str, committed: int) -> None:
    results = run_ranks(RANKS, fail_after_the_vote, phase, committed)
    for rank, (said, broken, _) in enumerate(results):
        if rank == 2:
            assert len(said) == 2 and all(line.startswith("broken: ") for line in said)
            assert said[0] == said[1] == f"broken: {broken}"
            assert (
                "go back to a checkpoint" in broken and ("MemoryError" if phase == "take over" else "OSError") in broken
            )
        else:
            assert not broken
            assert said[0], "the others cannot have gone on without rank 2"


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


def watch_memory(rank: int) -> tuple[list[str], list[str]]:
    """What is allocated before the votes, and after them."""
    cluster = Cluster(rank, Placement.initial(LAYERS, EXPERTS, RANKS))
    engine = cluster.engine
    with Allocations() as before:
        migration, verdict = engine.prepare(cluster.placement, random_target(1), "m")
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
    return before.found, after.found


def test_all_memory_is_there_before_the_vote() -> None:
    for before, after in run_ranks(RANKS, watch_memory):
        assert before, "the control: allocations are noticed"
        assert after == []


def migrate_two_stages(rank: int, staging_bytes: int) -> tuple[MigrationProgress, bool]:
    """Ranks 0 and 1 hold layers 0 and 1, ranks 2 and 3 layer 2: two pipeline stages, two EP groups."""
    stage = rank // 2
    start = Placement.initial(LAYERS, EXPERTS, 2)
    cluster = Cluster(rank, start, staging_bytes, ep_ranks=[2 * stage, 2 * stage + 1], layers=[[0, 1], [2]][stage])
    outcome = cluster.migrate(random_target(1, ranks=2))
    return outcome, cluster.stands_by(outcome.placement)


def test_pipeline_stages_migrate_at_once_each_its_own_layers() -> None:
    start, target = Placement.initial(LAYERS, EXPERTS, 2), random_target(1, ranks=2)
    apart = make_schedule(start, target, [RECORD_BYTES] * LAYERS, 1, holders=[0, 0, 1])
    together = make_schedule(start, target, [RECORD_BYTES] * LAYERS, 1)
    for outcome, arrived in run_ranks(RANKS, migrate_two_stages, 1):
        assert arrived
        assert outcome.placement.digest() == target.digest()
        assert outcome.rounds == len(apart.rounds) < len(together.rounds)


def migrate_with_odd_ranks(rank: int, odd: Sequence[int], stages: bool) -> MigrationProgress:
    stage = rank // 2
    ranks = 2 if stages else RANKS
    cluster = Cluster(
        rank,
        Placement.initial(LAYERS, EXPERTS, ranks),
        ep_ranks=[2 * stage, 2 * stage + 1] if stages else range(RANKS),
        layers=[[0, 1], [2]][stage] if stages else range(LAYERS),
        odd=rank in odd,
    )
    return cluster.migrate(random_target(1, ranks=ranks))


ODD = [
    ([2], False, "rank 2 has another record of layer 1 than rank 0"),
    ([1, 3], False, "rank 1, 3 has another record of layer 1 than rank 0"),
    ([1], True, "rank 1 has another record of layer 1 than rank 0"),
    ([2], True, ""),  # holds no layer 1
]


def migrate_with_each(rank: int) -> list[MigrationProgress]:
    return [migrate_with_odd_ranks(rank, odd, stages) for odd, stages, _ in ODD]


def test_a_rank_whose_experts_look_different_is_named_before_anything_travels() -> None:
    for outcomes in run_ranks(RANKS, migrate_with_each):
        for outcome, (_, _, cause) in zip(outcomes, ODD, strict=True):
            assert outcome.cause == cause
            assert outcome.rounds == 0 or not cause
            assert not outcome.connections_broken
