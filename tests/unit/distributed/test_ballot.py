"""All that can happen to three ranks in one decision: answers that come late or never, ranks that stand still at any
point, counts that break off. The table is the code's own; the rule that it replaced is shown to part ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

import eplb_runtime
from eplb_runtime.distributed.consensus import DECIDED, TABLE, Ballot, Phase, State, Verdict, VoteEvent

RANKS = 3
Table = Mapping[tuple[State, VoteEvent], tuple[State, bool]]


@dataclass(frozen=True)
class Rank:
    """Args:
    said: to the other ranks: "" (nothing yet), "yes" or "no".
    counted: whether its count of what all have said is over.
    asks: the words it has proposed for the record; each may reach it at any time from then on, or never.
    """

    state: State = State.OPEN
    said: str = ""
    counted: bool = False
    asks: frozenset[bool] = frozenset()


@dataclass(frozen=True)
class World:
    """The ranks, whichever is which, and what the record holds: nothing, commit or abort."""

    ranks: tuple[Rank, ...] = (Rank(),) * RANKS
    record: bool | None = None

    def but(self, number: int, rank: Rank, record: bool | None = None) -> World:
        others = (old for each, old in enumerate(self.ranks) if each != number)
        ranks = tuple(sorted((rank, *others), key=in_order))
        return World(ranks, self.record if record is None else record)


@cache
def in_order(rank: Rank) -> str:
    return f"{rank.state} {rank.said} {rank.counted} {sorted(rank.asks)}"


def steps(world: World, table: Table, *, follows_itself: bool = False) -> Iterator[World]:
    """What may happen next. A rank that stands still is one to which nothing happens for a while.

    Args:
        follows_itself: the old rule: a rank that hears no answer does what it has proposed.
    """
    for number, rank in enumerate(world.ranks):
        yield from (world.but(number, after) for after in alone(rank, world, table))
        for proposed in rank.asks:
            record = proposed if world.record is None else world.record
            yield world.but(number, rank, record)  # and the answer is lost
            yield world.but(number, heard(rank, VoteEvent.COMMIT if record else VoteEvent.ABORT, table), record)
            if follows_itself and rank.state is State.DOUBT:
                yield world.but(number, replace(rank, state=State.COMMITTED if proposed else State.ABORTED))


def alone(rank: Rank, world: World, table: Table) -> Iterator[Rank]:
    """What a rank does, or hears of the others' votes."""
    if rank.state is State.OPEN:
        yield replace(heard(rank, VoteEvent.VOTE, table), said="yes")
        for said in ("", "no"):  # one that cannot even say no hangs up
            yield replace(heard(rank, VoteEvent.REFUSE, table, proposes=False), said=said, counted=not said)
    elif rank.state is State.DOUBT and False not in rank.asks:
        yield heard(rank, VoteEvent.REFUSE, table, proposes=False)
    if rank.said and not rank.counted:
        counted = replace(rank, counted=True)
        yield heard(counted, VoteEvent.LOST, table, proposes=False)
        if all(other.said == "yes" for other in world.ranks):
            yield heard(counted, VoteEvent.ALL_YES, table, proposes=True)
        if any(other.said == "no" for other in world.ranks):
            yield heard(counted, VoteEvent.A_NO, table, proposes=False)


def heard(rank: Rank, what: VoteEvent, table: Table, proposes: bool | None = None) -> Rank:
    state, records = table.get((rank.state, what), (rank.state, False))
    asks = rank.asks | {proposes} if records and proposes is not None else rank.asks
    return replace(rank, state=state, asks=asks)


def explored(table: Table, **rules: bool) -> dict[World, set[World]]:
    """All worlds that can be, each with those that may follow; ends at the first where ranks have parted."""
    begin = World()
    found: dict[World, set[World]] = {}
    ahead = [begin]
    while ahead:
        world = ahead.pop()
        if world in found:
            continue
        found[world] = set(steps(world, table, **rules)) - {world}
        if parted(world):
            break
        ahead += found[world]
    return found


