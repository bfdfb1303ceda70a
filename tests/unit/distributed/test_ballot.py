"""All that can happen to three ranks in one decision: answers that come late or never, ranks that stand still at any
point, counts that break off. Each step is the ballot's own; the rules that it replaced are shown to part ranks."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest

import eplb_runtime
from eplb_runtime.distributed.consensus import Agreement, Ballot, Phase, Verdict
from eplb_runtime.distributed.store import StoreError

RANKS = 3
ALONE, ALL_YES, ITSELF = "who has said yes refuses alone", "who has counted all yes commits", "no answer: its own word"
"""Simpler rules than the ballot's."""


@dataclass(frozen=True)
class Rank:
    """Args:
    refused, bound, knows: its ballot, and the verdict there.
    said: to the other ranks: "" (nothing yet), "yes" or "no".
    counted: whether its count of what all have said is over.
    asks: the words it has proposed for the record; each may reach it at any time from then on, or never.
    """

    refused: bool = False
    bound: bool = False
    knows: bool | None = None
    said: str = ""
    counted: bool = False
    asks: frozenset[bool] = frozenset()

    @property
    def commits(self) -> bool | None:
        """Whether it does; None: it may still do either."""
        alone = self.refused or (self.said == "yes" and not self.bound)
        return False if alone and self.knows is None else self.knows

    def asking(self, word: bool) -> "Rank":
        return replace(self, asks=self.asks | {word})

    def after(self, act: Callable[[Ballot], None]) -> "Rank":
        """The rank once its ballot has been through this."""
        ballot = Ballot("a")
        ballot.refusal, ballot.bound = "no" * self.refused, self.bound
        ballot.verdict = None if self.knows is None else Verdict(self.knows)
        act(ballot)
        knows = None if ballot.verdict is None else ballot.verdict.commit
        return replace(self, refused=bool(ballot.refusal), bound=ballot.bound, knows=knows)


@dataclass(frozen=True)
class World:
    """The ranks, whichever is which, and what the record holds: nothing, commit or abort."""

    ranks: tuple[Rank, ...] = (Rank(),) * RANKS
    record: bool | None = None

    def but(self, number: int, rank: Rank, record: bool | None = None) -> "World":
        others = (old for each, old in enumerate(self.ranks) if each != number)
        ranks = tuple(sorted((rank, *others), key=in_order))
        return World(ranks, self.record if record is None else record)


@cache
def in_order(rank: Rank) -> str:
    return f"{rank.refused} {rank.bound} {rank.knows} {rank.said} {rank.counted} {sorted(rank.asks)}"


def steps(world: World, rule: str) -> Iterator[World]:
    """What may happen next. A rank that stands still is one to which nothing happens for a while."""
    for number, rank in enumerate(world.ranks):
        yield from (world.but(number, after) for after in alone(rank, world, rule))
        for proposed in rank.asks:
            record = proposed if world.record is None else world.record
            yield world.but(number, rank, record)  # and the answer is lost
            yield world.but(number, rank.after(lambda ballot, record=record: ballot.settle(Verdict(record))), record)
            if rule == ITSELF and rank.bound:
                yield world.but(number, replace(rank, bound=proposed, knows=proposed))


def alone(rank: Rank, world: World, rule: str) -> Iterator[Rank]:
    """What a rank does, or hears of the others' votes."""
    if not rank.said and not rank.refused:
        yield replace(rank.after(lambda ballot: ballot.say("")), said="yes")
        for said in ("", "no"):  # one that cannot even say no hangs up
            yield replace(rank.asking(False).after(lambda ballot: ballot.say("no")), said=said, counted=not said)
    elif rank.bound and rank.knows is None and False not in rank.asks:
        yield rank.asking(False).after(lambda ballot: ballot.say("late"))
        if rule == ALONE:
            yield replace(rank, bound=False, knows=False)
    if rank.said and not rank.counted:
        counted = replace(rank, counted=True)
        yield counted.asking(False)
        if all(other.said == "yes" for other in world.ranks):
            yield counted.asking(True)
            if rule == ALL_YES:
                yield replace(counted, knows=True)
        if any(other.said == "no" for other in world.ranks):
            yield replace(counted.asking(False), bound=counted.bound and counted.knows is True)


def explored(rule: str = "") -> dict[World, set[World]]:
    """All worlds that can be, each with those that may follow; ends at the first where ranks have parted."""
    begin = World()
    found: dict[World, set[World]] = {}
    ahead = [begin]
    while ahead:
        world = ahead.pop()
        if world in found:
            continue
        found[world] = set(steps(world, rule)) - {world}
        if parted(world):
            break
        ahead += found[world]
    return found


def parted(world: World) -> bool:
    return {True, False} <= {rank.commits for rank in world.ranks}


def can_end(worlds: dict[World, set[World]]) -> set[World]:
    """Those from which all ranks can still come to a decision."""
    before: dict[World, set[World]] = {}
    for world, following in worlds.items():
        for later in following:
            before.setdefault(later, set()).add(world)
    good = {world for world in worlds if all(rank.commits is not None for rank in world.ranks)}
    ahead = list(good)
    while ahead:
        for world in before.get(ahead.pop(), set()) - good:
            good.add(world)
            ahead.append(world)
    return good


def test_ranks_never_part_and_always_can_come_to_a_decision() -> None:
    worlds = explored()
    assert len(worlds) > 500
    assert not any(map(parted, worlds))
    for world in worlds:
        if world.record:
            apart = [rank for rank in world.ranks if rank.commits is False]
            assert not apart, "who has refused alone, or read the record, never finds a commit there"
    assert can_end(worlds) == set(worlds)
    ends = {frozenset(rank.commits for rank in world.ranks) for world in worlds}
    assert {frozenset({True}), frozenset({False})} <= ends


@pytest.mark.parametrize("rule", [ALONE, ALL_YES, ITSELF])
def test_any_simpler_rule_parts_ranks(rule: str) -> None:
    assert any(map(parted, explored(rule)))


def test_the_first_word_of_a_rank_stands_and_so_does_the_first_verdict() -> None:
    no = Verdict(False, "no memory")
    refused = Ballot("a")
    refused.say("no memory")
    refused.say("")
    assert refused.refusal == "no memory" and refused.verdict is None, "another rank's words may stand"
    with pytest.raises(RuntimeError, match="holds a commit that this rank has refused"):
        refused.settle(Verdict(True))
    refused.settle(Verdict(False, "rank 1: odd bytes"))
    assert refused.verdict == Verdict(False, "rank 1: odd bytes") and refused.wait(0.0)

    silent = Agreement.__new__(Agreement)
    silent._store, silent._most_seconds = Mock(compare_set=Mock(side_effect=StoreError("gone"))), 1800.0
    assert silent.refuse(Ballot("without a store"), no) == replace(no, connections_broken=True)

    voted = Ballot("b")
    voted.say("")
    voted.say("no memory")
    assert voted.bound and not voted.refusal and not voted.wait(0.0), "its yes may have been counted"
    voted.settle(Verdict(True))
    voted.settle(no)
    assert voted.verdict == Verdict(True) and voted.bound


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
    found = {name for path in PACKAGE.rglob("*.py") for name in reached(path.read_text())}
    assert found - {"phase"} == set(Phase.__members__), "name the point in distributed/consensus.py, and reach each"
    assert list(reached('self._probe(Phase.NEW, 1); probe("other", 2)')) == ["NEW", "'other'"]
