"""Moves within a rank overwrite nothing before it is read; messages of a record hold every byte of it once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.migration.exchange import chains_of
from eplb_runtime.migration.records import DIRECT_BYTES, packed_bytes, segments_of
from eplb_runtime.moe.experts.record import Record, RecordFormat
from eplb_runtime.moe.experts.registry import ExpertTensor

CPU = torch.device("cpu")


@st.composite
def moves_within(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Slots of a rank, and moves between them that are part of a permutation: what is not moved on has left."""
    slots = draw(st.integers(1, 8))
    after = draw(st.permutations(range(slots)))
    moved = [(source, to) for source, to in enumerate(after) if source != to]
    stay_away = draw(st.sets(st.sampled_from([source for source, _ in moved]))) if moved else set()
    return slots, draw(st.permutations([move for move in moved if move[0] not in stay_away]))


@given(moves_within())
def test_chains_bring_every_slot_where_it_goes(example: tuple[int, list[tuple[int, int]]]) -> None:
    slots, moves = example
    rows, expected = list(range(slots)), list(range(slots))
    for source, to in moves:
        expected[to] = source
    chains = chains_of(moves)
    assert sorted(move for chain in chains for move in chain) == sorted(moves)
    for chain in chains:
        end = chain[0][1]
        ring = chain[-1][0] == end
        aside = rows[end]
        for source, to in chain:
            rows[to] = aside if ring and source == end else rows[source]
    written = {to for _, to in moves}
    assert [rows[slot] for slot in written] == [expected[slot] for slot in written]


def record_of(*tensors: ExpertTensor) -> Record:
    return RecordFormat(tensors).row(1)


LARGE = DIRECT_BYTES // 4


@pytest.mark.parametrize(
    ("widths", "direct"),
    [
        ((3, 5), [False]),
        ((LARGE, LARGE), [True, True]),
        ((3, LARGE, 5, 7, LARGE), [False, True, False, True]),
        ((LARGE, 1), [True, False]),
    ],
)
def test_large_rows_are_sent_from_their_place_and_small_ones_together(
    widths: tuple[int, ...], direct: list[bool]
) -> None:
    record = record_of(*(ExpertTensor(f"t{i}", torch.zeros(2, width), "buffer") for i, width in enumerate(widths)))
    runs = segments_of(record, CPU)
    assert [run.direct for run in runs] == direct
    covered = torch.zeros(record.nbytes, dtype=torch.int64)
    for run in runs:
        covered[run.first : run.end] += 1
    for shard in record.shards:
        assert (covered[shard.offset : shard.end] == 1).all()
    assert packed_bytes(runs) == sum(run.end - run.first for run in runs if not run.direct)
    assert [run.direct for run in segments_of(record, torch.device("meta"))] == [False], "rows of another device"


def test_rows_that_may_be_elsewhere_on_other_ranks_are_packed_everywhere() -> None:
    rows = tuple(torch.zeros(DIRECT_BYTES, dtype=torch.uint8) for _ in range(2))
    for varies in (False, True):
        (run,) = segments_of(
            record_of(ExpertTensor("w/exp_avg", rows, "optimizer_state", varies_in_device=varies)), CPU
        )
        assert run.direct != varies
