"""A run says whether its plans keep what they predict, and how sure that is."""

from __future__ import annotations

from dataclasses import replace

from observed import decisions, job, records, start

from eplb_runtime.events import LoadMeasured, RebalancePlanned
from eplb_runtime.observe.page import view_of
from eplb_runtime.observe.records import Record, record_of
from eplb_runtime.observe.run_state import state_of
from eplb_runtime.observe.summary import summary_of, summary_text

SAID = "of 87 s that plans predicted, 5 s came true (17 plans judged at 40 decisions): raise interval or window"


def predicting(**judged: float) -> list[Record]:
    """Records of a job whose decisions say what became of earlier plans."""
    events = [event for heard in decisions(2) for event in heard]
    return [job()] + [
        record_of(replace(event, **judged) if isinstance(event, RebalancePlanned) else event, start(), 1001.0)
        for event in events
    ]


def test_predictions_that_fail_are_called_so_in_summary_and_page() -> None:
    found = predicting(judged_plans=17, judged_decisions=40, predicted_seconds=87.0, true_seconds=5.0)
    state = state_of(found)
    lines = summary_text(summary_of(state), None).splitlines()
    assert len(lines) == 3 and lines[1].endswith(", 40 decisions judged in all lives"), "some at the first decision"
    assert "in 10 measured steps; imbalance" in lines[0], "of this life"
    lines = summary_text(summary_of(state_of([*found, *predicting()])), None).splitlines()
    assert "in 20 measured steps in all lives; imbalance" in lines[0], "a report of both"
    assert view_of(state)["predictions"] == SAID


def test_a_run_without_judged_plans_says_nothing_of_them() -> None:
    state = state_of(records(2))
    assert summary_of(state)["predictions"] is None and view_of(state)["predictions"] is None
    assert summary_text(summary_of(state), None).splitlines()[1].endswith("too few to be sure")


def measuring(share: float, source: str) -> list[Record]:
    """Records of a job that says the share of a step in expert work with each load."""
    events = [event for heard in decisions(2) for event in heard]
    return [job()] + [
        record_of(
            replace(event, moe_share=share, moe_share_source=source) if isinstance(event, LoadMeasured) else event,
            start(),
            1001.0,
        )
        for event in events
    ]


def shown(records: list[Record]) -> list[str]:
    """Summary and page."""
    state = state_of(records)
    return [summary_text(summary_of(state), None), view_of(state)["expert_work"]]


def test_the_share_of_a_step_in_expert_work_says_where_it_is_from() -> None:
    for said in shown(measuring(0.38, "measured")):
        assert "expert work 38 % of a step (measured)" in said
    for said in shown(records(2)):
        assert "expert work 50 % of a step (assumed)" in said, "control: until it is measured"
