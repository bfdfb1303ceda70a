"""`bench overlap` and `two-batches`: the job is the same both ways, and what they say of spans is what these say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from eplb_runtime.tools.bench import overlap, two_batches
from eplb_runtime.tools.bench.overlap_spans import BLOCK, PIPELINE, TOKENS, SlowLink, Span, SpanBlocks


def test_what_is_exposed_is_waited_for_while_no_thread_computes() -> None:
    spans = [
        Span("step", 0, 0.0, 20.0),
        Span(BLOCK, 0, 1.0, 11.0),
        Span("forward of stage 0", 0, 1.0, 9.0),
        Span(TOKENS, 0, 2.0, 5.0),
        Span("backward of stage 3", 1, 1.0, 11.0),
        Span(TOKENS, 1, 4.0, 7.0),
        Span(PIPELINE, 1, 8.0, 10.0),
        Span(TOKENS, 0, 15.0, 16.0),  # outside of blocks
    ]
    blocks = SpanBlocks.of(spans)
    assert (blocks.total, blocks.waiting) == (10.0, 6.0)
    assert blocks.exposed == pytest.approx(1.0)  # from 4 to 5; from 9 to 10 there is nothing to carry
    alone = SpanBlocks.of([span for span in spans if span.thread == 0])
    assert alone.exposed == pytest.approx(3.0) == alone.waiting


class Done:
    def wait(self) -> None:
        pass


def test_messages_on_a_slow_link_wait_for_those_before_them() -> None:
    link = SlowLink()
    over_link = link.slowed(lambda *_: Done())
    first = over_link(torch.empty(10), torch.empty(5), [], [])
    assert first is not None and first.due == 0  # as fast as it is
    link.bytes_per_second, link.shared = 1e4, True
    works = [over_link(torch.empty(10), torch.empty(5), [], []) for _ in range(2)]
    assert link.carried == 3 * 40
    assert works[1].due - works[0].due == pytest.approx(40 / 1e4, abs=1e-6)


def measure(rank: int, folder: str) -> list[dict[str, Any]]:
    sizes = {"micro_batches": 4, "tokens": 16, "width": 16, "layers_per_stage": 1}
    cpu = torch.device("cpu")
    return [
        overlap.run(cpu, 1, trace=Path(folder) / "pipeline", **sizes),
        two_batches.run(cpu, 1, trace=Path(folder) / "batches", tokens=16, width=16, layers=2),
    ]


def test_both_ways_give_the_same_bits_and_a_trace(tmp_path: Path) -> None:
    for result in [one for of_rank in run_ranks(4, measure, str(tmp_path)) for one in of_rank]:
        assert result["same_bits"] and [row["way"] for row in result["rows"]] == ["in turn", "at once"]
        assert result.keys() >= {"hidden_share", "step_ratio", "link_mbit_per_second"}
        for row in result["rows"]:
            assert row["block_ms"] >= row["exposed_ms"] > 0 and row["waiting_ms"] >= row["exposed_ms"] * 0.999
        assert result["rows"][0]["waiting_ms"] == pytest.approx(result["rows"][0]["exposed_ms"])
    for path in [tmp_path / what / f"overlap-{rank}.json" for what in ("pipeline", "batches") for rank in range(4)]:
        events = json.loads(path.read_text())["traceEvents"]
        lanes = {way: {e["tid"] for e in events if e.get("cat") == way} for way in ("in turn", "at once")}
        assert lanes == {"in turn": {0}, "at once": {0, 1}}