def parted(world: World) -> bool:
    return {State.COMMITTED, State.ABORTED} <= {rank.state for rank in world.ranks}


def can_end(worlds: dict[World, set[World]]) -> set[World]:
    """Those from which all ranks can still come to a decision."""
    before: dict[World, set[World]] = {}
    for world, following in worlds.items():
        for later in following:
            before.setdefault(later, set()).add(world)
    good = {world for world in worlds if all(rank.state in DECIDED for rank in world.ranks)}
    ahead = list(good)
    while ahead:
        for world in before.get(ahead.pop(), set()) - good:
            good.add(world)
            ahead.append(world)
    return good


def test_ranks_never_part_and_always_can_come_to_a_decision() -> None:
    worlds = explored(TABLE)
    assert len(worlds) > 500
    assert not any(map(parted, worlds))
    for world in worlds:
        if world.record:
            apart = [rank for rank in world.ranks if rank.state is State.ABORTED]
            assert not apart, "who has refused alone, or read the record, never finds a commit there"
    assert can_end(worlds) == set(worlds)
    ends = {frozenset(rank.state for rank in world.ranks) for world in worlds}
    assert {frozenset({State.COMMITTED}), frozenset({State.ABORTED})} <= ends


OTHER_RULES: dict[str, tuple[Table, dict[str, bool]]] = {
    "who hears no answer follows itself": (TABLE, {"follows_itself": True}),
    "who has said yes refuses alone": ({**TABLE, (State.DOUBT, VoteEvent.REFUSE): (State.ABORTED, True)}, {}),
    "who has counted all yes commits": ({**TABLE, (State.DOUBT, VoteEvent.ALL_YES): (State.COMMITTED, True)}, {}),
}


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_any_simpler_rule_parts_ranks(rule: str) -> None:
    table, rules = OTHER_RULES[rule]
    assert any(map(parted, explored(table, **rules)))


def test_a_ballot_takes_the_steps_of_the_table() -> None:
    no = Verdict(False, "no memory")
    refused = Ballot("a")
    assert refused.hear(VoteEvent.REFUSE, no)
    assert not refused.hear(VoteEvent.VOTE, Verdict(True)), "its no stands"
    assert refused.refusal == "no memory" and refused.verdict is None, "another rank's words may stand"
    refused.hear(VoteEvent.ABORT, Verdict(False, "rank 1: odd bytes"))
    assert refused.verdict == Verdict(False, "rank 1: odd bytes") and refused.wait(0.0)

    alone = Ballot("without a store")
    alone.hear(VoteEvent.REFUSE, no)
    alone.hear(VoteEvent.SILENCE, no)
    assert alone.verdict == Verdict(False, "no memory", connections_broken=True)

    voted = Ballot("b")
    assert not voted.hear(VoteEvent.VOTE, Verdict(True))
    assert voted.hear(VoteEvent.REFUSE, no)
    assert voted.verdict is None and not voted.wait(0.0), "its yes may have been counted"
    voted.hear(VoteEvent.COMMIT, Verdict(True))
    voted.hear(VoteEvent.ABORT, no)
    assert voted.verdict == Verdict(True) and voted.state is State.COMMITTED


# -- Points of the protocol: each that is named is reached somewhere, and none is reached that has no name


PACKAGE = Path(eplb_runtime.__file__).parent
PROBES = {"probe", "_probe", "_at_point"}


def reached(source: str) -> Iterator[str]:
    """Names of points at which a file calls a probe; what it passes instead, where that is no name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in PROBES:
            point = node.args[0]
            named = isinstance(point, ast.Attribute) and ast.unparse(point.value) == "Phase"
            yield point.attr if named else ast.unparse(point)


def test_each_point_has_a_name_and_each_name_a_point() -> None:
    files = list(PACKAGE.rglob("*.py"))
    found = {name for path in files for name in reached(path.read_text())}
    assert found - {"phase"} == set(Phase.__members__), (
        "name the point in eplb_runtime/distributed/consensus.py, and reach each"
    )
    assert list(reached('self._probe(Phase.NEW, 1); probe("other", 2)')) == ["NEW", "'other'"]
