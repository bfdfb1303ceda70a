"""A run says whether its plans keep what they predict, and how sure that is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from observed import decisions, job, records, start

from eplb_runtime.events import Event, LoadMeasured, RebalancePlanned
from eplb_runtime.observe.page import view_of
from eplb_runtime.observe.records import Record, record_of
from eplb_runtime.observe.run_state import state_of
from eplb_runtime.observe.summary import summary_of, summary_text

SAID = "of 87 s that plans predicted, 5 s came true (17 plans judged at 40 decisions): raise interval or window"


def saying(kind: type[Event], **fields: Any) -> list[Record]:
    """Records of a job whose events of a kind say this."""
    events = [event for heard in decisions(2) for event in heard]
    told = [replace(event, **fields) if isinstance(event, kind) else event for event in events]
    return [job()] + [record_of(event, start(), 1001.0) for event in told]


def test_predictions_that_fail_are_called_so_in_summary_and_page() -> None:
    found = saying(RebalancePlanned, judged_plans=17, judged_decisions=40, predicted_seconds=87.0, true_seconds=5.0)
    state = state_of(found)
    lines = summary_text(summary_of(state), None).splitlines()
    assert len(lines) == 3 and lines[1].endswith("judged 40 times in all lives"), "some at the first decision"
    assert "in 10 measured steps; imbalance" in lines[0], "of this life"
    lines = summary_text(summary_of(state_of([*found, *saying(RebalancePlanned)])), None).splitlines()
    assert "in 20 measured steps in all lives; imbalance" in lines[0], "a report of both"
    assert view_of(state)["predictions"] == SAID


def shown(records: list[Record]) -> list[str]:
    """Summary and page."""
    state = state_of(records)
    return [summary_text(summary_of(state), None), view_of(state)["expert_work"]]


def test_the_share_of_a_step_in_expert_work_says_where_it_is_from() -> None:
    for said in shown(saying(LoadMeasured, moe_share=0.38, moe_share_source="measured")):
        assert "expert work 38 % of a step (measured)" in said
    for said in shown(records(2)):
        assert "expert work 50 % of a step (assumed)" in said, "control: until it is measured"
